"""The one forward pass that policy and reference share.

B rows, T tokens of a row, K label positions kept for the language-model head, N labelled tokens, C
words or classes, D width of the model.
"""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from olmo_core.nn.transformer import Transformer
from torch.distributed.tensor import DTensor

from open_instruct.batching.documents import move_to_device
from open_instruct.core.records import IGNORE_INDEX, PackedBatch
from open_instruct.models.attention.attention import find_context_group
from open_instruct.models.experts.routed import RoutedFeedForward
from open_instruct.models.heads.logprob_head import HeadSettings, LabelLosses, Measure
from open_instruct.objectives.objective import TokenLogprobs
from open_instruct.training.model.forward_inputs import (
    ForwardInputs,
    build_forward_inputs,
    place_at_labels,
    select_at_head,
)


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
    """Log-prob of every label under `model`, its logits divided by `temperature`.

    With gradient, if enabled. `batch` is on the CPU, and so is a tensor of temperatures, one for
    each label, (N,). The language-model head runs only where there are labels. Under tensor
    parallelism the hidden states are split along T, so the head runs everywhere and the result is
    gathered. Where rows are split over ranks, each rank runs its part, and all ranks get the
    log-probs of the whole row. `measure` is computed from the same logits, at the head's own
    positions.

    `word_ids` asks for the logits of these words, too. Of a model that scores, the log-probs are
    its scores.
    """
    assert measure is None or not word_ids, "a head computes one measure"
    if word_ids:
        measure = Measure(partial(select_word_logits, word_ids=word_ids))
    if isinstance(temperature, torch.Tensor):  # 1 where there is no label
        temperature = place_at_labels(model, batch, temperature - 1, device=device) + 1
    settings = HeadSettings(
        temperature=temperature,
        with_entropy=with_entropy,
        with_collisions=with_collisions,
        measure=measure,
    )
    output, inputs = run_forward(model, batch, settings, device=device)
    if isinstance(output, LabelLosses):
        return read_losses(model, output, inputs, has_words=bool(word_ids))
    values = values_at_labels(model, output, inputs)
    if values.dim() == 1:
        return TokenLogprobs(logprobs_N=values, sequence_ids_N=inputs.sequence_ids_N)
    return TokenLogprobs(
        logprobs_N=values.detach()[:, 0],
        sequence_ids_N=inputs.sequence_ids_N,
        class_logits_NC=values,
    )


def read_losses(
    model: Transformer,
    losses: LabelLosses,
    inputs: ForwardInputs,
    *,
    has_words: bool,
) -> TokenLogprobs:
    """What a language-model head computed, at the labels; the measure may be of words."""

    def at_labels(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return None
        return values_at_labels(model, values, inputs)

    scores = TokenLogprobs(
        logprobs_N=-values_at_labels(model, losses.loss, inputs),
        sequence_ids_N=inputs.sequence_ids_N,
        entropy_N=at_labels(losses.entropy),
        collision_logprobs_N=at_labels(losses.collision_logprobs),
    )
    measured_values = at_labels(losses.measured)
    if has_words:
        return replace(scores, class_logits_NC=measured_values)
    return replace(scores, measured_N=measured_values)


def values_at_labels(
    model: Transformer, values: torch.Tensor, inputs: ForwardInputs
) -> torch.Tensor:
    """The values of a head's output at the labels of the whole row, gathered where ranks split it.

    Collective under tensor or context parallelism.
    """
    if isinstance(values, DTensor):  # each tensor-parallel rank holds a part
        values = values.full_tensor()
    values = values.flatten(0, 1)
    context = find_context_group(model)
    if context is not None:
        kept_BK = inputs.model_kwargs.get("logits_to_keep")
        if kept_BK is not None:
            local_T = values.new_zeros(inputs.input_ids_BT.numel(), *values.shape[1:])
            values = local_T.index_copy(0, kept_BK.flatten(), values)
        values = context.gather_row(values)
    return values.index_select(0, inputs.labelled_N)


def select_word_logits(logits_NV: torch.Tensor, *, word_ids: tuple[int, ...]) -> torch.Tensor:
    """The logits of a few words, (N, C).

    A column at a time: the ids are no tensor that a device would wait for.
    """
    return torch.stack([logits_NV[:, word_id] for word_id in word_ids], dim=1)


def hidden_at_labels(
    model: Transformer,
    batch: PackedBatch,
    policy: Transformer,
    device: torch.device,
) -> torch.Tensor:
    """The states that the head of `model` reads, (B, K, D), where the head of `policy` runs."""
    hidden, _ = run_forward(model, batch, HeadSettings(only_hidden=True), device=device)
    if not isinstance(hidden, DTensor):
        return cast(torch.Tensor, hidden)
    if policy.tp_enabled:
        return hidden.to_local()
    # A policy on DeepSpeed splits matrices by other layers, between which each rank has all tokens.
    return select_at_head(policy, batch, hidden.full_tensor())


def run_forward(
    model: Transformer,
    batch: PackedBatch,
    settings: HeadSettings,
    *,
    device: torch.device,
) -> tuple[Any, ForwardInputs]:
    """Run the forward pass of this rank's part; returns the head's output and the inputs."""
    inputs = move_to_device(build_forward_inputs(model, batch), device)
    set_forced_experts(model, inputs.routes_TR)
    output = model(
        inputs.input_ids_BT,
        ignore_index=IGNORE_INDEX,
        loss_reduction="none",
        return_logits=False,
        head_settings=lambda: settings,
        **inputs.model_kwargs,
    )
    return output, inputs


def set_forced_experts(model: Transformer, routes_TR: torch.Tensor | None) -> None:
    """Have the routers choose these experts until the next pass, also where blocks run again."""
    num_blocks = len(model.blocks)
    for number, block in enumerate(model.blocks.values()):
        forced_experts_TK: torch.Tensor | None = None
        if routes_TR is not None:
            forced_experts_TK = routes_TR.chunk(num_blocks, dim=1)[number]
        for layer in block.modules():
            if isinstance(layer, RoutedFeedForward):
                layer.has_forced_experts = routes_TR is not None
                layer.forced_experts_TK = forced_experts_TK
