"""The line of its plan that a run prints when it starts, and the refusal where it surely cannot fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from open_instruct.errors import InputError
from open_instruct.planning.advice import change_to_fit, other_batch
from open_instruct.planning.plan import Plan, Setting, plan_of
from open_instruct.planning.shown.units import GIB, gib
from open_instruct.planning.subject.devices import device_named
from open_instruct.planning.subject.workload import RunConfig, shape_of_run

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCheck:
    """What a run says of its plan: `warning` where it will not fit, `refusal` where it surely cannot."""

    line: str
    warning: str | None = None
    refusal: str | None = None


def check_plan(
    config: RunConfig, gpus_per_node: Sequence[int], *, model_folder: str, memory_bytes: int, on_cuda: bool
) -> StartCheck:
    """Plan a run that is about to start.

    Args:
        config: of the run.
        gpus_per_node: processes that train on each node.
        model_folder: where the checkpoint's config.json lies.
        memory_bytes: of one device.
        on_cuda: whether that is a GPU; else a rank's share of a host's memory.

    Raises:
        InputError: weights, gradients and optimizer states alone are more than the device's memory, and the run has
            --plan_check; the message ends with what would fit.
    """
    try:
        shape, device = shape_of_run(config, model_folder), device_named(f"memory_gib={memory_bytes / GIB}")
        nodes = tuple(gpus_per_node)
        checked = _checked(Setting(config=config, shape=shape, gpus_per_node=nodes, device=device, on_cuda=on_cuda))
    except Exception as error:  # a plan is a help; the run itself judges what it can read
        log.info("the run has no plan", exc_info=True)
        return StartCheck(line=f"plan: none ({type(error).__name__}: {error})")
    if checked.refusal is not None and config.memory.plan_check:
        raise InputError(f"{checked.refusal} --no_plan_check starts it all the same")
    return checked


def _checked(setting: Setting) -> StartCheck:
    plan, each = plan_of(setting), "on each GPU" if setting.on_cuda else "for each process of a node"
    needs, memory = gib(plan.peak.total_bytes), gib(plan.memory_bytes)
    line = f"plan: needs {needs} of {memory} GiB {each} (most in: {plan.peak.name})"
    state = sum(plan.moments.state_bytes())
    if plan.fits:
        return StartCheck(line=line)
    if state <= plan.memory_bytes:
        return StartCheck(line=line, warning=f"the plan does not fit: memory will most likely run out. {_remedy(plan)}")
    refusal = (
        f"the run cannot fit: weights, gradients and optimizer states alone need {gib(state)} GiB, and there are "
        f"{memory} GiB {each}. {_remedy(plan)}"
    )
    return StartCheck(line=line, refusal=refusal)


def _remedy(plan: Plan) -> str:
    change = change_to_fit(plan)
    if change is None:
        return "No flag makes it fit: take a smaller model, or devices with more memory."
    fits = f"It would fit {'' if change.text.startswith('on ') else 'with '}{change.text}."
    return " ".join((fits, *other_batch(plan, change)))
