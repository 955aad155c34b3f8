"""Experts: equal to transformers in loss and gradients, packed or not, compiled or not."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from olmo_core.nn.transformer import TransformerActivationCheckpointingMode

from open_instruct.batching.documents import pack_documents
from open_instruct.core.records import Document, PackedBatch, Span
from open_instruct.models.build import build_model
from open_instruct.models.hf.names import TensorNames, unpack_tensor
from open_instruct.models.shards import find_local_shards
from open_instruct.models.transformer import SegmentTransformer
from open_instruct.training.model.routing import StepRouting, balance, record_routing
from tests.unit.models.test_family import VOCAB_SIZE, hf_config, hf_model, same_model
from tests.unit.small_models import segments_of

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (21, 1, 34)


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, VOCAB_SIZE, (1, length + 1), generator=generator) for length in LENGTHS
    ]


def packed_of(*ids_of_documents: list[int], pad_to_multiple_of: int = 1) -> PackedBatch:
    documents = [
        Document(token_ids=tuple(ids), responses=(Span(start=1, stop=len(ids)),))
        for ids in ids_of_documents
    ]
    return pack_documents(documents, pad_to_multiple_of=pad_to_multiple_of)


def summed_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")


def gradients_by_hf_name(model: SegmentTransformer, names: TensorNames) -> dict[str, torch.Tensor]:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    held = find_local_shards(model)
    return {hf_name: held[name].local for name, hf_name in names}


def gradients_of_transformers(reference: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad[part]  # type: ignore[index]
        for hf_name, parameter in reference.named_parameters()
        for name, part in unpack_tensor(hf_name, parameter.shape).items()
    }


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"mlp_only_layers": [2], "num_experts": 40, "num_experts_per_tok": 1}),
        ("olmoe", {}),
    ],
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "alone"])
def test_loss_and_gradients_are_those_of_transformers(
    family: str, fields: dict[str, Any], packed: bool
) -> None:
    config = hf_config(family, **fields)
    reference = hf_model(config)
    model = same_model(config, reference)
    expected = sum(summed_loss(reference(ids[:, :-1]).logits, ids[:, 1:]) for ids in documents())
    if packed:
        row, labels = (
            torch.cat(cut, dim=1)
            for cut in zip(*((i[:, :-1], i[:, 1:]) for i in documents()), strict=True)
        )
        loss = summed_loss(model(row, segments=segments_of(LENGTHS)), labels)
    else:
        loss = sum(summed_loss(model(ids[:, :-1]), ids[:, 1:]) for ids in documents())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    theirs = gradients_of_transformers(reference)
    ours = gradients_by_hf_name(model, TensorNames(config))
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(
            gradient, theirs[name], rtol=1e-5, atol=1e-5 * float(theirs[name].abs().max()) + 1e-7
        )


def test_balance_loss_is_that_of_transformers() -> None:
    """Its value, and the gradient of both losses together; padding behind the documents has no part
    in it.
    """
    config = hf_config(
        "qwen3_moe", mlp_only_layers=[1], output_router_logits=True, router_aux_loss_coef=0.7
    )
    reference = hf_model(config)
    model = same_model(config, reference)
    (ids, *_) = documents()
    theirs = reference(ids, labels=ids)
    theirs.loss.backward()
    assert theirs.aux_loss > 1.01

    packed = packed_of(ids[0].tolist(), pad_to_multiple_of=32)
    with record_routing(model) as routers:
        logits_BTV = model(packed.input_ids_BT, segments=segments_of(packed.document_lengths))
    ours = F.cross_entropy(logits_BTV[0, : ids.shape[1] - 1], ids[0, 1:])
    added, metrics = balance(model, routers, packed, share=1.0)
    torch.testing.assert_close(
        float(metrics["router/balance_loss"].value), theirs.aux_loss.item(), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(ours + added, theirs.loss, rtol=1e-6, atol=0)
    (ours + added).backward()
    names = TensorNames(config)
    expected = gradients_of_transformers(reference)
    for name, gradient in gradients_by_hf_name(model, names).items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-5, atol=1e-5 * float(expected[name].abs().max())
        )


def test_balance_loss_of_a_step_does_not_depend_on_its_microbatches() -> None:
    """Neither its value nor its gradient; that of single microbatches does."""
    config = hf_config("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.7)
    documents_of_step = [list(range(3, 40)), list(range(60, 50, -1)), [7] * 20]
    losses: list[torch.Tensor] = []
    gradients: list[dict[str, torch.Tensor]] = []
    for cut in ([[0, 1, 2]], [[0], [1, 2]], [[2], [1], [0]]):
        model = same_model(config, hf_model(config))
        batches = [
            packed_of(*(documents_of_step[index] for index in part), pad_to_multiple_of=8)
            for part in cut
        ]

        def run_forward(batch: PackedBatch, model: SegmentTransformer = model) -> None:
            model(batch.input_ids_BT, segments=segments_of(batch.document_lengths))

        step_routing = StepRouting(None)
        if len(batches) > 1:
            step_routing.count_microbatches(model, batches, run_forward)
        parts = []
        for batch in batches:
            with record_routing(model) as routers:
                run_forward(batch)
            added, _ = balance(
                model, routers, batch, share=1 / len(batches), step_routing=step_routing
            )
            added.backward()
            parts.append(added.detach())
        losses.append(torch.stack(parts).sum())
        gradients.append(
            {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        )
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=0)
        assert gradient.keys() == gradients[0].keys() != set()
        for name, expected in gradients[0].items():
            torch.testing.assert_close(
                gradient[name], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
            )


def test_recomputed_blocks_note_their_routers_once_and_have_the_same_gradient() -> None:
    config = hf_config("qwen3_moe", output_router_logits=True)
    gradients = []
    for is_recomputed in (False, True):
        model = same_model(config, hf_model(config))
        if is_recomputed:
            model.apply_activation_checkpointing(TransformerActivationCheckpointingMode.full)
        packed = packed_of(list(range(3, 40)))
        with record_routing(model) as routers:
            with torch.no_grad():  # as a teacher that is the policy without its adapters
                model(packed.input_ids_BT.flip(1), segments=segments_of(packed.document_lengths))
            logits_BTV = model(packed.input_ids_BT, segments=segments_of(packed.document_lengths))
        assert [len(layer._recorded) for layer in routers] == [1] * len(routers)
        added, _ = balance(model, routers, packed, share=0.5)
        (logits_BTV.square().mean() + added).backward()
        assert not any(layer.take_routing() for layer in routers), (
            "once, and not again in the backward pass"
        )
        gradients.append(gradients_by_hf_name(model, TensorNames(config)))
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize(
    ("logits", "max_load", "entropy"), [([0.0, 0, 0, 0], 2.0, 4.0), ([9.0, 9, -90, -90], 2.0, 2.0)]
)
def test_metrics_of_routers_by_hand(logits: list[float], max_load: float, entropy: float) -> None:
    """Two of four experts get all tokens: twice the mean.

    The entropy is that of as many equal choices.
    """
    model = build_model(
        hf_config("olmoe", num_experts=4, num_experts_per_tok=2, num_hidden_layers=1)
    )
    packed = packed_of([5, 6, 7])
    with record_routing(model) as routers:
        probs_TE = torch.tensor([logits] * 3).softmax(dim=-1)
        routers[0]._record_routing(probs_TE, probs_TE.topk(2).indices)
    loss, metrics = balance(model, routers, packed, share=1.0)
    assert loss == 0.0 and metrics.keys() == {"router/entropy", "router/max_load"}
    assert float(metrics["router/max_load"].value) == max_load
    assert float(metrics["router/entropy"].value) == pytest.approx(math.log(entropy), abs=1e-6)
    assert metrics["router/entropy"].weight == 3
