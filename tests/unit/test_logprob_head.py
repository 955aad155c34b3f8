"""Chunked or whole, the head gives the same losses and the same gradients."""

from __future__ import annotations

import pytest
import torch

from open_instruct.learner.model.forward import token_logprobs
from open_instruct.models.build import build_model, materialize
from open_instruct.packing.documents import pack_documents
from open_instruct.records import IGNORE_INDEX, Document, Span
from open_instruct.toys.tiny import SIZES, tiny_config

VOCAB_SIZE = 300


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 7])
def test_chunks_change_nothing(tie: bool, rows_per_chunk: int) -> None:
    torch.manual_seed(0)
    model = build_model(tiny_config("olmo2", SIZES["tiny"], vocab_size=VOCAB_SIZE, tie=tie))
    materialize(model, device=torch.device("cpu"), max_seq_len=16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    input_ids = torch.randint(0, VOCAB_SIZE, (2, 9))
    labels = torch.randint(0, VOCAB_SIZE, (2, 9))
    labels[0, 2] = IGNORE_INDEX
    keep = torch.tensor([[1, 2, 5, 8], [0, 3, 3, 7]])

    results = []
    for rows in (1000, rows_per_chunk):
        model.lm_head.max_logits_bytes = rows * 4 * VOCAB_SIZE
        model.zero_grad()
        output = model(
            input_ids,
            labels=labels,
            ignore_index=IGNORE_INDEX,
            loss_reduction="none",
            return_logits=False,
            logits_to_keep=keep,
        )
        weights = torch.linspace(0.5, 1.5, output.loss.numel()).view_as(output.loss)
        (output.loss * weights).sum().backward()
        results.append((output.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))

    (whole, whole_grads), (chunked, chunked_grads) = results
    assert whole[0, 1] == 0 and whole.count_nonzero() == 7
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=1e-6)
    for name, grad in whole_grads.items():
        assert grad.abs().sum() > 0, name
        torch.testing.assert_close(chunked_grads[name], grad, rtol=1e-5, atol=1e-7)


def test_only_one_chunk_of_logits_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(tiny_config("llama", SIZES["tiny"], vocab_size=VOCAB_SIZE, tie=False))
    materialize(model, device=torch.device("cpu"), max_seq_len=16)
    shapes = []
    forward = model.lm_head.w_out.forward
    monkeypatch.setattr(model.lm_head.w_out, "forward", lambda h: shapes.append(tuple(h.shape)) or forward(h))
    model.lm_head.max_logits_bytes = 4 * 4 * VOCAB_SIZE
    model(
        torch.zeros(1, 10, dtype=torch.long),
        labels=torch.zeros(1, 10, dtype=torch.long),
        loss_reduction="none",
        return_logits=False,
        logits_to_keep=torch.arange(10)[None],
    )
    assert [shape[0] for shape in shapes] == [4, 4, 2]


@pytest.mark.parametrize("temperatures", [[0.5] * 6, [0.5, 1.0, 2.0, 1.0, 1.0, 0.25]])
@pytest.mark.parametrize("rows_per_chunk", [2, 1000])
def test_temperature_entropy_and_collisions(rows_per_chunk: int, temperatures: list[float]) -> None:
    torch.manual_seed(0)
    model = build_model(tiny_config("olmo2", SIZES["tiny"], vocab_size=VOCAB_SIZE, tie=False))
    materialize(model, device=torch.device("cpu"), max_seq_len=16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    ids = torch.randint(0, VOCAB_SIZE, (9,)).tolist()
    batch = pack_documents([document(ids[:5], num_prompt=2), document(ids[5:], num_prompt=1)], pad_to_multiple_of=12)
    model.lm_head.max_logits_bytes = rows_per_chunk * 4 * VOCAB_SIZE
    temperature = 0.5 if set(temperatures) == {0.5} else torch.tensor(temperatures)
    tokens = token_logprobs(
        model, batch, device=torch.device("cpu"), temperature=temperature, with_entropy=True, with_collisions=True
    )

    lengths = torch.tensor([batch.document_lengths], dtype=torch.int32)
    positions, labels = [1, 2, 3, 5, 6, 7], [*ids[2:5], *ids[6:9]]
    divisors_T1 = torch.ones(batch.input_ids_BT.shape[1], 1).index_copy(
        0, torch.tensor(positions), torch.tensor(temperatures)[:, None]
    )
    logits_TV = model(batch.input_ids_BT, doc_lens=lengths, max_doc_lens=[5])[0].float() / divisors_T1
    logprobs_TV = logits_TV.log_softmax(dim=-1)
    torch.testing.assert_close(tokens.logprobs_N, logprobs_TV[positions, labels], rtol=1e-5, atol=1e-5)
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(dim=-1)
    assert tokens.entropy_N is not None and not tokens.entropy_N.requires_grad
    torch.testing.assert_close(tokens.entropy_N, entropy_T[positions].detach(), rtol=1e-5, atol=1e-5)
    assert tokens.collision_logprobs_N is not None and not tokens.collision_logprobs_N.requires_grad
    expected_T = logprobs_TV.exp().square().sum(dim=-1).log()
    torch.testing.assert_close(tokens.collision_logprobs_N, expected_T[positions].detach(), rtol=1e-5, atol=1e-5)
    assert tokens.sequence_ids_N.tolist() == [0, 0, 0, 1, 1, 1]

    # The chunks that are computed again in the backward pass keep the temperature, and nobody else gets it.
    ours, theirs = (
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for loss in (tokens.logprobs_N.sum(), logprobs_TV[positions, labels].sum())
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    plain = token_logprobs(model, batch, device=torch.device("cpu"))
    assert plain.entropy_N is None and plain.collision_logprobs_N is None
    assert not torch.allclose(plain.logprobs_N, tokens.logprobs_N)


def document(ids: list[int], *, num_prompt: int) -> Document:
    return Document(token_ids=tuple(ids), responses=(Span(start=num_prompt, stop=len(ids)),))
