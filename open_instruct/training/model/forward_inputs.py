"""What one rank's forward pass takes of a batch: its tokens, and where its head runs.

All of it is computed on the CPU, so that nothing waits for the device.

B rows, T tokens of a row, K label positions kept for the language-model head, N labelled tokens.
"""

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from olmo_core.nn.transformer import Transformer

from open_instruct.batching.documents import find_label_positions, move_to_device
from open_instruct.core.records import IGNORE_INDEX, PackedBatch
from open_instruct.models.attention.attention import find_context_group
from open_instruct.models.attention.segments import Segments
from open_instruct.models.heads.logprob_head import LogprobHead


class ForwardInputs(NamedTuple):
    """The inputs of a forward pass: this rank's tokens, and the other arguments of its model.

    `labelled_N` are the indices of labels among the output's values, for the whole row, and
    `sequence_ids_N` their documents.
    """

    input_ids_BT: torch.Tensor
    model_kwargs: dict[str, Any]
    labelled_N: torch.Tensor
    sequence_ids_N: torch.Tensor
    routes_TR: torch.Tensor | None


def build_forward_inputs(model: Transformer, batch: PackedBatch) -> ForwardInputs:
    """This rank's part of `batch`, on the CPU."""
    local, kept_BK = local_slice(model, batch)
    model_kwargs: dict[str, Any] = {
        "labels": local.labels_BT,
        "segments": find_segments(model, batch),
    }
    labelled_N = batch.label_positions_N
    if kept_BK is not None:
        model_kwargs["logits_to_keep"] = kept_BK
        if find_context_group(model) is None:
            labelled_N = find_kept_labels(batch, kept_BK)
    return ForwardInputs(
        local.input_ids_BT, model_kwargs, labelled_N, batch.sequence_ids_N, local.routes_TR
    )


def local_slice(model: Transformer, batch: PackedBatch) -> tuple[PackedBatch, torch.Tensor | None]:
    """This rank's tokens of the batch, and the positions where its head runs.

    Under tensor parallelism these are None: it runs at all of them.
    """
    context = find_context_group(model)
    if context is not None:
        # Labels are shifted already, so none is lost where the row is cut.
        part = context.local_slice(batch.input_ids_BT.shape[1])
        routes_TR = batch.routes_TR
        if routes_TR is not None:
            routes_TR = routes_TR[part]
        batch = replace(
            batch,
            kept_BK=None,
            input_ids_BT=batch.input_ids_BT[:, part],
            labels_BT=batch.labels_BT[:, part],
            routes_TR=routes_TR,
        )
    if model.tp_enabled:
        return batch, None
    if batch.kept_BK is not None:
        return batch, batch.kept_BK
    return batch, find_label_positions(batch)


def find_segments(model: Transformer, batch: PackedBatch) -> Segments:
    """What attends to what in the rows; of rows that are split, the positions of this rank."""
    num_rows, row_len = batch.input_ids_BT.shape
    lengths = batch.document_lengths
    if lengths is None:
        lengths = (row_len,) * num_rows
    assert sum(lengths) == num_rows * row_len, (
        "a token of no document would be computed from nothing"
    )
    prefixes = batch.prefix_lengths or (0,) * len(lengths)
    segments = Segments.from_lengths(lengths, prefixes, device=torch.device("cpu"))
    context = find_context_group(model)
    if context is None:
        return segments
    assert batch.document_lengths is not None, "padded rows are not split over ranks"
    return segments._replace(positions_T=segments.positions_T[context.local_slice(row_len)])


def find_kept_labels(batch: PackedBatch, kept_BK: torch.Tensor) -> torch.Tensor:
    """The place of each label among the kept positions, (N,).

    Each row has as many kept positions, in the order of its labels.
    """
    num_rows, num_kept = kept_BK.shape
    ranks_BT = (batch.labels_BT != IGNORE_INDEX).cumsum(dim=1) - 1
    rows_B1 = torch.arange(num_rows).unsqueeze(1)
    return (ranks_BT + num_kept * rows_B1).flatten()[batch.label_positions_N]


def select_at_head(model: Transformer, batch: PackedBatch, values_BT: torch.Tensor) -> torch.Tensor:
    """The values at the positions where the head of `model` runs on this rank."""
    _, kept_BK = local_slice(model, batch)
    if kept_BK is None:
        return cast(LogprobHead, model.lm_head).select_local_positions(values_BT)
    rows_B1 = torch.arange(len(values_BT), device=values_BT.device).unsqueeze(1)
    return values_BT[rows_B1, move_to_device(kept_BK, values_BT.device)]


def place_at_labels(
    model: Transformer,
    batch: PackedBatch,
    values_N: torch.Tensor,
    *,
    device: torch.device,
) -> torch.Tensor:
    """Values of labels (further axes may follow), at the positions where the head of `model` runs.

    Positions without a label get 0. A `Measure` takes them.
    """
    flat_T = values_N.new_zeros(batch.labels_BT.numel(), *values_N.shape[1:])
    flat_T[batch.label_positions_N] = values_N
    assert torch.equal(flat_T[batch.label_positions_N], values_N), (
        "documents share a position, but not its value"
    )
    values_BT = flat_T.unflatten(0, batch.labels_BT.shape)
    context = find_context_group(model)
    if context is not None:
        values_BT = values_BT[:, context.local_slice(values_BT.shape[1])]
    return move_to_device(select_at_head(model, batch, values_BT), device)
