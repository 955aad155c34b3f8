"""The objectives by the name of their command. A line here and a file in this folder add one."""

from __future__ import annotations

from dataclasses import make_dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

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


def list_objectives() -> list[str]:
    """The commands that train."""
    return [*OBJECTIVES, "grpo"]


def load_objective(name: str) -> Objective:
    """Import the objective of that name: one of `OBJECTIVES`, or grpo."""
    place = GRPO if name == "grpo" else OBJECTIVES[name][0]
    objective: Objective = resolve_name(place)
    return objective


def build_config_class(name: str, **more: type) -> Any:
    """The flags of the run `name` with `more` sections, by the field that holds each."""
    run = load_objective(name).config_class
    return make_dataclass(run.__name__, more.items(), bases=(run,), kw_only=True)
