"""The report on how many rows were kept, cut, left out or malformed, in counts and in words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from open_instruct.data.files.foreign_json import shortened
from open_instruct.data.files.rows import BadRow, MalformedRow, RawRow
from open_instruct.data.messages import guessed_columns
from open_instruct.errors import InputError
from open_instruct.wording import counted

Result = TypeVar("Result")

NUM_REASONS_SHOWN = 5
WARNING = "warning: "  # the beginning of a line that is a warning
# Kinds of rows whose form is right. Their reasons differ from row to row, so each kind is counted as one reason.
WELL_FORMED = ("template", "tokenizer")

FILTERED_WORDS = {
    "prompt_too_long": "the prompt alone fills --max_seq_length",
    "long_prompt": "the prompt is longer than --max_prompt_token_length",
    "same_tokens": "chosen and rejected are the same tokens (after cutting to --max_seq_length)",
}


class BadRowLog:
    """Counts bad rows by kind, and keeps the first few reasons to show, each with the first row that has it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._first: dict[str, BadRow] = {}
        self._rows_by_reason: Counter[str] = Counter()
        self._found: Mapping[str, Any] | None = None

    def reading(self, row: RawRow | BadRow, read: Callable[[dict[str, Any]], Result]) -> Result | None:
        """What `read` makes of the content of a row; None if the row is bad, which is counted."""
        if isinstance(row, BadRow):
            self._add(row)
            return None
        try:
            return read(row.value)
        except MalformedRow as error:
            self._add(error.at(row.file, row.line), row.value)
            return None

    def _add(self, row: BadRow, value: Mapping[str, Any] | None = None) -> None:
        """Count a bad row; `value` is its parsed content, if it could be parsed."""
        self.counts[row.kind] += 1
        is_well_formed = row.kind in WELL_FORMED
        reason = row.kind if is_well_formed else row.reason
        if reason in self._first or len(self._first) < NUM_REASONS_SHOWN:
            self._first.setdefault(reason, row)
            self._rows_by_reason[reason] += 1
        if self._found is None and not is_well_formed:
            self._found = value

    def lines(self) -> list[str]:
        """One line for each reason."""
        lines = []
        for reason, row in self._first.items():
            num_more = self._rows_by_reason[reason] - 1
            lines.append(f"{row} (and so {counted(num_more, 'row')} more)" if num_more else str(row))
        return lines

    def error(self, num_rows: int, *, wanted: str, columns: Sequence[str], page: str) -> InputError:
        """One error for the user, with all reasons.

        Args:
            num_rows: how many rows there are, bad or not.
            wanted: an example of a good row; `page` of the docs has more.
            columns: the keys of a good row, to be guessed among those of the bad row.
        """
        total = self.counts.total()
        num_shown = self._rows_by_reason.total()
        lines = [f"{counted(total, 'row')} of {num_rows:,} cannot be used ({_counts(self.counts)}):"]
        lines += [f"  {line}" for line in self.lines()]
        if total > num_shown:
            lines.append(f"  ... and {total - num_shown:,} more")
        if self._found is not None and wanted:
            lines += [f"found   {shortened(self._found)}", f"wanted  {wanted}"]
            guess = guessed_columns(self._found, columns)
            means = f"Perhaps: --columns {guess}" if guess else "Say by --columns what the columns mean."
            lines.append(f"Other forms of rows are in {page}. {means}")
        these, them = ("this row", "it") if total == 1 else ("these rows", "them")
        without = f", or leave {them} out with --on_bad_row skip" if total < num_rows else ""
        return InputError("\n".join([*lines, f"Mend {these}{without}."]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Counts over distinct rows, but for `num_pairs` and `num_tokens`, which count repeated rows again.

    `unit` names what a kept row becomes, such as "pair"; `num_pairs` counts these units.
    `num_rows` is always `num_bad + num_kept` and the sum of `filtered`. `sources` has, for each data set of the
    mixture, its name, the rows it has, and the rows taken (with repeats).

    Example: of `rows.jsonl 2.0`, 10 rows, one of them malformed and one with a prompt too long::

        DataReport(sources=[("rows.jsonl", 10, 20)], num_rows=10, bad={"empty_reply": 1},
                   filtered={"prompt_too_long": 1}, num_truncated=3, num_kept=8, num_pairs=16, num_tokens=5120)
    """

    sources: list[tuple[str, int, int]]
    num_rows: int
    bad: dict[str, int] = field(default_factory=dict)
    bad_rows: list[str] = field(default_factory=list)
    filtered: dict[str, int] = field(default_factory=dict)
    num_truncated: int
    num_kept: int
    num_pairs: int
    num_tokens: int
    warnings: list[str] = field(default_factory=list)
    unit: str = "pair"
    cache_file: str = ""
    from_cache: bool = False

    @property
    def num_bad(self) -> int:
        return sum(self.bad.values())

    def lines(self) -> list[str]:
        """The report in lines of text."""
        lines = [f"{name}: {taken:,} taken of {counted(rows, 'row')}" for name, rows, taken in self.sources]
        is_pair = self.unit == "pair"  # of two conversations
        mean = self.num_tokens / max(1, self.num_pairs * (1 + is_pair))
        lines.append(
            f"{counted(self.num_pairs, self.unit)}, {counted(self.num_tokens, 'token')}, "
            f"{counted(round(mean), 'token')} a {'conversation' if is_pair else self.unit} on average"
        )
        if self.num_truncated:
            part = " with a reply" if is_pair else ""
            lines.append(f"{counted(self.num_truncated, 'row')}{part} cut to --max_seq_length")
        lines += [f"{counted(count, 'row')} left out: {FILTERED_WORDS[kind]}" for kind, count in self.filtered.items()]
        if self.bad:
            lines.append(f"{counted(self.num_bad, 'row')} skipped as malformed ({_counts(self.bad)}); the first:")
            lines += [f"  {row}" for row in self.bad_rows]
        lines += [f"{WARNING}{warning}" for warning in self.warnings]
        if self.cache_file:
            lines.append(f"{'read from' if self.from_cache else 'kept in'} {self.cache_file}")
        return lines

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DataReport:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        fields["sources"] = [tuple(source) for source in fields["sources"]]
        return cls(**fields)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
