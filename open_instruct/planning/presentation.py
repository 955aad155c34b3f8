"""A plan for people and for scripts: its sentences, its parts and rows, and its JSON.

The sentences stand in words.txt.jinja. Terminal and page show the same parts and rows.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from open_instruct.config.sections import OptimSection
from open_instruct.core.text import macro_text, spell_count
from open_instruct.parallel.wording import nodes_text
from open_instruct.planning.advice import Advice, Change
from open_instruct.planning.exchanges import Axis, Collective, Exchange
from open_instruct.planning.memory.phases import Phase
from open_instruct.planning.placement_choice import PlacementChoice
from open_instruct.planning.placements import Placement
from open_instruct.planning.plan import BATCH, Plan
from open_instruct.planning.subject import units

WORDS = Path(__file__).with_name("words.txt.jinja")

CHANGES = ("to_fit", "with_adapters", "faster", "recomputes_less", "exchanges_less")

# Axes whose groups may leave a node.
CROSSING_AXES = ("replica", "sync", "world", "all")

# The parts of a GPU's memory: the letter, the colours and the meaning of each, in the order in
# which they are drawn.
PARTS: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("parts.json").read_text("utf-8")
)
NO_BREAK_SPACE = "\u00a0"
LETTERS = {label: part["letter"] for label, part in PARTS.items()}


def render_words(what: str, subject: Any) -> list[str]:
    """The paragraphs of a macro: "advice" of an `Advice`, any other of a `Plan`."""
    text = macro_text(WORDS, what, subject, counted=spell_count, nodes_text=nodes_text, units=units)
    paragraphs = []
    for paragraph in text.split("\n\n"):
        words = paragraph.split()
        if words:
            paragraphs.append(" ".join(words))
    return paragraphs


def traffic_rows(plan: Plan) -> list[list[Exchange]]:
    """The exchanges of a step by what they are, the largest first, without groups of one."""
    rows: dict[tuple[Axis, Collective, str], list[Exchange]] = {}
    for exchange in plan.exchanges:
        if exchange.group_size > 1:
            kind = (exchange.axis, exchange.collective, exchange.what)
            rows.setdefault(kind, []).append(exchange)
    return sorted(rows.values(), key=_sent_bytes, reverse=True)


def _sent_bytes(exchanges: Sequence[Exchange]) -> int:
    return sum(exchange.sent_bytes for exchange in exchanges)


def layout_notes(plan: Plan) -> list[str]:
    """The drawbacks of a layout in the ranking, in a few words each."""
    layout = plan.layout
    notes = []
    if not plan.fits:
        notes.append("does not fit")
    if layout.straddling(layout.tensor_groups):
        notes.append("tensor groups across nodes")
    elif layout.straddles_nodes:
        notes.append("across nodes")
    return notes


def choose_unit(plan: Plan) -> tuple[str, int]:
    """The unit that suits a plan, by name and in bytes."""
    if plan.peak.total_bytes >= units.GIB:
        return "GiB", units.GIB
    return "MiB", units.MIB


def holder_name(plan: Plan) -> str:
    """What has the memory of the plan: a GPU, or without one a process."""
    return "GPU" if plan.setting.on_cuda else "process"


def legend(plan: Plan) -> str:
    """The letters of all phases in a line, "P parameters, G gradients", unbroken in themselves."""
    entries = [f"{LETTERS[label]} {label}" for label in visible_labels(plan)]
    return ", ".join(entry.replace(" ", NO_BREAK_SPACE) for entry in entries)


def visible_parts(phase: Phase, plan: Plan) -> list[tuple[str, int]]:
    """Label and bytes of each part that reads as more than 0.00, in the order of `LETTERS`."""
    all_parts = dict(phase.parts)
    _, unit_bytes = choose_unit(plan)
    parts = []
    for label in LETTERS:
        num_bytes = all_parts.get(label, 0)
        if num_bytes >= 0.005 * unit_bytes:
            parts.append((label, num_bytes))
    return parts


def visible_labels(plan: Plan) -> list[str]:
    """The labels of the parts that any phase shows, in the same order."""
    visible: set[str] = set()
    for phase in plan.phases:
        visible.update(label for label, _ in visible_parts(phase, plan))
    return [label for label in LETTERS if label in visible]


def plan_record(
    plan: Plan, advice: Advice, choice: PlacementChoice | None = None
) -> dict[str, Any]:
    """The keys that scripts read; nothing in it is rounded."""
    setting = plan.setting
    placements: list[dict[str, Any]] = []
    if choice is not None:
        placements = [_placement_record(each, choice) for each in choice.best]
    return {
        "placements": placements,
        "model": _take_fields(setting.shape, "name", "family", "num_params", "num_trained"),
        "device": asdict(setting.device),
        "mfu": setting.mfu,
        "layout": plan.layout.as_json(),
        "workload": asdict(plan.workload),
        **_take_fields(plan, "fits", "headroom_bytes"),
        **memory_record(plan),
        "host": _phase_record(plan.host),
        "exchanges": [asdict(exchange) for exchange in plan.exchanges],
        "time": asdict(plan.time) | _take_fields(plan.time, "step_s", "bound_by"),
        **_take_fields(plan, "tokens_per_step", "tokens_per_second"),
        "weight_syncs": [asdict(cost) for cost in plan.syncs],
        "advice": _advice_record(advice),
        "layouts": [_layout_record(other) for other in advice.ranked],
    }


def memory_record(plan: Plan) -> dict[str, Any]:
    """The content of a run's `plan.json`: the memory of a GPU, and of each phase by its parts."""
    config = plan.setting.config
    phases = []
    for phase in plan.phases:
        phases.append({"name": phase.name} | _phase_record(phase))
    record = {
        "memory_bytes": plan.setting.device.memory_bytes,
        "peak_phase": plan.peak.name,
        "activation_checkpointing": config.memory.activation_checkpointing,
        "activation_checkpointing_modules": list(plan.workload.checkpointing_modules),
        "phases": phases,
    }
    if isinstance(config.optim, OptimSection):
        record |= _take_fields(config.optim, *BATCH)
    return record


def _advice_record(advice: Advice) -> dict[str, Any]:
    record: dict[str, Any] = {"text": render_words("advice", advice)}
    for name in CHANGES:
        record[name] = _change_record(getattr(advice, name))
    return record


def _phase_record(phase: Phase) -> dict[str, Any]:
    return {"total_bytes": phase.total_bytes, "parts": dict(phase.parts)}


def _change_record(change: Change | None) -> dict[str, Any] | None:
    if change is None:
        return None
    return _take_fields(change, "flags", "values") | _layout_record(change.plan)


def _layout_record(plan: Plan) -> dict[str, Any]:
    cells = plan.setting.backend.cells(plan.layout)
    return {
        **asdict(plan.layout),
        "straddles_nodes": plan.layout.straddles_nodes,
        "sharing": " ".join(map(str, cells.values())),
        "fits": plan.fits,
        "peak_bytes": plan.peak.total_bytes,
        "peak_phase": plan.peak.name,
        "step_s": plan.time.step_s,
        **_take_fields(plan, "tokens_per_step", "tokens_per_second"),
    }


def placement_rows(choice: PlacementChoice) -> list[list[str]]:
    """A row of text for the best placement of each kind: who stands where, seconds, memory."""
    rows: list[list[str]] = []
    for each in choice.best:
        seconds = {name: units.seconds(value) for name, value in each.phase_s.items()}
        turns_s = sum(each.phase_s.get(name, 0.0) for name in ("sync", "move"))
        notes = []
        if not each.fits:
            notes.append("does not fit")
        if each is choice.chosen:
            notes.append("◀ this")
        rows.append(
            [
                each.kind,
                _spell_learners(each.learners),
                f"{each.engines} x {each.degree}",
                seconds["generate"],
                seconds["learn"],
                units.seconds(turns_s),
                units.seconds(each.step_s),
                units.gib(max(each.phase_bytes.values())),
                ", ".join(notes),
            ]
        )
    return rows


def _spell_learners(learners: Sequence[int]) -> str:
    """Learners of each node that has some: "8", "4x8" for four nodes, or "4 2"."""
    numbers = [each for each in learners if each]
    if len(numbers) > 1 and len(set(numbers)) == 1:
        return f"{len(numbers)}x{numbers[0]}"
    return " ".join(map(str, numbers))


PLACEMENT_HEADS = (
    "placement",
    "learners",
    "engines",
    "generate",
    "learn",
    "switch",
    "step",
    "GiB",
    "",
)


def _placement_record(placement: Placement, choice: PlacementChoice) -> dict[str, Any]:
    """One placement as `--json` has it."""
    return {
        **_take_fields(placement, "kind", "learners", "engines", "degree", "num_gpus", "fits"),
        **_take_fields(placement, "phase_bytes", "phase_s", "step_s", "num_seqs", "moved_bytes"),
        **_take_fields(placement, "flags", "idle_share"),
        **_take_fields(placement, "prompts_ahead", "older_fraction"),
        "is_chosen": placement is choice.chosen,
    }


def _take_fields(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}
