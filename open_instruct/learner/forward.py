"""The one forward pass that policy and reference share.

B rows, T tokens of a row, K label positions kept for the language-model head, N labelled tokens, S documents.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from olmo_core.nn.transformer import Transformer
from torch.distributed.tensor import DTensor

from open_instruct.models.context_parallel import ContextGroup, context_of
from open_instruct.models.logprob_head import HeadSettings, LabelLosses, head_settings
from open_instruct.models.segments import Segments
from open_instruct.objectives.objective import TokenLogprobs
from open_instruct.packing.documents import kept_positions
from open_instruct.records import IGNORE_INDEX, KeptPositions, PackedBatch


def token_logprobs(
    model: Transformer,
    batch: PackedBatch,
    *,
    device: torch.device,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_collisions: bool = False,
    classes: tuple[int, ...] = (),
) -> TokenLogprobs:
    """Log-prob of every label under `model` with its logits divided by `temperature`, with gradient if enabled.

    `batch` is on the CPU. The language-model head runs only where there are labels. Under tensor parallelism the
    hidden states are split along T, so there the head runs everywhere and the result is gathered. Where rows are split
    over ranks, each runs its part and all of them get the log-probs of the whole row.

    Of a model that scores, or with `classes` (ids of words), also what its head says there: see `TokenLogprobs`.
    """
    context = context_of(model)
    whole, kwargs = batch, dict[str, object]()
    if batch.prefix_lengths is not None or context is not None:
        lengths = batch.document_lengths
        assert lengths is not None, "padded rows neither share prompts nor are split over ranks"
        segments = Segments.of(lengths, batch.prefix_lengths or (0,) * len(lengths), device=device)
        if context is not None:
            part = context.part_of(batch.input_ids_BT.shape[1])
            batch, segments = _part_of_row(batch, part), segments._replace(positions_T=segments.positions_T[part])
        kwargs["segments"] = segments
    elif batch.document_lengths is not None:
        kwargs["doc_lens"] = torch.tensor([batch.document_lengths], dtype=torch.int32, device=device)
        kwargs["max_doc_lens"] = [max(batch.document_lengths)]
    kept = None if model.tp_enabled else batch.kept or kept_positions(batch)
    if kept is not None:
        kwargs["logits_to_keep"] = kept.positions_BK.to(device)

    with head_settings(model, HeadSettings(temperature, with_entropy, with_collisions, classes)):
        output = model(
            batch.input_ids_BT.to(device),
            labels=batch.labels_BT.to(device),
            ignore_index=IGNORE_INDEX,
            loss_reduction="none",
            return_logits=False,
            **kwargs,
        )
    sequence_ids = whole.sequence_ids_BT if kept is None or context is not None else kept.sequence_ids_BK
    # Computed on the CPU, where the ids are: no wait for the device.
    labelled_N = (sequence_ids.flatten() >= 0).nonzero().squeeze(1)

    def of_labels(values: torch.Tensor) -> torch.Tensor:
        # Tensor-parallel ranks hold a part each.
        values = values.full_tensor() if isinstance(values, DTensor) else values
        if context is not None:
            values = _whole_row(values, kept, batch, context)
        return values.flatten().index_select(0, labelled_N.to(values.device))

    sequence_ids_N = sequence_ids.flatten()[labelled_N].to(device)
    if isinstance(output, LabelLosses):
        return TokenLogprobs(
            logprobs_N=-of_labels(output.loss),
            sequence_ids_N=sequence_ids_N,
            entropy_N=None if output.entropy is None else of_labels(output.entropy),
            collision_logprobs_N=None if output.collision_logprobs is None else of_labels(output.collision_logprobs),
        )
    values_NC = torch.stack([of_labels(column) for column in output], dim=1)
    logprobs_NC = values_NC.log_softmax(dim=1) if classes else values_NC
    return TokenLogprobs(logprobs_N=logprobs_NC[:, 0], sequence_ids_N=sequence_ids_N, values_NC=values_NC)


def _part_of_row(batch: PackedBatch, part: slice) -> PackedBatch:
    """The tokens of one rank. Labels were shifted before, so none is lost where the row is cut."""
    return replace(
        batch,
        kept=None,
        input_ids_BT=batch.input_ids_BT[:, part],
        labels_BT=batch.labels_BT[:, part],
        sequence_ids_BT=batch.sequence_ids_BT[:, part],
    )


def _whole_row(
    values: torch.Tensor, kept: KeptPositions | None, part: PackedBatch, context: ContextGroup
) -> torch.Tensor:
    """The values of a row's tokens, shape (T,), from those that this rank has of its part."""
    if kept is None:
        return context.whole_row(values.flatten())
    positions_K = kept.positions_BK.flatten().to(values.device)
    values_T = values.new_zeros(part.input_ids_BT.numel()).index_copy(0, positions_K, values.flatten())
    return context.whole_row(values_T)
