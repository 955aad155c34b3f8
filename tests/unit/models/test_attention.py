"""Packed rows compute what their documents compute one at a time."""

import pytest
import torch
import torch.nn.functional as F
from olmo_core.nn.transformer import Transformer

from open_instruct.core.families import FAMILIES
from open_instruct.models.attention.attention import SegmentAttention
from open_instruct.models.attention.segments import Segments
from open_instruct.models.build import build_model
from open_instruct.models.family import build_transformer_config
from tests.unit.small_models import (
    CPU,
    VOCAB_SIZE,
    WINDOW,
    hf_config,
    new_model,
    random_model,
    segments_of,
    with_random_weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = {
    "mixed": (5, 23, 1, 12, 23, 8),
    "of length 1": (1, 1, 1),
    "many short": (2, 1, 3) * 6,
    "one": (40,),
    "just over the window": (WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1),
}


def random_ids(num_rows: int, row_len: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(
        0, VOCAB_SIZE, (num_rows, row_len), generator=torch.Generator().manual_seed(seed)
    )


def packed_logits(
    model: Transformer, input_ids_BT: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    return model(input_ids_BT, segments=segments_of(lengths))


def logits_one_at_a_time(
    model: Transformer, tokens_T: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    return torch.cat([model(document.unsqueeze(0)) for document in tokens_T.split(lengths)], dim=1)


def gradients(model: Transformer, logits_BTV: torch.Tensor) -> list[torch.Tensor]:
    weights = (
        torch.randn(logits_BTV.shape, generator=torch.Generator().manual_seed(2))
        / logits_BTV.numel()
    )
    return list(torch.autograd.grad((logits_BTV * weights).sum(), list(model.parameters())))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_one_at_a_time(family: str, lengths: tuple[int, ...]) -> None:
    model = random_model(family)
    input_ids_BT = random_ids(1, sum(lengths))
    packed = packed_logits(model, input_ids_BT, lengths)
    separate = logits_one_at_a_time(model, input_ids_BT[0], lengths)
    torch.testing.assert_close(packed, separate, atol=1e-5, rtol=1e-5)
    for ours, expected in zip(gradients(model, packed), gradients(model, separate), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_packed_rows(family: str) -> None:
    """The documents of all rows follow each other."""
    model = random_model(family)
    input_ids_BT = random_ids(2, 20)
    lengths = (9, 11, 4, 12, 4)
    packed = packed_logits(model, input_ids_BT, lengths)
    separate = logits_one_at_a_time(model, input_ids_BT.flatten(), lengths).view(packed.shape)
    torch.testing.assert_close(packed, separate, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_the_right_is_not_seen(family: str) -> None:
    model = random_model(family)
    lengths, row_len = (17, 4, 20), 20
    documents = random_ids(1, sum(lengths))[0].split(lengths)
    padded = torch.stack(
        [F.pad(document, (0, row_len - len(document)), value=0) for document in documents]
    )
    with torch.no_grad():
        logits_BTV = model(padded)
        for row, document in zip(logits_BTV, documents, strict=True):
            expected = model(document.unsqueeze(0))[0]
            torch.testing.assert_close(row[: len(document)], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_do_not_see_each_other(family: str) -> None:
    """Exactly: another neighbour changes no bit of a document's logits."""
    model = random_model(family)
    one, other = random_ids(1, 30, seed=3), random_ids(1, 30, seed=4)
    other[:, 10:18] = one[:, 10:18]
    with torch.no_grad():
        logits_of_one, logits_of_other = (
            packed_logits(model, ids, (10, 8, 12)) for ids in (one, other)
        )
    # The products of an expert have other sizes where other documents have more or fewer of its
    # tokens.
    atol = 0.0 if FAMILIES[family].expert_size is None else 1e-5
    torch.testing.assert_close(
        logits_of_one[:, 10:18], logits_of_other[:, 10:18], atol=atol, rtol=0
    )
    assert not torch.equal(logits_of_one[:, 18:], logits_of_other[:, 18:])


# Layers of our own have no other backend.
@pytest.mark.parametrize(
    "family", [name for name, family in FAMILIES.items() if family.delta is None]
)
def test_attention_without_documents_equals_the_stock_backend(family: str) -> None:
    model = random_model(family)
    stock = build_transformer_config(hf_config(family)).build(init_device="cpu")
    for block in stock.blocks.values():
        block.attention.w_out.register_parameter("bias", None)  # no family has one there
    with_random_weights(stock)
    input_ids_BT = random_ids(2, 33)
    ours, theirs = model(input_ids_BT), stock(input_ids_BT)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for a, b in zip(gradients(model, ours), gradients(stock, theirs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_packed_is_one_at_a_time(family: str) -> None:
    model, lengths = new_model(family).to(torch.bfloat16), LENGTHS["mixed"]
    input_ids_BT = random_ids(1, sum(lengths))
    with torch.no_grad():
        packed = packed_logits(model, input_ids_BT, lengths)
        separate = logits_one_at_a_time(model, input_ids_BT[0], lengths)
    assert packed.dtype == torch.bfloat16
    assert (packed - separate).float().norm() < 0.02 * separate.float().norm()


def test_layers_share_the_tables_of_their_positions() -> None:
    """One pair for all layers that turn alike;

    OLMo 3's sliding layers do not turn as its full ones do.
    """
    scaling = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 500_000,
    }
    config = hf_config("olmo3")
    config.rope_parameters = {
        "full_attention": scaling,
        "sliding_attention": {"rope_type": "default", "rope_theta": 500_000},
    }
    for made, num_pairs in ((hf_config("qwen3"), 1), (config, 2)):
        model = build_model(made)
        model.init_weights(device=CPU, max_seq_len=64)
        assert (
            len({rope.get_buffers(64, CPU).pos_sin.data_ptr() for rope in model.ropes}) == num_pairs
        )


@pytest.mark.gpu
@pytest.mark.parametrize("left", [-1, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_on_a_gpu_equals_that_on_a_cpu(dtype: torch.dtype, left: int) -> None:
    lengths = LENGTHS["mixed"]
    window_size = (left, 0) if left >= 0 else (-1, -1)
    backend = SegmentAttention(head_dim=16, n_heads=4, n_kv_heads=2, window_size=window_size)
    qkv = [torch.randn(1, sum(lengths), heads, 16).to(dtype) for heads in (4, 2, 2)]

    def output_and_gradients(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in qkv]
        segments = Segments.from_lengths(lengths, (0,) * len(lengths), device=torch.device(device))
        output = backend(tuple(inputs), cu_doc_lens=segments)
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    on_gpu = output_and_gradients("cuda", dtype)
    on_cpu = output_and_gradients("cpu", torch.float32)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for ours, expected in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(ours.float().cpu(), expected, atol=tolerance, rtol=tolerance)
