"""The plan of a run that starts, which is refused where it surely cannot fit."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import InputError
from open_instruct.planning.advice import Advice
from open_instruct.planning.placements import find_placement
from open_instruct.planning.plan import make_plan
from open_instruct.planning.presentation import memory_record, render_words
from open_instruct.planning.setting import Setting
from open_instruct.planning.subject import units
from open_instruct.planning.subject.build_workload import RunConfig, build_shape
from open_instruct.planning.subject.devices import find_device

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
    config: RunConfig,
    gpus_per_node: Sequence[int],
    *,
    model_folder: str,
    memory_bytes: int,
    on_cuda: bool,
) -> StartCheck:
    """Plan a run that is about to start.

    Args:
        config: of the run.
        gpus_per_node: processes that train on each node.
        model_folder: where the checkpoint's config.json lies.
        memory_bytes: of one device.
        on_cuda: whether that is a GPU; else a rank's share of a host's memory.

    Raises:
        InputError: weights, gradients and optimizer states alone are more than the device's memory,
            and the run has --plan_check; the message ends with what would fit.
    """
    try:
        setting = Setting(
            config=config,
            shape=build_shape(config, model_folder),
            gpus_per_node=tuple(gpus_per_node),
            device=find_device(f"memory_gib={memory_bytes / units.GIB}"),
            on_cuda=on_cuda,
            # Without GPUs a run that other nodes may join is not planned.
            has_engines_in_node=not on_cuda,
        )
        plan = make_plan(setting)
        line, *sentences = render_words("start", plan)
        if sentences:
            sentences += render_words("advice", Advice(plan))
        warning = " ".join(f"{sentence.removesuffix('.')}." for sentence in sentences)
        record = memory_record(plan)
        if on_cuda and isinstance(config, GRPOConfig):
            placement = find_placement(plan)
            record["seconds"] = placement.seconds_by_metric
            if placement.pauses_completions:
                record["older_fraction"] = placement.older_fraction
        check = StartCheck(line=line, warning=warning, memory=record)
    except Exception as error:  # a plan is a help; the run itself judges what it can read
        log.info("the run has no plan", exc_info=True)
        return StartCheck(line=f"plan: none ({type(error).__name__}: {error})")
    if config.memory.plan_check and plan.state_bytes > memory_bytes:
        raise InputError(f"{check.warning} --no_plan_check starts it all the same", kind="machine")
    return check
