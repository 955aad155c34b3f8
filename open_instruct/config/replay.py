"""What `open-instruct replay` is asked for: a step of a run, its weights, and what is to be different."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from open_instruct.config.flags import Flag, flags_of, spelled
from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.config.help import BLANK, Line, example_lines, flag_lines, wrapped
from open_instruct.config.parser import flags_given, parse
from open_instruct.config.resolved import as_flat_dict
from open_instruct.config.rollout_sections import LearnerParallelSection
from open_instruct.config.sections import flag
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.errors import InputError

CONFIG_FILE = "config.yaml"
# Beside those of the loss: what decides which completions are learned from, and with which advantage.
ROLLOUT_FLAGS = (
    "temperature",
    "filter_zero_std_samples",
    "mask_truncated_completions",
    "advantage_normalization_type",
    "advantage_pass_k",
)

DESCRIPTION = """
Take one step of a GRPO run again, on one process: the same completions (from the run's traces) and the same
weights. Prints loss, gradient norm and metrics beside those that the run recorded, and once more under the settings
given here. Nothing in RUN is changed.
"""
EXAMPLES = (
    "open-instruct replay runs/first --step 12",
    "open-instruct replay runs/first --step 12 --loss_fn gspo --clip_higher 0.0004 --json gspo.json",
    "open-instruct replay runs/first --step 200 --weights runs/first/hf_model",
)


@dataclass(kw_only=True)
class ReplaySection:
    """What is replayed"""

    step: int = flag("the step to take again; 1 is the first", minimum=1)
    weights: str | None = flag(
        "Hugging Face folder of the weights; default: the run's checkpoint of the step before, or an older one", None
    )
    json: str | None = flag("file to write the same numbers to", None)


@dataclass(kw_only=True)
class ReplayConfig(GRPOConfig):
    """A run's own settings, those given in their place, and what is replayed of it."""

    replay: ReplaySection


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What is replayed of a run, the settings it was taken with, and those to compare them with, if any.

    Example: `replay runs/first --step 12 --loss_fn gspo` has `changes` {"loss_fn": ("dapo", "gspo")}.
    """

    run: Path
    flags: ReplaySection
    settings: GRPOConfig
    changed: GRPOConfig | None
    changes: dict[str, tuple[Any, Any]]


def parse_replay(words: Sequence[str]) -> Replay:
    """The replay that the words after the command describe.

    Raises:
        InputError: a flag is wrong or cannot differ in a replay, or the folder holds no GRPO run.
    """
    if not words or words[0].startswith("-"):
        raise InputError("the first word is the folder of the run: open-instruct replay RUN --step N")
    run = Path(words[0])
    settings = _settings_of(run)
    asked = parse(ReplayConfig, [str(run / CONFIG_FILE), *words[1:]])
    given, may_differ = flags_given(ReplayConfig, words[1:]), replayed_flags().keys()
    if fixed := sorted(given - may_differ - {flag.name for flag in own_flags()}):
        raise InputError(
            f"{', '.join(f'--{name}' for name in fixed)}: a replay keeps the run's own value; what can differ are the "
            f"flags of the loss and --{', --'.join(ROLLOUT_FLAGS)}"
        )
    own = asked.replay
    refuse(limit_problems(own))
    if own.weights is not None and not Path(own.weights).is_dir():
        raise InputError(f"--weights {own.weights}: there is no such folder; give one in Hugging Face format")
    if own.json is not None and (Path(own.json).is_dir() or not Path(own.json).absolute().parent.is_dir()):
        raise InputError(f"--json {own.json}: is a folder, or lies in none; name a file in a folder that exists")
    before, now = as_flat_dict(settings), as_flat_dict(asked)
    changes = {name: (before[name], now[name]) for name in given if name in before and now[name] != before[name]}
    if changes:
        # What active sampling rejected is not replayed, so it cannot stand against keeping every group.
        asked.rollout = replace(asked.rollout, active_sampling=False)
        validate_grpo(asked)
    return Replay(run=run, flags=own, settings=settings, changed=asked if changes else None, changes=changes)


def own_flags() -> list[Flag]:
    """The flags that only a replay has."""
    return [flag for flag in flags_of(ReplayConfig).values() if flag.section == "replay"]


def replayed_flags() -> dict[str, Flag]:
    """The flags of a run that may differ in a replay of it."""
    return {
        name: flag for name, flag in flags_of(GRPOConfig).items() if flag.section == "loss" or name in ROLLOUT_FLAGS
    }


def on_one_process(config: GRPOConfig) -> GRPOConfig:
    """The same mathematics without shards, and without what only pays over many steps."""
    return replace(
        config,
        parallel=LearnerParallelSection(
            **{name: getattr(config.parallel, name) for name in ("single_gpu_mode", "backend", "deepspeed_stage")}
        ),
        memory=replace(config.memory, compile_model=False, activation_memory_budget=1.0),
    )


def help_lines(width: int) -> Iterator[Line]:
    yield from wrapped("usage: open-instruct replay RUN --step N [--flag value ...]", width)
    yield BLANK
    yield from wrapped(DESCRIPTION, width)
    yield from flag_lines("What is replayed", own_flags(), width)
    yield from flag_lines("What may differ (default: the run's)", replayed_flags().values(), width, with_defaults=False)
    yield from example_lines(EXAMPLES)


def described(changes: dict[str, tuple[Any, Any]]) -> str:
    """`--loss_fn gspo (was dapo)`, one after the other."""
    return ", ".join(f"--{name} {spelled(new)} (was {spelled(old)})" for name, (old, new) in changes.items())


def _settings_of(run: Path) -> GRPOConfig:
    path = run / CONFIG_FILE
    if not path.is_file():
        raise InputError(f"{run} is not the folder of a run: it has no {CONFIG_FILE}; give a run's --output_dir")
    try:
        return parse(GRPOConfig, [str(path)])
    except InputError as error:
        raise InputError(f"{path} is not that of a GRPO run, which alone can be replayed:\n{error}") from None
