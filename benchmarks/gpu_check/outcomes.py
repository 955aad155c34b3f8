"""What became of a check."""

from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Of one check: its state, why, what it found and, where it failed, the last lines that it
    wrote.
    """

    name: str
    title: str
    state: str
    why: list[str] = field(default_factory=list)
    seconds: float = 0.0
    headline: str = ""
    notes: list[str] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
