"""The line of its plan that a run prints when it starts, and the refusal where it surely cannot fit."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from open_instruct.errors import InputError
from open_instruct.planning.advice import Advice
from open_instruct.planning.plan import Setting, plan_of
from open_instruct.planning.shown.json_record import memory_record
from open_instruct.planning.subject.devices import device_named
from open_instruct.planning.subject.units import GIB
from open_instruct.planning.subject.words import said
from open_instruct.planning.subject.workload import RunConfig, shape_of_run

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCheck:
    """The plan as a starting run prints it: a line, and a `warning` where the run will not fit.

    `memory` is the content of the run's `plan.json`; empty where nothing could be planned.
    """

    line: str
    warning: str = ""
    memory: dict[str, Any] = field(default_factory=dict)


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
        setting = Setting(
            config=config,
            shape=shape_of_run(config, model_folder),
            gpus_per_node=tuple(gpus_per_node),
            device=device_named(f"memory_gib={memory_bytes / GIB}"),
            on_cuda=on_cuda,
            has_engines_in_node=not on_cuda,  # without GPUs a run that other nodes may join is not planned
        )
        plan = plan_of(setting)
        line, *problem = said("start", plan)
        sentences = [*problem, *Advice(plan).lines()] if problem else []
        checked = StartCheck(
            line=line,
            warning=" ".join(f"{sentence.removesuffix('.')}." for sentence in sentences),
            memory=memory_record(plan),
        )
    except Exception as error:  # a plan is a help; the run itself judges what it can read
        log.info("the run has no plan", exc_info=True)
        return StartCheck(line=f"plan: none ({type(error).__name__}: {error})")
    if config.memory.plan_check and sum(plan.moments.state_bytes()) > memory_bytes:
        raise InputError(f"{checked.warning} --no_plan_check starts it all the same")
    return checked
