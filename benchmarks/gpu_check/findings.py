"""What one check found: tables of figures, notes, and what did not hold."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, object]


@dataclass(slots=True)
class Findings:
    """Kept in `file` as it grows, so that a check that is ended early leaves what it had found.

    Example: `{"headline": "3 waits a DPO step", "failures": [], "notes": [], "tables": [{"title":
    "Waits", "rows": [{"objective": "dpo", "waits": 3}]}]}`. The rows of a table need not have the
    same columns.
    """

    file: Path
    headline: str = ""
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)

    def table(self, title: str, rows: Sequence[Row]) -> None:
        self.tables.append({"title": title, "rows": [dict(row) for row in rows]})
        self.save()

    def require(self, holds: bool, otherwise: str) -> None:
        """The check has failed where `holds` is false; `otherwise` says how."""
        if not holds:
            self.failures.append(otherwise)
            self.save()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.save()

    def save(self) -> None:
        record = asdict(self)
        del record["file"]
        self.file.write_text(json.dumps(record, indent=1, default=str), encoding="utf-8")
