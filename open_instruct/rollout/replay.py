"""A step of a finished run is taken again: its weights, its completions, its recorded metrics, and a table of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from open_instruct.checkpoints.step_folder import find_checkpoints, step_of
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.rollout_sections import LearnerParallelSection
from open_instruct.data.files.foreign_json import read_object
from open_instruct.errors import InputError
from open_instruct.records import RolloutGroup
from open_instruct.run.metrics_log import MetricsLog
from open_instruct.run.opened import with_chosen
from open_instruct.run.run_directory import RunDirectory

# Metrics that depend on the layout and the length of the run rather than on the step.
OF_THE_RUN = ("num_tokens", "padding_fraction", "peak_", "allocation_retries/", "shared_fraction", "time/")
SHOWN_FIRST = ("loss", "grad_norm")
MISSING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWeights:
    """The weights that a step is taken again with: a model folder, and a checkpoint over it where there is one.

    `are_the_steps_own` says whether the step began with these weights; `description` is a sentence about them.
    """

    model: str
    checkpoint: Path | None
    are_the_steps_own: bool
    description: str


def as_decided(config: GRPOConfig, directory: RunDirectory) -> GRPOConfig:
    """The config with the choice that the run's plan made for --activation_checkpointing auto, if it had a plan."""
    return with_chosen(config, read_object(directory.plan) if directory.plan.exists() else {})


def on_one_process(config: GRPOConfig) -> GRPOConfig:
    """The config for one process: the same mathematics without shards, and without compilation."""
    kept = {name: getattr(config.parallel, name) for name in ("single_gpu_mode", "backend", "deepspeed_stage")}
    return replace(
        config,
        parallel=LearnerParallelSection(**kept),
        memory=replace(config.memory, compile_model=False, activation_memory_budget=1.0),
    )


def weights_before(run: Path, step: int, *, config: GRPOConfig, given: str | None) -> StepWeights:
    """The weights that `step` of the run in `run` began with, or the nearest to them that are left.

    They are those after step - 1: the checkpoint of that step, or the start model for step 1. Where that checkpoint is
    gone, an older one. `given` overrules all of that.
    """
    start = config.model.model_name_or_path
    if given is not None:
        description = f"the weights are those of {given}, with a fresh optimizer"
        if config.loss.ref_policy_update_freq is not None:
            description += "; the reference policy is the start model, although the run moved it"
        return StepWeights(model=given, checkpoint=None, are_the_steps_own=False, description=description)
    checkpoints = {step_of(path): path for path in find_checkpoints(run)}
    newest = max((saved for saved in checkpoints if saved < step), default=0)
    checkpoint = checkpoints.get(newest)
    are_the_steps_own = newest == step - 1
    description = f"the weights are the start model's, {start}"
    if checkpoint is not None:
        description = f"the weights are those of {'' if are_the_steps_own else f'step {newest}, '}{checkpoint}"
    if not are_the_steps_own:
        description += (
            f": step {step} began with those of step {step - 1}, of which there is no checkpoint. Loss, gradient and "
            "the ratios to the engine are of another policy than the run's"
        )
    return StepWeights(model=start, checkpoint=checkpoint, are_the_steps_own=are_the_steps_own, description=description)


def check_trace_fits(groups: Sequence[RolloutGroup], vocab_size: int) -> None:
    """Raises InputError where a trace has a token that the model does not know."""
    largest = 0
    for group in groups:
        for token_ids in (group.prompt.token_ids, *(completion.token_ids for completion in group.completions)):
            largest = max(largest, *token_ids, 0)
    if largest >= vocab_size:
        raise InputError(
            f"the trace has token {largest}, and the model has vocab_size {vocab_size}: they do not belong together"
        )


def recorded_row(metrics: Path, step: int) -> dict[str, float] | None:
    """The row of metrics.jsonl for `step`; None if the run ended before it wrote one.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        rows = MetricsLog(metrics).rows()
    except OSError as error:
        raise InputError(f"{metrics} cannot be read: {error}") from error
    return next((row for row in reversed(rows) if row.get("step") == step), None)


def differences(recorded: Mapping[str, float], recomputed: Mapping[str, float]) -> str:
    """The difference of the recomputed loss and gradient norm from the recorded ones.

    The loss's difference is absolute: advantages of both signs nearly cancel in it.
    """
    loss_gap = abs(recorded["loss"] - recomputed["loss"])
    norm_gap = abs(recorded["grad_norm"] - recomputed["grad_norm"])
    share = norm_gap / recorded["grad_norm"] if recorded["grad_norm"] else norm_gap
    return f"recorded and recomputed differ by {loss_gap:.1e} in loss, by {share:.1e} of itself in grad_norm"


def table(columns: Mapping[str, Mapping[str, float] | None]) -> str:
    """The metrics that were recomputed, one a line, in a column for each of `columns` that has numbers."""
    rows = {title: row for title, row in columns.items() if row is not None}
    recomputed = dict.fromkeys(chain.from_iterable(row for title, row in rows.items() if title != "recorded"))
    names = sorted(recomputed, key=lambda name: name not in SHOWN_FIRST)
    lines = [["", *rows]]
    for name in names:
        lines.append([name, *(_cell(row.get(name)) for row in rows.values())])
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    padded = []
    for name, *cells in lines:
        right = [cell.rjust(width) for cell, width in zip(cells, others, strict=True)]
        padded.append("  ".join([name.ljust(first), *right]))
    return "\n".join(padded)


def _cell(value: float | None) -> str:
    return MISSING if value is None else f"{value:.6g}"
