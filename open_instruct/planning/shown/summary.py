"""Parts of a plan's memory and rows of its traffic, the same on the terminal and in HTML."""

import json
from dataclasses import dataclass
from pathlib import Path

from open_instruct.planning.memory.phases import Phase
from open_instruct.planning.plan import Plan
from open_instruct.planning.subject.units import GIB
from open_instruct.planning.traffic import Exchange

# Axes whose groups may leave a node.
MEANT_TO_CROSS = ("replica", "sync", "world", "all")

# The parts of a GPU's memory: the letter, the colours and the meaning of each, in the order in which they are drawn.
PARTS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("parts.json").read_text("utf-8"))
LETTERS = {label: part["letter"] for label, part in PARTS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """All exchanges of one kind in one kind of group, `first` among them."""

    what: str
    num_calls: int
    num_bytes: int
    sent_bytes: int
    first: Exchange

    @property
    def reach(self) -> str:
        """Among how many GPUs, and whether they leave the node."""
        return f"{self.first.group_size} {'across nodes' if self.first.crosses_nodes else 'in a node'}"


def traffic_rows(plan: Plan) -> list[TrafficRow]:
    """The exchanges of a step by what they are, the largest first; those of a group of one send nothing."""
    together: dict[tuple[str, str, str], list[Exchange]] = {}
    for exchange in plan.exchanges:
        if exchange.group_size > 1:
            together.setdefault((exchange.axis, exchange.collective, exchange.what), []).append(exchange)
    numbers = ("num_calls", "num_bytes", "sent_bytes")
    rows = [
        TrafficRow(what=what, first=each[0], **{name: sum(getattr(one, name) for one in each) for name in numbers})
        for (_, _, what), each in together.items()
    ]
    return sorted(rows, key=lambda row: -row.sent_bytes)


def notes_on(plan: Plan) -> list[str]:
    """The drawbacks of a layout in the ranking, in a few words each."""
    layout, splits_tensors = plan.layout, bool(plan.layout.straddling(plan.layout.tensor_groups))
    across = "tensor groups across nodes" if splits_tensors else "across nodes"
    notes = {"does not fit": not plan.fits, across: splits_tensors or layout.straddles_nodes}
    return [note for note, holds in notes.items() if holds]


def unit_of(plan: Plan) -> tuple[str, int]:
    """The unit that suits a plan, by name and in bytes."""
    return ("GiB", GIB) if plan.peak.total_bytes >= GIB else ("MiB", 2**20)


def parts_of(phase: Phase, plan: Plan) -> list[tuple[str, int]]:
    """Label and bytes of each part, in the order of `LETTERS`, without parts that would read as 0.00."""
    parts, least = dict(phase.parts), 0.005 * unit_of(plan)[1]
    return [(label, parts[label]) for label in LETTERS if parts.get(label, 0) >= least]


def parts_in_any(plan: Plan) -> list[str]:
    """The labels that any phase shows, in the same order."""
    shown = {label for phase in plan.phases for label, _ in parts_of(phase, plan)}
    return [label for label in LETTERS if label in shown]
