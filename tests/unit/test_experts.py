"""Experts: equal to transformers in loss and gradients, packed or not, compiled or not."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from open_instruct.models.hf.names import TensorNames, unpacked
from open_instruct.models.shards import held_of
from open_instruct.models.transformer import SegmentTransformer
from tests.unit.test_family import VOCAB_SIZE, hf_config, hf_model, same_model

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (21, 1, 34)


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (1, length + 1), generator=generator) for length in LENGTHS]


def summed_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")


def gradients_by_hf_name(model: SegmentTransformer, names: TensorNames) -> dict[str, torch.Tensor]:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    held = held_of(model)
    return {hf_name: held[name].local for name, hf_name in names}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"mlp_only_layers": [2], "num_experts": 40, "num_experts_per_tok": 1}),
        ("olmoe", {}),
    ],
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "alone"])
def test_loss_and_gradients_are_those_of_transformers(family: str, fields: dict[str, Any], packed: bool) -> None:
    config = hf_config(family, **fields)
    reference = hf_model(config)
    model = same_model(config, reference)
    expected = sum(summed_loss(reference(ids[:, :-1]).logits, ids[:, 1:]) for ids in documents())
    if packed:
        row, labels = (torch.cat(cut, dim=1) for cut in zip(*((i[:, :-1], i[:, 1:]) for i in documents()), strict=True))
        loss = summed_loss(model(row, doc_lens=torch.tensor([LENGTHS])), labels)
    else:
        loss = sum(summed_loss(model(ids[:, :-1]), ids[:, 1:]) for ids in documents())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    theirs = {
        name: parameter.grad[part]
        for hf_name, parameter in reference.named_parameters()
        for name, part in (unpacked(hf_name, parameter.shape) or {hf_name: ()}).items()
    }
    ours = gradients_by_hf_name(model, TensorNames(config))
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(
            gradient, theirs[name], rtol=1e-5, atol=1e-5 * float(theirs[name].abs().max()) + 1e-7
        )
