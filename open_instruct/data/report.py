"""The report on how many rows were kept, cut, left out or malformed, in counts and in words."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from open_instruct.core.errors import InputError
from open_instruct.core.text import macro_text, spell_count
from open_instruct.data.conversations.columns import guess_columns
from open_instruct.data.files.foreign_json import shorten_value
from open_instruct.data.files.rows import MalformedRow, RawRow
from open_instruct.data.row_store import ROWS_PER_CHUNK

Result = TypeVar("Result")
ReportProgress = Callable[[int, int], None]
"""Called with the number of rows that are done, and of all."""

REPORT = Path(__file__).with_name("report.txt.jinja")
NUM_REASONS_SHOWN = 5
WARNING = "warning: "  # the beginning of a line that is a warning
# Kinds of rows whose form is right. Their reasons differ from row to row, so each kind is counted
# as one reason.
WELL_FORMED = ("template", "tokenizer")


class BadRowLog:
    """Counts bad rows by kind, and remembers the first few reasons, each with its first row."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._missing_keys: set[str] = set()  # of each bad row the key that it lacks, or ""
        self._first_rows: dict[str, str] = {}  # in words, by reason
        self._rows_by_reason: Counter[str] = Counter()
        self._example: Mapping[str, Any] | None = None  # the first row whose form is wrong

    def try_read(self, row: RawRow, read: Callable[[dict[str, Any]], Result]) -> Result | None:
        """What `read` makes of the content of a row; None if the row is bad, which is counted."""
        try:
            return read(row.content())
        except MalformedRow as error:
            self._add(row, error)
            return None

    def _add(self, row: RawRow, error: MalformedRow) -> None:
        self.counts[error.kind] += 1
        self._missing_keys.add(error.missing_key)
        is_well_formed = error.kind in WELL_FORMED
        reason = error.kind if is_well_formed else error.reason
        if reason in self._first_rows or len(self._first_rows) < NUM_REASONS_SHOWN:
            self._first_rows.setdefault(reason, f"{row}: {error.reason}")
            self._rows_by_reason[reason] += 1
        if self._example is None and row.problem is None and not is_well_formed:
            self._example = row.value

    def lines(self) -> list[str]:
        """One line for each reason."""
        lines = []
        for reason, row in self._first_rows.items():
            num_more = self._rows_by_reason[reason] - 1
            lines.append(f"{row} (and so {spell_count(num_more, 'row')} more)" if num_more else row)
        return lines

    def error(
        self,
        num_rows: int,
        *,
        row_example: str,
        columns: Sequence[str],
        docs_page: str,
    ) -> InputError:
        """One error for the user, with all reasons.

        Args:
            num_rows: how many rows there are, bad or not.
            row_example: a good row.
            columns: the keys of a good row, to be guessed among those of the bad row.
            docs_page: the page with other forms of rows.
        """
        example = ""
        guess = ""
        if self._example is not None and row_example:
            example = shorten_value(self._example)
            guess = guess_columns(self._example, columns)
        text = macro_text(REPORT, "refused", self, num_rows, example, guess, row_example, docs_page)
        return InputError(text, kind="bad_row")

    @property
    def missing_key(self) -> str:
        """The key that every bad row lacks, or ""."""
        if len(self._missing_keys) > 1:
            return ""
        return next(iter(self._missing_keys), "")

    @property
    def num_shown(self) -> int:
        """Rows whose reasons are among the first."""
        return self._rows_by_reason.total()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """What became of the rows of a data set, in counts.

    Counts are over distinct rows, but for `num_pairs` and `num_tokens`, which count repeated rows
    again. `num_rows` is always the sum of `bad`, `filtered` and `num_kept`.

    Example: of `rows.jsonl 2.0`, 10 rows, one of them malformed and one with a prompt too long::

        DataReport(sources=["rows.jsonl: 20 taken of 10 rows"], num_rows=10, bad={"empty_reply": 1},
                   filtered={"prompt_too_long": 1}, num_truncated=3, num_kept=8,
                   num_pairs=16, num_tokens=5120)
    """

    sources: list[str]
    """For each data set: how many rows are taken (with repeats), and how many it has."""
    num_rows: int
    bad: dict[str, int] = field(default_factory=dict)
    bad_rows: list[str] = field(default_factory=list)
    filtered: dict[str, int] = field(default_factory=dict)
    num_truncated: int
    num_kept: int
    num_pairs: int
    """Rows with their repeats, whatever their `unit` is."""
    num_tokens: int
    num_held_out: int = 0
    """Rows that `--eval_split` holds out, where these are the rows to train on."""
    warnings: list[str] = field(default_factory=list)
    unit: str = "pair"
    """What a row becomes, such as "pair"."""
    cache_file: str = ""
    from_cache: bool = False

    def lines(self) -> list[str]:
        """The report in lines of text."""
        return macro_text(REPORT, "read", self).split("\n")


class Progress:
    """How many rows are done of all; `report` is not called if nobody would wait for them."""

    def __init__(self, num_rows: int, report: ReportProgress | None) -> None:
        self.num_rows = num_rows
        self._num_done = 0
        self._report = report if num_rows > ROWS_PER_CHUNK else None

    def add(self, num_rows: int) -> None:
        self._num_done += num_rows
        if self._report is not None:
            self._report(self._num_done, self.num_rows)
