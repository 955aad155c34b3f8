"""The whole configuration of a DPO run, and what must hold between its flags."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from open_instruct.config.flags import spelled
from open_instruct.config.sections import PreferenceDataSection, PreferenceLossSection
from open_instruct.config.training import TrainingConfig
from open_instruct.config.validation import validated
from open_instruct.losses.preference import DIVERGENCE, F_DIVERGENCES, PREFERENCE_LOSSES, SHORTER

# Flags that change the inputs of every loss: what each chooses, and the value that changes nothing.
CHANGING_FLAGS = {
    SHORTER: ("sums over replies to desensitize", None),
    DIVERGENCE: ("divergence to choose", F_DIVERGENCES[0]),
}


@dataclass(kw_only=True)
class DPOConfig(TrainingConfig):
    """Train a model on preference pairs with DPO or one of its relatives, sharded as HSDP, and export it."""

    examples: ClassVar[tuple[str, ...]] = (
        "open-instruct dpo configs/dpo/olmo3_7b_8gpu.yaml --num_processes 8 --output_dir runs/olmo3",
        "open-instruct dpo --model_name_or_path MODEL_DIR --mixer_list pairs.jsonl 1.0 --output_dir runs/first",
    )

    data: PreferenceDataSection
    loss: PreferenceLossSection


def validate_dpo(config: DPOConfig) -> list[str]:
    """Check everything that the flags alone can tell, and return warnings.

    A flag counts as given when it is not at its default, so that a saved config.yaml, which
    spells out every flag, is judged as the command that wrote it.

    Raises:
        InputError: listing every problem, each with its remedy.
    """
    return validated(config, loss_problems(config.loss))


def loss_problems(loss: PreferenceLossSection) -> Iterator[str]:
    names = loss.names
    if unknown := [name for name in names if name not in PREFERENCE_LOSSES]:
        yield f"--loss_type {spelled(unknown)}: there is no such loss; choose one of {', '.join(PREFERENCE_LOSSES)}"
        return
    given = f"--loss_type {spelled(names)}"
    if len(set(names)) < len(names):
        yield f"{given} names a loss twice: name it once, with the sum of its --loss_weights"
    if loss.loss_weights and (len(loss.loss_weights) != len(names) or min(loss.loss_weights) <= 0):
        yield f"--loss_weights {spelled(loss.loss_weights)}: give a number above 0 for each of {given}, in their order"
    for flag, (what, off) in CHANGING_FLAGS.items():
        value = getattr(loss, flag)
        having = [name for name, known in PREFERENCE_LOSSES.items() if flag in known.reads]
        if value != off and not set(names) <= set(having):
            yield f"--{flag} {spelled(value)}: {given} has no {what}; use {spelled(off)}, or one of {', '.join(having)}"
    for flag in ("cache_logprobs_only", "ref_policy_update_freq"):
        if getattr(loss, flag) and not needs_reference(loss):
            yield (
                f"--{flag}: {given} has no reference, so there is nothing to compute; "
                "leave the flag out, or choose another loss"
            )


def needs_reference(loss: PreferenceLossSection) -> bool:
    return any(PREFERENCE_LOSSES[name].needs_reference for name in loss.names)
