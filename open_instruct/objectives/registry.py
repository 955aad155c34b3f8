"""The objectives by the name of their command. A line here and a file in this folder add one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from open_instruct.config.parser import nearest, parse
from open_instruct.core.errors import InputError
from open_instruct.core.text import one_of

if TYPE_CHECKING:
    from open_instruct.objectives.objective import Objective

# The place of each objective, and the rows it trains on.
OBJECTIVES = {
    "dpo": ("open_instruct.objectives.dpo:DPO", "preference pairs"),
    "distill": (
        "open_instruct.objectives.distill:DISTILL",
        "conversations, towards a frozen teacher",
    ),
    "kto": ("open_instruct.objectives.kto:KTO", "single replies, each labelled good or bad"),
    "prm": (
        "open_instruct.objectives.prm:PRM",
        "solutions with a label for each step, to score steps",
    ),
    "reward_model": (
        "open_instruct.objectives.reward_model:REWARD_MODEL",
        "preference pairs, to score replies",
    ),
    "sft": ("open_instruct.objectives.sft:SFT", "conversations, as a warm start"),
}
# GRPO is an objective too, with a command of its own.
GRPO = "open_instruct.objectives.policy_gradient:GRPO"


def objective_names() -> list[str]:
    """The commands that train."""
    return [*OBJECTIVES, "grpo"]


def objective_named(name: str) -> Objective:
    """Import the objective of that name: one of `OBJECTIVES`, or grpo."""
    place = GRPO if name == "grpo" else OBJECTIVES[name][0]
    objective: Objective = resolve_name(place)
    return objective


def config_class_of(name: str, **more: type) -> Any:
    """The flags of the run `name` with `more` sections, by the field that holds each."""
    run = objective_named(name).config_class
    return make_dataclass(run.__name__, more.items(), bases=(run,), kw_only=True)


def described_run(
    words: Sequence[str], *, assumed: Mapping[str, Any], example: str, **more: type
) -> tuple[Any, Objective, list[str]]:
    """The run that words describe, such as those after `open-instruct plan`: the name of its
    command, then its flags.

    Returns its config, with `more` sections, its objective, and warnings of flags that it does not
    need.

    Args:
        assumed: values for flags that may be left out here.
        example: the beginning of a command that would do.

    Raises:
        InputError: there is no such run, or a flag is wrong.
    """
    name = words[0] if words else ""
    names = objective_names()
    if name not in names:
        given = f"'{name}' is not a run{nearest(name, names)}; " if name else ""
        raise InputError(
            f"{given}the first word is {one_of(names)}: {example} ...", kind="stray_word"
        )
    unneeded: list[str] = []
    config = parse(config_class_of(name, **more), words[1:], assumed=assumed, unneeded=unneeded)
    return (
        config,
        objective_named(name),
        [f"not needed here, and left out: {each}" for each in unneeded],
    )
