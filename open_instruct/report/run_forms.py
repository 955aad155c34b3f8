"""The forms that layout.json and plan.json of a run have.

A page leaves out a file of another form, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter

from open_instruct.core.files import read_whole
from open_instruct.core.shard_layout import ShardLayout

T = TypeVar("T")
NumBytes = Annotated[float, Field(ge=0, le=2**63, allow_inf_nan=False)]
MAX_FILE_BYTES = 2**24
MAX_RANKS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPhase:
    """The memory that a phase of a step was planned to need, and its parts by their labels."""

    name: str
    total_bytes: NumBytes
    parts: dict[str, NumBytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMemory:
    """The content of `plan.json`: a device's memory, and the need of each phase."""

    memory_bytes: NumBytes
    peak_phase: str
    phases: Annotated[tuple[PlannedPhase, ...], Field(min_length=1, max_length=100)]
    seconds: dict[str, NumBytes] = field(default_factory=dict)
    """Of GRPO on GPUs: the least seconds of each part of a step, by the names of its metrics."""

    older_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Where engines and learners take turns: tokens of a step from earlier turns of the engines."""

    @property
    def peak_bytes(self) -> float:
        return max(phase.total_bytes for phase in self.phases)


_PLAN = TypeAdapter(PlannedMemory)
_LAYOUT = TypeAdapter(ShardLayout)


def parse_plan(content: bytes) -> PlannedMemory:
    """:raises ValueError: it is no plan."""
    return _PLAN.validate_json(content, strict=True)


def parse_layout(content: bytes) -> ShardLayout:
    """The layout of the ranks; the groups are computed anew.

    :raises ValueError: it is no layout, or one of more ranks than there are.
    """
    # This fails, too, where the degrees are not those of the ranks.
    layout = _LAYOUT.validate_json(content, strict=True)
    degrees = (
        layout.shard_degree,
        layout.num_replicas,
        layout.tensor_parallel_degree,
        layout.context_parallel_degree,
    )
    if min(*layout.gpus_per_node, *degrees) < 1 or layout.world_size > MAX_RANKS:
        raise ValueError("no machine has these ranks")
    return layout


def read_form(path: Path, parse: Callable[[bytes], T]) -> tuple[T | None, str]:
    """The content of a file, or None with the sentence that it is left out ("" without a file)."""
    if not path.exists():
        return None, ""
    try:
        return parse(read_whole(path, most=MAX_FILE_BYTES)), ""
    except (OSError, ValueError):
        return None, f"{path.name} is of another form, and is left out."
