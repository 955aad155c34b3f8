"""Mixer lists: which data sets to read, how much of each to take, and which rows."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np

from open_instruct.config.sections import RowsSection
from open_instruct.core.errors import InputError
from open_instruct.core.text import spell_count
from open_instruct.data.conversations.row_keys import find_value
from open_instruct.data.files.opening import open_rows
from open_instruct.data.files.rows import RawRow, RowSource
from open_instruct.data.files.token_files import is_token_folder, open_token_folder

MAX_SELECTED_ROWS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerEntry:
    """One data set of a mixture, and how much of it to take.

    Example: `--mixer_list rows.jsonl 0.5 other.parquet 300` gives
    `MixerEntry(name="rows.jsonl", amount=0.5, split="train")` and
    `MixerEntry(name="other.parquet", amount=300, split="train")`.
    """

    name: str
    amount: float | int
    """A float is a fraction of the rows, an int a count of rows."""
    split: str
    flag: str = "--mixer_list"
    """The list that names it, for messages."""

    def open(self, columns: Sequence[str]) -> RowSource:
        """All rows of the data set, with the columns that `columns` gives other names."""
        if is_token_folder(self.name):
            return self._open_token_folder(columns)
        source = open_rows(self.name, self.split, flag=self.flag)
        return rename_columns(source, columns)

    def _open_token_folder(self, columns: Sequence[str]) -> RowSource:
        """The documents of a folder of token files, which have no columns and no splits."""
        if self.split != "train":
            raise InputError(
                f"{self.flag}_splits: {self.name} is a folder of token files, its only split is "
                f"'train', not {self.split!r}.",
                kind="bad_value",
            )
        source = open_token_folder(self.name, flag=self.flag)
        if not columns:
            return source
        warnings = [f"--columns: {self.name} has token ids, and no columns", *source.warnings()]
        return replace(source, warnings=lambda: warnings)

    def count(self, num_rows: int) -> int:
        """The rows to take of `num_rows`, rounded half up; more than `num_rows` if it upsamples.

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
                f"{spell_count(num_rows, 'row')}; take a larger fraction or a count of rows, or "
                "leave the data set out.",
                kind="out_of_range",
            )
        return count


def parse_mixer_list(
    words: Sequence[str], splits: Sequence[str] = ("train",), *, flag: str = "--mixer_list"
) -> tuple[MixerEntry, ...]:
    """The entries of a list of names and amounts in turn.

    An amount with a dot is a fraction (`1.0` is every row, `2.5` every row twice and half of them a
    third time), one without is a count. `config.validation.mixer_problems` refuses lists of another
    form.

    Args:
        words: the list.
        splits: one for all data sets, or one for each.
        flag: the list's, for messages.
    """
    names = words[::2]
    amounts = words[1::2]
    if len(splits) == 1:
        splits = list(splits) * len(names)
    return tuple(
        MixerEntry(
            name=name,
            amount=_parse_amount(amount),
            split=split,
            flag=flag,
        )
        for name, amount, split in zip(names, amounts, splits, strict=True)
    )


def _parse_amount(word: str) -> float | int:
    return float(word) if "." in word else int(word)


def find_entries(data: RowsSection, flag: str) -> tuple[MixerEntry, ...]:
    """The entries of the mixer list that a run has under `flag`, such as "mixer_list"."""
    words = getattr(data, flag)
    splits = getattr(data, f"{flag}_splits")
    return parse_mixer_list(words, splits, flag=f"--{flag}")


def select_rows(entry: MixerEntry, num_rows: int, seed: int) -> np.ndarray:
    """Indices of the rows to take, int64: whole copies, then a random part, each in file order.

    The part depends on the seed, the data set's file name and split, and nothing else of the
    mixture, and a smaller amount takes a subset of what a larger one takes. So a change to the
    mixture keeps most rows, and with them what is cached for each.

    Raises:
        InputError: see `MixerEntry.count`.
    """
    num_copies, num_more = divmod(entry.count(num_rows), num_rows)
    seed_text = f"{seed}\n{entry.split}\n{PurePath(entry.name).name}"
    digest = hashlib.sha256(seed_text.encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:16], "little"))
    shuffled_rows = generator.permutation(num_rows)
    copies = np.tile(np.arange(num_rows, dtype=np.int64), num_copies)
    return np.concatenate([copies, np.sort(shuffled_rows[:num_more]).astype(np.int64)])


def rename_columns(source: RowSource, columns: Sequence[str]) -> RowSource:
    """A source with its columns renamed, which warns of each column that no row so far had.

    Args:
        source: the rows as their file has them.
        columns: the words of `--columns`, `OURS=THEIRS`: `messages=dialogue`.
    """
    names = dict(word.split("=", 1) for word in columns)
    missing = set(names.values())

    def rename(row: RawRow) -> RawRow:
        value: dict[str, Any] = dict(row.value)
        source_keys = {}
        for ours, theirs in names.items():
            item = find_value(value, theirs)
            if item is not None:
                source_keys[ours] = item
                missing.discard(theirs)
        for theirs in names.values():
            column = theirs if theirs in row.value else theirs.partition(".")[0]
            value.pop(column, None)
        return replace(row, value=value | source_keys)

    def list_warnings() -> list[str]:
        return [
            f"--columns {ours}={theirs}: no row of {source.name} has a column {theirs!r}"
            for ours, theirs in names.items()
            if theirs in missing
        ]

    def read_rows(indices: Sequence[int]) -> Iterator[RawRow]:
        return map(rename, source.rows(indices))

    return replace(source, rows=read_rows, warnings=list_warnings)
