"""The one forward pass that policy and reference share.

B rows, T tokens of a row, K label positions kept for the language-model head, S documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from olmo_core.nn.transformer import Transformer
from torch.distributed.tensor import DTensor

from open_instruct.losses.logprobs import sum_by_sequence
from open_instruct.packing.documents import kept_positions
from open_instruct.records import IGNORE_INDEX, PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLogprobs:
    """Sum of the label log-probs of every document, and how many labels it has."""

    sums_S: torch.Tensor
    lengths_S: torch.Tensor


def sequence_logprobs(model: Transformer, batch: PackedBatch, *, device: torch.device) -> SequenceLogprobs:
    """Log-prob of every document's reply under `model`: float32, shape (S,), with gradient if enabled.

    The language-model head runs only where there are labels. Under tensor parallelism the hidden
    states are split along T, so there the head runs everywhere and the result is gathered.
    """
    kwargs: dict[str, object] = {}
    if batch.document_lengths is not None:
        kwargs["doc_lens"] = torch.tensor([batch.document_lengths], dtype=torch.int32, device=device)
        kwargs["max_doc_lens"] = [max(batch.document_lengths)]
    if model.tp_enabled:
        sequence_ids = batch.sequence_ids_BT
    else:
        kept = kept_positions(batch)
        sequence_ids = kept.sequence_ids_BK
        kwargs["logits_to_keep"] = kept.positions_BK.to(device)

    output = model(
        batch.input_ids_BT.to(device),
        labels=batch.labels_BT.to(device),
        ignore_index=IGNORE_INDEX,
        loss_reduction="none",
        return_logits=False,
        **kwargs,
    )
    # With no reduction the head's loss is -log p of each label, and 0 where there is none.
    logprobs = -output.loss
    if isinstance(logprobs, DTensor):
        logprobs = logprobs.full_tensor()
    sums_S, lengths_S = sum_by_sequence(logprobs, sequence_ids.to(device), batch.num_sequences)
    return SequenceLogprobs(sums_S=sums_S, lengths_S=lengths_S)
