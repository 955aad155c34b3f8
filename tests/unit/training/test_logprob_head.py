"""Chunked or whole, the head gives the same losses and the same gradients."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from open_instruct.batching.documents import pack_documents
from open_instruct.core.records import IGNORE_INDEX, Document, Span
from open_instruct.models.heads.logprob_head import Measure
from open_instruct.parallel.listening import LOOPBACK_INTERFACE
from open_instruct.training.model.forward import place_at_labels, token_logprobs
from tests.unit.small_models import CPU, VOCAB_SIZE, new_model, random_model, segments_of

pytestmark = pytest.mark.usefixtures("one_thread")

KEPT = torch.tensor([[1, 2, 5, 8], [0, 3, 3, 7]])


def losses(model: Any, labels: torch.Tensor) -> torch.Tensor:
    """Of all label positions that are kept."""
    ids = torch.arange(labels.numel()).view_as(labels) % VOCAB_SIZE
    flags: dict[str, Any] = {
        "ignore_index": IGNORE_INDEX,
        "loss_reduction": "none",
        "return_logits": False,
    }
    loss: torch.Tensor = model(ids, labels=labels, logits_to_keep=KEPT, **flags).loss
    return loss


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(
    ("rows_per_chunk", "num_kept"), [(1, 0), (3, 0), (7, 0), (3, 1), (3, 3), (1, 4)]
)
def test_chunks_change_nothing(
    tie: bool, rows_per_chunk: int, num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is kept of them, as it is on a GPU alone."""
    model = new_model("olmo2", tie_word_embeddings=tie)
    monkeypatch.setattr(model.lm_head, "_count_kept", lambda *given: num_kept)
    labels = torch.randint(0, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(0))
    labels[0, 2] = IGNORE_INDEX
    results = []
    for rows in (1000, rows_per_chunk):
        model.lm_head.max_logits_bytes = rows * 4 * VOCAB_SIZE
        loss = losses(model, labels)
        weights = torch.linspace(0.5, 1.5, loss.numel()).view_as(loss)
        results.append(
            (loss.detach(), torch.autograd.grad((loss * weights).sum(), list(model.parameters())))
        )
    (whole, whole_grads), (chunked, chunked_grads) = results
    assert whole[0, 1] == 0 and whole.count_nonzero() == 7
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=1e-6)
    assert all(grad.abs().sum() > 0 for grad in whole_grads)
    torch.testing.assert_close(chunked_grads, whole_grads, rtol=1e-5, atol=1e-5)


def test_only_one_chunk_of_logits_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("llama")
    shapes = []
    forward = model.lm_head.w_out.forward
    monkeypatch.setattr(
        model.lm_head.w_out, "forward", lambda h: shapes.append(tuple(h.shape)) or forward(h)
    )
    model.lm_head.max_logits_bytes = 3 * 4 * VOCAB_SIZE
    losses(model, torch.zeros(2, 9, dtype=torch.long))
    assert [shape[0] for shape in shapes] == [3, 3, 2]


@pytest.mark.parametrize(
    ("max_kept_bytes", "products"), [(0, 6), (2 * 3 * 4 * VOCAB_SIZE, 4), (1 << 30, 3)]
)
def test_chunk_that_is_kept_needs_no_second_product(
    max_kept_bytes: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three chunks of three positions."""
    model, shapes = new_model("llama"), []
    forward = model.lm_head.w_out.forward
    monkeypatch.setattr(
        model.lm_head.w_out, "forward", lambda h: shapes.append(tuple(h.shape)) or forward(h)
    )
    model.lm_head.max_logits_bytes, model.lm_head.max_kept_bytes = (
        3 * 4 * VOCAB_SIZE,
        max_kept_bytes,
    )
    num_kept = model.lm_head._count_kept
    on_gpu = SimpleNamespace(is_cuda=True, itemsize=4)
    monkeypatch.setattr(
        model.lm_head, "_count_kept", lambda h_BKD, num_positions: num_kept(on_gpu, num_positions)
    )
    losses(model, torch.zeros(2, 9, dtype=torch.long)).sum().backward()
    assert len(shapes) == products


@pytest.mark.parametrize("temperatures", [[0.5] * 6, [0.5, 1.0, 2.0, 1.0, 1.0, 0.25]])
@pytest.mark.parametrize("rows_per_chunk", [2, 1000])
def test_temperature_entropy_and_collisions(
    rows_per_chunk: int, temperatures: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("olmo2")
    monkeypatch.setattr(model.lm_head, "max_logits_bytes", rows_per_chunk * 4 * VOCAB_SIZE)
    ids = (3, 14, 15, 9, 26, 5, 35, 8, 9)
    documents = [
        Document(token_ids=ids[:5], responses=(Span(start=2, stop=5),)),
        Document(token_ids=ids[5:], responses=(Span(start=1, stop=4),)),
    ]
    batch = pack_documents(documents, pad_to_multiple_of=12)
    temperature = 0.5 if set(temperatures) == {0.5} else torch.tensor(temperatures)
    ours = token_logprobs(
        model, batch, device=CPU, temperature=temperature, with_entropy=True, with_collisions=True
    )
    assert ours.sequence_ids_N.tolist() == [0, 0, 0, 1, 1, 1]
    assert ours.entropy_N is not None and not ours.entropy_N.requires_grad
    assert ours.collision_logprobs_N is not None and not ours.collision_logprobs_N.requires_grad

    positions, labels = [1, 2, 3, 5, 6, 7], [*ids[2:5], *ids[6:9]]
    logits_NV = model(batch.input_ids_BT, segments=segments_of(batch.document_lengths))[
        0, positions
    ]
    logits_NV = logits_NV / torch.tensor(temperatures)[:, None]
    logprobs_NV = logits_NV.log_softmax(dim=-1)
    expected_N = logprobs_NV[range(6), labels]
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    collisions_N = logprobs_NV.exp().square().sum(dim=-1).log()
    torch.testing.assert_close(ours.logprobs_N, expected_N, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.entropy_N, entropy_N.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        ours.collision_logprobs_N, collisions_N.detach(), rtol=1e-5, atol=1e-5
    )
    # The chunks that are computed again in the backward pass keep the temperature, and nobody else
    # gets it.
    parameters = list(model.parameters())
    ours_grads = torch.autograd.grad(ours.logprobs_N.sum(), parameters)
    torch.testing.assert_close(
        ours_grads, torch.autograd.grad(expected_N.sum(), parameters), rtol=1e-4, atol=1e-4
    )
    plain = token_logprobs(model, batch, device=CPU)
    assert plain.entropy_N is None and plain.collision_logprobs_N is None
    assert not torch.allclose(plain.logprobs_N, ours.logprobs_N)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fsdp_does_not_round_what_a_head_compares_with(one_rank: None) -> None:
    """It casts tensors that it finds in arguments to the compute dtype, in which the token 50001 is
    49920.
    """
    model = new_model("olmo2")
    model.apply_fsdp(
        init_device_mesh("cpu", (1,)), torch.bfloat16, torch.float32, prefetch_factor=0
    )
    batch = pack_documents([Document(token_ids=(5, 6, 7), responses=(Span(start=1, stop=3),))])
    kept_N = torch.tensor([50001.0, 0.7])
    measure = Measure(
        lambda logits_NV, kept_N: kept_N, (place_at_labels(model, batch, kept_N, device=CPU),)
    )
    measured_N = token_logprobs(model, batch, device=CPU, measure=measure).measured_N
    assert measured_N is not None and torch.equal(measured_N, kept_N)
