"""The one forward pass that policy and reference share.

B rows, T tokens of a row, K label positions kept for the language-model head, N labelled tokens, S
documents.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from olmo_core.nn.transformer import Transformer
from torch.distributed.tensor import DTensor

from open_instruct.batching.documents import kept_positions, on_device
from open_instruct.core.records import IGNORE_INDEX, PackedBatch
from open_instruct.models.attention.attention import context_of
from open_instruct.models.attention.segments import Segments
from open_instruct.models.experts.routed import RoutedFeedForward
from open_instruct.models.heads.logprob_head import HeadSettings, LabelLosses, LogprobHead, Measure
from open_instruct.objectives.objective import TokenLogprobs


def token_logprobs(
    model: Transformer,
    batch: PackedBatch,
    *,
    device: torch.device,
    temperature: float | torch.Tensor = 1.0,
    with_entropy: bool = False,
    with_collisions: bool = False,
    measure: Measure | None = None,
    word_ids: tuple[int, ...] = (),
) -> TokenLogprobs:
    """Log-prob of every label under `model` with its logits divided by `temperature`, with gradient
    if enabled.

    `batch` is on the CPU, and so is a tensor of temperatures, one for each label, (N,). The
    language-model head runs only where there are labels. Under tensor parallelism the hidden states
    are split along T, so the head runs everywhere and the result is gathered. Where rows are split
    over ranks, each rank runs its part, and all ranks get the log-probs of the whole row. `measure`
    is computed from the same logits, at the head's own positions.

    `word_ids` asks for the logits of these words, too. Of a model that scores, the log-probs are
    its scores.
    """
    assert measure is None or not word_ids, "a head computes one measure"
    if word_ids:
        measure = Measure(partial(_logits_of_words, word_ids=word_ids))
    if isinstance(temperature, torch.Tensor):  # 1 where there is no label
        temperature = beside_labels(model, batch, temperature - 1, device=device) + 1
    settings = HeadSettings(
        temperature=temperature,
        with_entropy=with_entropy,
        with_collisions=with_collisions,
        measure=measure,
    )
    output, inputs = _run(model, batch, settings, device=device)

    def at_labels(values: torch.Tensor) -> torch.Tensor:
        # Each tensor-parallel rank holds a part.
        values = values.full_tensor() if isinstance(values, DTensor) else values
        values = values.flatten(0, 1)
        if (context := context_of(model)) is not None:
            kept_BK = inputs.model_kwargs.get("logits_to_keep")
            if kept_BK is not None:
                own_T = values.new_zeros(inputs.input_ids_BT.numel(), *values.shape[1:])
                values = own_T.index_copy(0, kept_BK.flatten(), values)
            values = context.whole_row(values)
        return values.index_select(0, inputs.labelled_N)

    if isinstance(output, LabelLosses):
        measured_N = None if output.measured is None else at_labels(output.measured)
        return TokenLogprobs(
            logprobs_N=-at_labels(output.loss),
            sequence_ids_N=inputs.sequence_ids_N,
            entropy_N=None if output.entropy is None else at_labels(output.entropy),
            collision_logprobs_N=None
            if output.collision_logprobs is None
            else at_labels(output.collision_logprobs),
            measured_N=None if word_ids else measured_N,
            class_logits_NC=measured_N if word_ids else None,
        )
    values = at_labels(output)
    if values.dim() == 1:
        return TokenLogprobs(logprobs_N=values, sequence_ids_N=inputs.sequence_ids_N)
    return TokenLogprobs(
        logprobs_N=values.detach()[:, 0],
        sequence_ids_N=inputs.sequence_ids_N,
        class_logits_NC=values,
    )


def _logits_of_words(logits_NV: torch.Tensor, *, word_ids: tuple[int, ...]) -> torch.Tensor:
    """The logits of a few words, (N, C).

    A column at a time: the ids are no tensor that a device would wait for.
    """
    return torch.stack([logits_NV[:, word_id] for word_id in word_ids], dim=1)


def hidden_at_labels(
    model: Transformer, batch: PackedBatch, policy: Transformer, device: torch.device
) -> torch.Tensor:
    """The hidden states that the head of `model` reads, (B, K, D), at the positions where
    `policy`'s head runs here.
    """
    hidden, _ = _run(model, batch, HeadSettings(only_hidden=True), device=device)
    if not isinstance(hidden, DTensor):
        return cast(torch.Tensor, hidden)
    # A policy on DeepSpeed splits matrices by other layers, between which each rank has all tokens.
    return (
        hidden.to_local()
        if policy.tp_enabled
        else _where_head_runs(policy, batch, hidden.full_tensor())
    )


def beside_labels(
    model: Transformer, batch: PackedBatch, values_N: torch.Tensor, *, device: torch.device
) -> torch.Tensor:
    """`values_N` of the labels (further axes may follow), at the positions where the head of
    `model` runs on this rank.

    Positions without a label get 0. A `Measure` takes them.
    """
    flat_T = values_N.new_zeros(batch.labels_BT.numel(), *values_N.shape[1:])
    flat_T[batch.label_positions_N] = values_N
    assert torch.equal(flat_T[batch.label_positions_N], values_N), (
        "documents share a position, but not its value"
    )
    values_BT = flat_T.unflatten(0, batch.labels_BT.shape)
    if (context := context_of(model)) is not None:
        values_BT = values_BT[:, context.part_of(values_BT.shape[1])]
    return on_device(_where_head_runs(model, batch, values_BT), device)


def _where_head_runs(
    model: Transformer, batch: PackedBatch, values_BT: torch.Tensor
) -> torch.Tensor:
    _, kept_BK = _own(model, batch)
    if kept_BK is None:
        return cast(LogprobHead, model.lm_head).own_positions(values_BT)
    rows_B1 = torch.arange(len(values_BT), device=values_BT.device).unsqueeze(1)
    return values_BT[rows_B1, on_device(kept_BK, values_BT.device)]


def _own(model: Transformer, batch: PackedBatch) -> tuple[PackedBatch, torch.Tensor | None]:
    """This rank's tokens of the batch, and the positions where its head runs:

    None, all, under tensor parallelism.
    """
    if (context := context_of(model)) is not None:
        # Labels are shifted already, so none is lost where the row is cut.
        part = context.part_of(batch.input_ids_BT.shape[1])
        ids_BT, labels_BT = batch.input_ids_BT[:, part], batch.labels_BT[:, part]
        routes_TR = None if batch.routes_TR is None else batch.routes_TR[part]
        batch = replace(
            batch, kept_BK=None, input_ids_BT=ids_BT, labels_BT=labels_BT, routes_TR=routes_TR
        )
    if model.tp_enabled:
        return batch, None
    return batch, kept_positions(batch) if batch.kept_BK is None else batch.kept_BK


class _Inputs(NamedTuple):
    """The inputs of a forward pass: this rank's tokens, and the other arguments of its model.

    `labelled_N` are the indices of labels among the output's values, for the whole row, and
    `sequence_ids_N` their documents.
    """

    input_ids_BT: torch.Tensor
    model_kwargs: dict[str, Any]
    labelled_N: torch.Tensor
    sequence_ids_N: torch.Tensor
    routes_TR: torch.Tensor | None


def _run(
    model: Transformer, batch: PackedBatch, settings: HeadSettings, *, device: torch.device
) -> tuple[Any, _Inputs]:
    """Run the forward pass of this rank's part. Returns the head's output and the pass's inputs."""
    inputs = on_device(_inputs(model, batch), device)
    _tell(model, inputs.routes_TR)
    output = model(
        inputs.input_ids_BT,
        ignore_index=IGNORE_INDEX,
        loss_reduction="none",
        return_logits=False,
        head_settings=lambda: settings,
        **inputs.model_kwargs,
    )
    return output, inputs


def _inputs(model: Transformer, batch: PackedBatch) -> _Inputs:
    """The inputs, computed on the CPU so that nothing waits for the device."""
    context, (own, kept_BK) = context_of(model), _own(model, batch)
    num_rows, row_len = batch.input_ids_BT.shape
    lengths = batch.document_lengths
    if lengths is None:
        lengths = (row_len,) * num_rows
    assert sum(lengths) == num_rows * row_len, (
        "a token of no document would be computed from nothing"
    )
    segments = Segments.of(
        lengths, batch.prefix_lengths or (0,) * len(lengths), device=torch.device("cpu")
    )
    if context is not None:
        assert batch.document_lengths is not None, "padded rows are not split over ranks"
        segments = segments._replace(positions_T=segments.positions_T[context.part_of(row_len)])
    model_kwargs: dict[str, Any] = {"labels": own.labels_BT, "segments": segments}
    if kept_BK is not None:
        model_kwargs["logits_to_keep"] = kept_BK
    labelled_N = batch.label_positions_N
    if kept_BK is not None and context is None:
        # A label's place among the kept positions: each row has as many, and keeps the order of its
        # labels.
        num_rows, num_kept = kept_BK.shape
        ranks_BT = (batch.labels_BT != IGNORE_INDEX).cumsum(dim=1) - 1
        labelled_N = (ranks_BT + num_kept * torch.arange(num_rows).unsqueeze(1)).flatten()[
            labelled_N
        ]
    return _Inputs(own.input_ids_BT, model_kwargs, labelled_N, batch.sequence_ids_N, own.routes_TR)


def _tell(model: Transformer, routes_TR: torch.Tensor | None) -> None:
    """Have the routers choose these experts until the next pass, also where the backward pass runs
    blocks again.
    """
    for number, block in enumerate(model.blocks.values()):
        for layer in block.modules():
            if isinstance(layer, RoutedFeedForward):
                layer.is_told = routes_TR is not None
                layer.told_TK = (
                    None if routes_TR is None else routes_TR.chunk(len(model.blocks), dim=1)[number]
                )
