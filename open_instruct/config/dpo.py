"""The whole configuration of a DPO run, and what must hold between its flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from open_instruct.config.flags import spelled
from open_instruct.config.losses import PREFERENCE_LOSSES, SMOOTHED
from open_instruct.config.sections import (
    LoggingSection,
    MemorySection,
    ModelSection,
    OptimSection,
    ParallelSection,
    PreferenceDataSection,
    PreferenceLossSection,
    RunSection,
)
from open_instruct.config.validation import changed, refuse, training_problems, training_warnings


@dataclass(kw_only=True)
class DPOConfig:
    """Train a model on preference pairs with DPO or one of its relatives, sharded as HSDP, and export it."""

    examples: ClassVar[tuple[str, ...]] = (
        "torchrun --nproc_per_node 8 open_instruct/dpo.py configs/dpo/olmo3_7b_8gpu.yaml --output_dir runs/olmo3",
        "open-instruct dpo --model_name_or_path MODEL_DIR --mixer_list pairs.jsonl 1.0 --output_dir runs/first",
    )

    model: ModelSection
    data: PreferenceDataSection
    loss: PreferenceLossSection
    optim: OptimSection
    parallel: ParallelSection
    memory: MemorySection
    run: RunSection
    logging: LoggingSection


def validate_dpo(config: DPOConfig) -> list[str]:
    """Check everything that the flags alone can tell, and return warnings.

    A flag counts as given when it is not at its default, so that a saved config.yaml, which
    spells out every flag, is judged as the command that wrote it.

    Raises:
        InputError: listing every problem, each with its remedy.
    """
    refuse([*training_problems(config), *loss_problems(config.loss), *_unused_flag_problems(config)])
    return list(training_warnings(config))


def loss_problems(loss: PreferenceLossSection) -> Iterator[str]:
    if loss.loss_type not in PREFERENCE_LOSSES:
        yield f"--loss_type {loss.loss_type}: there is no such loss; choose one of {', '.join(PREFERENCE_LOSSES)}"
        return
    if 0 < loss.label_smoothing < 0.5 and not PREFERENCE_LOSSES[loss.loss_type].has_smoothing:
        yield (
            f"--label_smoothing {spelled(loss.label_smoothing)}: --loss_type {loss.loss_type} has no label smoothing; "
            f"use 0, or one of {', '.join(SMOOTHED)}"
        )
    if loss.cache_logprobs_only and not PREFERENCE_LOSSES[loss.loss_type].needs_reference:
        yield (
            f"--cache_logprobs_only: --loss_type {loss.loss_type} has no reference, so there is nothing to compute; "
            "leave the flag out, or choose another loss"
        )


def _unused_flag_problems(config: DPOConfig) -> Iterator[str]:
    """Flags that were given and would be read by nothing."""
    if not PREFERENCE_LOSSES[config.loss.loss_type].has_margin:
        for given in changed(config, "gamma_beta_ratio"):
            yield f"{given}: only --loss_type simpo has a target margin; leave it out or use simpo"
    if config.data.prefix_sharing == "on" and not config.data.packing:
        yield "--prefix_sharing on: only packed rows share prompts; leave --no_packing out, or use --prefix_sharing off"
