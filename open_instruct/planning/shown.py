"""A plan for people and for scripts: in sentences (words.txt.jinja), its parts and rows for
terminal and page alike, as JSON, and as a run that starts prints it, which is refused where it
surely cannot fit.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from open_instruct.config.sections import OptimSection
from open_instruct.core.errors import InputError
from open_instruct.core.text import counted, macro_text
from open_instruct.parallel.wording import nodes_text
from open_instruct.planning.advice import Advice, Change
from open_instruct.planning.exchanges import Exchange
from open_instruct.planning.memory.phases import Phase
from open_instruct.planning.plan import BATCH, Plan, make_plan
from open_instruct.planning.setting import Setting
from open_instruct.planning.subject import units
from open_instruct.planning.subject.build_workload import RunConfig, build_shape
from open_instruct.planning.subject.devices import device_named

log = logging.getLogger(__name__)

WORDS = Path(__file__).with_name("words.txt.jinja")

CHANGES = ("to_fit", "with_adapters", "faster", "recomputes_less", "exchanges_less")

# Axes whose groups may leave a node.
MEANT_TO_CROSS = ("replica", "sync", "world", "all")

# The parts of a GPU's memory: the letter, the colours and the meaning of each, in the order in
# which they are drawn.
PARTS: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("parts.json").read_text("utf-8")
)
NO_BREAK_SPACE = "\u00a0"
LETTERS = {label: part["letter"] for label, part in PARTS.items()}


def said(what: str, subject: Any) -> list[str]:
    """The paragraphs of a macro: "advice" of an `Advice`, any other of a `Plan`."""
    text = macro_text(WORDS, what, subject, counted=counted, nodes_text=nodes_text, units=units)
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return [paragraph for paragraph in paragraphs if paragraph]


def traffic_rows(plan: Plan) -> list[list[Exchange]]:
    """The exchanges of a step by what they are, the largest first; those of a group of one send
    nothing.
    """
    together: dict[tuple[str, str, str], list[Exchange]] = {}
    for exchange in plan.exchanges:
        if exchange.group_size > 1:
            together.setdefault((exchange.axis, exchange.collective, exchange.what), []).append(
                exchange
            )
    return sorted(together.values(), key=lambda row: -sum(each.sent_bytes for each in row))


def notes_on(plan: Plan) -> list[str]:
    """The drawbacks of a layout in the ranking, in a few words each."""
    layout, splits_tensors = plan.layout, bool(plan.layout.straddling(plan.layout.tensor_groups))
    across = "tensor groups across nodes" if splits_tensors else "across nodes"
    notes = {"does not fit": not plan.fits, across: splits_tensors or layout.straddles_nodes}
    return [note for note, holds in notes.items() if holds]


def unit_of(plan: Plan) -> tuple[str, int]:
    """The unit that suits a plan, by name and in bytes."""
    return ("GiB", units.GIB) if plan.peak.total_bytes >= units.GIB else ("MiB", 2**20)


def unit_name(plan: Plan) -> str:
    """What has the memory of the plan: a GPU, or without one a process."""
    return "GPU" if plan.setting.on_cuda else "process"


def legend(plan: Plan) -> str:
    """The letters of all phases in a line, "P parameters, G gradients"; no break parts one from its
    meaning.
    """
    entries = (f"{LETTERS[label]} {label}" for label in parts_in_any(plan))
    return ", ".join(entry.replace(" ", NO_BREAK_SPACE) for entry in entries)


def parts_of(phase: Phase, plan: Plan) -> list[tuple[str, int]]:
    """Label and bytes of each part, in the order of `LETTERS`, without parts that would read as
    0.00.
    """
    parts, least = dict(phase.parts), 0.005 * unit_of(plan)[1]
    return [(label, parts[label]) for label in LETTERS if parts.get(label, 0) >= least]


def parts_in_any(plan: Plan) -> list[str]:
    """The labels that any phase shows, in the same order."""
    shown = {label for phase in plan.phases for label, _ in parts_of(phase, plan)}
    return [label for label in LETTERS if label in shown]


def as_record(plan: Plan, advice: Advice) -> dict[str, Any]:
    """The keys that scripts read; nothing in it is rounded."""
    return {
        "model": _named(plan.setting.shape, "name", "family", "num_params", "num_trained"),
        "device": asdict(plan.setting.device),
        "mfu": plan.setting.mfu,
        "layout": plan.layout.as_json(),
        "workload": asdict(plan.workload),
        **_named(plan, "fits", "headroom_bytes"),
        **memory_record(plan),
        "host": _phase(plan.host),
        "exchanges": [asdict(exchange) for exchange in plan.exchanges],
        "time": asdict(plan.time) | _named(plan.time, "step_s", "bound_by"),
        **_named(plan, "tokens_per_step", "tokens_per_second"),
        "weight_syncs": [asdict(cost) for cost in plan.syncs],
        "advice": {"text": said("advice", advice)}
        | {name: _change(getattr(advice, name)) for name in CHANGES},
        "layouts": [_layout(other) for other in advice.ranked],
    }


def memory_record(plan: Plan) -> dict[str, Any]:
    """The content of a run's `plan.json`: the memory of a GPU, and that of each phase by its
    parts.
    """
    optim = plan.setting.config.optim
    return {
        "memory_bytes": plan.setting.device.memory_bytes,
        "peak_phase": plan.peak.name,
        "activation_checkpointing": plan.setting.config.memory.activation_checkpointing,
        "activation_checkpointing_modules": list(plan.workload.checkpointing_modules),
        "phases": [{"name": phase.name} | _phase(phase) for phase in plan.phases],
    } | (_named(optim, *BATCH) if isinstance(optim, OptimSection) else {})


def _phase(phase: Phase) -> dict[str, Any]:
    return {"total_bytes": phase.total_bytes, "parts": dict(phase.parts)}


def _change(change: Change | None) -> dict[str, Any] | None:
    return None if change is None else _named(change, "flags", "values") | _layout(change.plan)


def _layout(plan: Plan) -> dict[str, Any]:
    return {
        **asdict(plan.layout),
        "straddles_nodes": plan.layout.straddles_nodes,
        "sharing": " ".join(map(str, plan.setting.backend.cells(plan.layout).values())),
        "fits": plan.fits,
        "peak_bytes": plan.peak.total_bytes,
        "peak_phase": plan.peak.name,
        "step_s": plan.time.step_s,
        **_named(plan, "tokens_per_step", "tokens_per_second"),
    }


def _named(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


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
            device=device_named(f"memory_gib={memory_bytes / units.GIB}"),
            on_cuda=on_cuda,
            # Without GPUs a run that other nodes may join is not planned.
            has_engines_in_node=not on_cuda,
        )
        plan = make_plan(setting)
        line, *problem = said("start", plan)
        sentences = [*problem, *said("advice", Advice(plan))] if problem else []
        checked = StartCheck(
            line=line,
            warning=" ".join(f"{sentence.removesuffix('.')}." for sentence in sentences),
            memory=memory_record(plan),
        )
    except Exception as error:  # a plan is a help; the run itself judges what it can read
        log.info("the run has no plan", exc_info=True)
        return StartCheck(line=f"plan: none ({type(error).__name__}: {error})")
    if config.memory.plan_check and plan.state_bytes > memory_bytes:
        raise InputError(
            f"{checked.warning} --no_plan_check starts it all the same", kind="machine"
        )
    return checked
