"""`open-instruct replay`: take one step of a GRPO run again, and compare it with the first time.

open-instruct replay RUN --step N [--loss_fn gspo ...]
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.commands.run_flags import join_backend, parse_run
from open_instruct.config.flags import list_flags, spell_value
from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.config.parser import list_given_flags
from open_instruct.config.policy_sections import CriticSection
from open_instruct.config.resolved import as_flat_dict
from open_instruct.config.sections import flag
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.core.errors import InputError
from open_instruct.core.files import write_user_file
from open_instruct.core.records import RolloutGroup
from open_instruct.data.files.foreign_json import read_object
from open_instruct.run.run_directory import RunDirectory, read_rows
from open_instruct.run.saved_settings import read_settings

if TYPE_CHECKING:
    from open_instruct.parallel.process import Process

# Beside those of the loss: what decides which completions are learned from, and with which
# advantage.
ROLLOUT_FLAGS = (
    "temperature",
    "filter_zero_std_samples",
    "mask_truncated_completions",
    "advantage_normalization_type",
    "advantage_pass_k",
)

# Metrics that depend on the layout and the length of the run rather than on the step.
OF_THE_RUN = (
    "num_tokens",
    "padding_fraction",
    "peak_",
    "allocation_retries/",
    "shared_fraction",
    "time/",
)
SHOWN_FIRST = ("loss", "grad_norm")
MISSING = "-"


@dataclass(kw_only=True)
class ReplayFlags:
    """Take one step of a GRPO run again, on one process: the same completions (from the run's
    traces) and the same weights. Prints loss, gradient norm and metrics beside those that the run
    recorded, and once more under the settings given here: the flags of the loss and of a critic
    (`open-instruct grpo --help`), --temperature, --advantages, --filter_zero_std_samples and
    --mask_truncated_completions may be others than the run's. Nothing in RUN is changed.

    Examples:
        open-instruct replay runs/first --step 12
        open-instruct replay runs/first --step 12 --loss_fn gspo --clip_higher 0.0004 --json
            gspo.json
        open-instruct replay runs/first --step 200 --weights runs/first/hf_model
    """

    step: int = flag("the step to take again; 1 is the first", minimum=1)
    weights: str | None = flag(
        (
            "Hugging Face folder of the weights; default: the run's checkpoint of the step "
            "before, or an older one"
        ),
        None,
    )
    json: str | None = flag("file to write the numbers to, as JSON", None)


@dataclass(kw_only=True)
class ReplayConfig(GRPOConfig):
    """The run's own settings, those given in their place, and what is replayed of it."""

    replay: ReplayFlags


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A run, the settings to take it again with, and which of them differ from the run's.

    Example: `replay runs/first --step 12 --loss_fn gspo` has `changes` {"loss_fn": ("dapo",
    "gspo")}.
    """

    run: Path
    settings: GRPOConfig
    config: ReplayConfig
    changes: dict[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWeights:
    """The weights of a step: those of a model folder, or of a checkpoint beside it.

    `are_the_steps_own` says whether the step began with these weights; `description` is a sentence
    about them.
    """

    model: str
    checkpoint: Path | None
    are_the_steps_own: bool
    description: str


def main(argv: Sequence[str]) -> int:
    """Replay what the words after the command describe, print it, and return the exit code.

    :raises InputError: if the flags cannot work, or the run has no such step.
    """
    request = parse_replay(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("replay runs on one process: start it without torchrun", kind="conflict")
    report = replay(request)
    if (file := request.config.replay.json) is not None:
        write_user_file(file, json.dumps(report, indent=2) + "\n", flag="--json")
    return 0


def parse_replay(words: Sequence[str]) -> Replay:
    """The replay that the words after the command describe.

    :raises InputError: a flag is wrong or cannot differ in a replay, or there is no GRPO run.
    """
    if not words or words[0].startswith("-"):
        raise InputError(
            "the first word is the folder of the run: open-instruct replay RUN --step N",
            kind="stray_word",
        )
    run = Path(words[0])
    saved_settings = read_settings(run)
    settings = join_backend(saved_settings.config)
    if not isinstance(settings, GRPOConfig):
        raise InputError(
            f"{run} is not the folder of a GRPO run, which alone can be replayed",
            kind="bad_checkpoint",
        )
    saved_settings.print_notes()
    config = parse_run(
        ReplayConfig, [str(RunDirectory(path=run).config), *words[1:]], passed_over=[]
    )
    flag_names = list_given_flags(ReplayConfig, words[1:])
    if fixed_names := sorted(flag_names - list_replay_flags() - list_flags(ReplayFlags).keys()):
        raise InputError(
            f"{', '.join(f'--{name}' for name in fixed_names)}: a replay keeps the run's own "
            "value; what can differ are the flags of the loss, those of a critic, and "
            f"--{', --'.join(ROLLOUT_FLAGS)}",
            kind="conflict",
        )
    flags = config.replay
    refuse(limit_problems(flags))
    if flags.weights is not None and not Path(flags.weights).is_dir():
        raise InputError(
            f"--weights {flags.weights}: there is no such folder; give one in Hugging Face format",
            kind="missing_file",
        )
    if flags.json is not None and (
        Path(flags.json).is_dir() or not Path(flags.json).absolute().parent.is_dir()
    ):
        raise InputError(
            f"--json {flags.json}: is a folder, or lies in none; name a file in a folder that "
            "exists",
            kind="unreadable_file",
        )
    before = as_flat_dict(settings)
    now = as_flat_dict(config)
    changes = {}
    for name in flag_names:
        if name in before and now[name] != before[name]:
            changes[name] = (before[name], now[name])
    if changes:
        # What active sampling rejected is not replayed, so it cannot stand against keeping every
        # group.
        config.rollout = replace(config.rollout, active_sampling=False)
        if not config.rollout.has_critic:
            config.critic = CriticSection()
        validate_grpo(config)
    return Replay(run=run, settings=settings, config=config, changes=changes)


def list_replay_flags() -> set[str]:
    """The flags of a run that may be others in a replay of it."""
    of_sections = {
        name for name, flag in list_flags(GRPOConfig).items() if flag.section in ("loss", "critic")
    }
    return of_sections | {*ROLLOUT_FLAGS}


def replay(request: Replay) -> dict[str, Any]:
    """Take the step, print what comes of it, and return the same numbers as JSON."""
    from open_instruct.parallel.process import start_process, stop_process
    from open_instruct.rl.traces import read_traces

    # Warnings of libraries belong in the log of a run; a replay has none.
    logging.captureWarnings(True)
    directory = RunDirectory(path=request.run)
    settings = request.settings
    changes = request.changes
    step = request.config.replay.step
    groups = read_traces(directory.path, step)
    weights = find_start_weights(
        directory.path, step, config=settings, weights_folder=request.config.replay.weights
    )
    recorded_row = read_recorded_row(directory.metrics, step)
    print(f"step {step} of {directory.path}: {weights.description}", flush=True)
    if settings.fleet.routing_replay == "on":
        note = "traces have no experts of tokens, so here the learner chooses its own"
        print(f"--routing_replay: {note}", flush=True)

    process = start_process(timeout_s=settings.parallel.dist_timeout_s, seed=settings.optim.seed)

    def retake(config: GRPOConfig) -> dict[str, float]:
        return retake_step(
            apply_run_plan(config, directory), groups, step=step, weights=weights, process=process
        )

    new_row = retake(settings)
    changed_row = None
    if changes:
        flags = (
            f"--{name} {spell_value(new)} (was {spell_value(old)})"
            for name, (old, new) in changes.items()
        )
        print(f"changed: {', '.join(flags)}", flush=True)
        changed_row = retake(request.config)
    stop_process()

    columns = {"recorded": recorded_row, "recomputed": new_row, "changed": changed_row}
    print("\n" + format_table(columns))
    if recorded_row is None:
        print(f"\nmetrics.jsonl has no row of step {step}: the run ended before it was written")
    elif weights.are_the_steps_own and "loss" in recorded_row:  # a critic's warm-up has none
        print(f"\n{describe_differences(recorded_row, new_row)}")
    facts = asdict(weights)
    if weights.checkpoint is not None:
        facts["checkpoint"] = str(weights.checkpoint)
    return {
        "run": str(request.run),
        "step": step,
        "weights": facts,
        "changes": {name: {"from": old, "to": new} for name, (old, new) in changes.items()},
        **columns,
    }


def retake_step(
    config: GRPOConfig,
    groups: Sequence[RolloutGroup],
    *,
    step: int,
    weights: StepWeights,
    process: Process,
) -> dict[str, float]:
    """The metrics of `step` under `config`, by the learner's own code; its files are removed."""
    from open_instruct.rl.lone_step import take_lone_step

    row = take_lone_step(
        config,
        groups,
        step=step,
        model=weights.model,
        checkpoint=weights.checkpoint,
        process=process,
    )
    return {name: value for name, value in row.items() if not name.startswith(OF_THE_RUN)}


def apply_run_plan(config: GRPOConfig, directory: RunDirectory) -> GRPOConfig:
    """The config with the activation checkpointing that the run's plan chose for `auto`."""
    from open_instruct.run.opening import apply_plan

    if not directory.plan.exists():
        return apply_plan(config, {})
    return apply_plan(config, read_object(directory.plan))


def find_start_weights(
    run: Path, step: int, *, config: GRPOConfig, weights_folder: str | None
) -> StepWeights:
    """The weights that `step` of the run in `run` began with, or the nearest to them that are left.

    They are those after step - 1: the checkpoint of that step, or the start model for step 1. Where
    that checkpoint is gone, an older one. `weights_folder` overrules all of that.
    """
    from open_instruct.checkpoints.step_folder import find_checkpoints, step_of

    start = config.model.model_name_or_path
    if weights_folder is not None:
        description = f"the weights are those of {weights_folder}, with a fresh optimizer"
        if config.loss.ref_policy_update_freq is not None:
            description += "; the reference policy is the start model, although the run moved it"
        return StepWeights(
            model=weights_folder, checkpoint=None, are_the_steps_own=False, description=description
        )
    checkpoints = {step_of(path): path for path in find_checkpoints(run)}
    newest = max((saved_step for saved_step in checkpoints if saved_step < step), default=0)
    checkpoint = checkpoints.get(newest)
    are_the_steps_own = newest == step - 1
    description = f"the weights are those after step {newest}, {checkpoint or start}"
    if not are_the_steps_own:
        description += (
            f": step {step} began with those of step {step - 1}, of which there is no checkpoint. "
            "Loss, gradient and the ratios to the engine are of another policy than the run's"
        )
    return StepWeights(
        model=start,
        checkpoint=checkpoint,
        are_the_steps_own=are_the_steps_own,
        description=description,
    )


def read_recorded_row(metrics: Path, step: int) -> dict[str, float] | None:
    """The row of metrics.jsonl for `step`; None if the run ended before it wrote one.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        rows = list(read_rows(metrics))
    except OSError as error:
        raise InputError(f"{metrics} cannot be read: {error}", kind="unreadable_file") from error
    return next((row for row in reversed(rows) if row.get("step") == step), None)


def describe_differences(
    recorded_metrics: Mapping[str, float], recomputed_metrics: Mapping[str, float]
) -> str:
    """The difference of the recomputed loss and gradient norm from the recorded ones.

    The loss's difference is absolute: advantages of both signs nearly cancel in it.
    """
    loss_gap = abs(recorded_metrics["loss"] - recomputed_metrics["loss"])
    norm_gap = abs(recorded_metrics["grad_norm"] - recomputed_metrics["grad_norm"])
    share = norm_gap / recorded_metrics["grad_norm"] if recorded_metrics["grad_norm"] else norm_gap
    return (
        f"recorded and recomputed differ by {loss_gap:.1e} in loss, by {share:.1e} of itself in "
        "grad_norm"
    )


def format_table(columns: Mapping[str, Mapping[str, float] | None]) -> str:
    """The recomputed metrics, one a line, with a column for each of `columns` that has numbers."""
    rows = {title: row for title, row in columns.items() if row is not None}
    metric_names = dict.fromkeys(
        chain.from_iterable(row for title, row in rows.items() if title != "recorded")
    )
    names = sorted(metric_names, key=lambda name: name not in SHOWN_FIRST)
    lines = [["", *rows]]
    for name in names:
        lines.append([name, *(_format_cell(row.get(name)) for row in rows.values())])
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    table_lines = []
    for name, *cells in lines:
        right = [cell.rjust(width) for cell, width in zip(cells, others, strict=True)]
        table_lines.append("  ".join([name.ljust(first), *right]))
    return "\n".join(table_lines)


def _format_cell(value: float | None) -> str:
    return MISSING if value is None else f"{value:.6g}"
