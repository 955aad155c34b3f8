"""The one forward pass that policy and reference share.

B rows, T tokens of a row, K label positions kept for the language-model head, N labelled tokens, S documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from olmo_core.nn.transformer import Transformer
from torch.distributed.tensor import DTensor

from open_instruct.losses.logprobs import sum_by_sequence
from open_instruct.models.logprob_head import head_settings
from open_instruct.models.segments import Segments
from open_instruct.packing.documents import kept_positions
from open_instruct.records import IGNORE_INDEX, PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-prob of every labelled token (nats, float32), row by row in the order of the labels, and whose it is.

    `entropy_N` is that of the distribution the token was drawn from; it carries no gradient.
    """

    logprobs_N: torch.Tensor
    sequence_ids_N: torch.Tensor
    entropy_N: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLogprobs:
    """Sum of the label log-probs of every document, and how many labels it has."""

    sums_S: torch.Tensor
    lengths_S: torch.Tensor


def token_logprobs(
    model: Transformer,
    batch: PackedBatch,
    *,
    device: torch.device,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> TokenLogprobs:
    """Log-prob of every label under `model` with its logits divided by `temperature`, with gradient if enabled.

    `batch` is on the CPU. The language-model head runs only where there are labels. Under tensor parallelism the
    hidden states are split along T, so there the head runs everywhere and the result is gathered.
    """
    kwargs: dict[str, object] = {}
    if batch.prefix_lengths is not None:
        assert batch.document_lengths is not None
        kwargs["segments"] = Segments.of(batch.document_lengths, batch.prefix_lengths, device=device)
    elif batch.document_lengths is not None:
        kwargs["doc_lens"] = torch.tensor([batch.document_lengths], dtype=torch.int32, device=device)
        kwargs["max_doc_lens"] = [max(batch.document_lengths)]
    if model.tp_enabled:
        sequence_ids = batch.sequence_ids_BT
    else:
        kept = kept_positions(batch)
        sequence_ids = kept.sequence_ids_BK
        kwargs["logits_to_keep"] = kept.positions_BK.to(device)

    with head_settings(model, temperature=temperature, with_entropy=with_entropy):
        output = model(
            batch.input_ids_BT.to(device),
            labels=batch.labels_BT.to(device),
            ignore_index=IGNORE_INDEX,
            loss_reduction="none",
            return_logits=False,
            **kwargs,
        )
    # Computed on the CPU, where the ids are: no wait for the device.
    labelled_N = (sequence_ids.flatten() >= 0).nonzero().squeeze(1)
    return TokenLogprobs(
        logprobs_N=-_selected(output.loss, labelled_N),
        sequence_ids_N=sequence_ids.flatten()[labelled_N].to(device),
        entropy_N=_selected(output.entropy, labelled_N) if with_entropy else None,
    )


def sequence_logprobs(model: Transformer, batch: PackedBatch, *, device: torch.device) -> SequenceLogprobs:
    """Log-prob of every document's reply under `model`: float32, shape (S,), with gradient if enabled."""
    tokens = token_logprobs(model, batch, device=device)
    sums_S, lengths_S = sum_by_sequence(tokens.logprobs_N, tokens.sequence_ids_N, batch.num_sequences)
    return SequenceLogprobs(sums_S=sums_S, lengths_S=lengths_S)


def _selected(values: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """The values at flat positions, gathered first where ranks hold a part each."""
    if isinstance(values, DTensor):
        values = values.full_tensor()
    return values.flatten().index_select(0, positions_N.to(values.device))
