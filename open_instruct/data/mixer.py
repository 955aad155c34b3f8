"""Mixer lists: which data sets, how much of each to take, and which rows."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np

from open_instruct.config.sections import RowsSection
from open_instruct.core.errors import InputError
from open_instruct.core.text import counted
from open_instruct.data.conversations.row_keys import find_value
from open_instruct.data.files.opening import open_rows
from open_instruct.data.files.rows import RawRow, RowSource

MAX_SELECTED_ROWS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerEntry:
    """One data set of a mixture. A float `amount` is a fraction of its rows, an int a count of
    rows.

    Example: `--mixer_list rows.jsonl 0.5 other.parquet 300` gives
    `MixerEntry(name="rows.jsonl", amount=0.5, split="train")` and
    `MixerEntry(name="other.parquet", amount=300, split="train")`.
    """

    name: str
    amount: float | int
    split: str
    flag: str = "--mixer_list"

    def open(self, columns: Sequence[str]) -> RowSource:
        """All rows of the data set, with the columns that `columns` gives other names."""
        return renamed(open_rows(self.name, self.split, flag=self.flag), columns)

    def count(self, num_rows: int) -> int:
        """Rows to take out of `num_rows`, rounded half up; more than `num_rows` when it upsamples.

        Raises:
            InputError: there is nothing to take, or more than could be meant.
        """
        if num_rows == 0:
            raise InputError(f"{self.flag}: {self.name} has no rows.", kind="bad_row")
        exact = self.amount if isinstance(self.amount, int) else self.amount * num_rows
        if exact > MAX_SELECTED_ROWS:
            raise InputError(
                f"{self.flag}: {self.name} {self.amount} takes more than {MAX_SELECTED_ROWS:,} "
                f"rows (it has {num_rows:,}); a fraction of 1.0 takes every row once.",
                kind="out_of_range",
            )
        count = math.floor(exact + 0.5)
        if count == 0:
            raise InputError(
                f"{self.flag}: {self.name} {self.amount} takes zero of its "
                f"{counted(num_rows, 'row')}; take a larger fraction or a count of rows, or leave "
                "the data set out.",
                kind="out_of_range",
            )
        return count


def parse_mixer_list(
    words: Sequence[str], splits: Sequence[str] = ("train",), *, flag: str = "--mixer_list"
) -> tuple[MixerEntry, ...]:
    """The entries of a list of alternating names and amounts, with one split for all or one for
    each.

    An amount with a dot is a fraction (`1.0` is every row, `2.5` every row twice and half of them a
    third time), one without is a count. `config.validation.mixer_problems` refuses lists of another
    form.
    """
    names = words[::2]
    splits = list(splits) * len(names) if len(splits) == 1 else splits
    return tuple(
        MixerEntry(
            name=name,
            amount=float(amount) if "." in amount else int(amount),
            split=split,
            flag=flag,
        )
        for name, amount, split in zip(names, words[1::2], splits, strict=True)
    )


def entries_of(data: RowsSection, flag: str) -> tuple[MixerEntry, ...]:
    """The entries of the mixer list that a run has under `flag`, such as "mixer_list"."""
    return parse_mixer_list(getattr(data, flag), getattr(data, f"{flag}_splits"), flag=f"--{flag}")


def select_rows(entry: MixerEntry, num_rows: int, seed: int) -> np.ndarray:
    """Indices of the rows to take, int64: whole copies in file order, then a random part in file
    order.

    The part depends on the seed, the data set's file name and split, and nothing else of the
    mixture, and a smaller amount takes a subset of what a larger one takes. So a change to the
    mixture keeps most rows, and with them what is cached for each.

    Raises:
        InputError: see `MixerEntry.count`.
    """
    num_copies, num_more = divmod(entry.count(num_rows), num_rows)
    digest = hashlib.sha256(f"{seed}\n{entry.split}\n{PurePath(entry.name).name}".encode()).digest()
    shuffled = np.random.default_rng(int.from_bytes(digest[:16], "little")).permutation(num_rows)
    copies = np.tile(np.arange(num_rows, dtype=np.int64), num_copies)
    return np.concatenate([copies, np.sort(shuffled[:num_more]).astype(np.int64)])


def renamed(source: RowSource, columns: Sequence[str]) -> RowSource:
    """A source with its columns renamed by the words of `--columns`, `OURS=THEIRS`:
    `messages=dialogue`.

    It warns of each column that no row so far had.
    """
    names = dict(word.split("=", 1) for word in columns)
    unseen = set(names.values())

    def renamed_row(row: RawRow) -> RawRow:
        value: dict[str, Any] = dict(row.value)
        found = {
            ours: item
            for ours, theirs in names.items()
            if (item := find_value(value, theirs)) is not None
        }
        unseen.difference_update(names[ours] for ours in found)
        for theirs in names.values():
            value.pop(theirs if theirs in row.value else theirs.partition(".")[0], None)
        return replace(row, value=value | found)

    def warnings() -> list[str]:
        return [
            f"--columns {ours}={theirs}: no row of {source.name} has a column {theirs!r}"
            for ours, theirs in names.items()
            if theirs in unseen
        ]

    return replace(
        source, rows=lambda indices: map(renamed_row, source.rows(indices)), warnings=warnings
    )
