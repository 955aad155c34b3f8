"""Mixer lists: how much of each data set to take, and which rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from open_instruct.config.validation import mixer_problems, refuse
from open_instruct.errors import InputError
from open_instruct.wording import counted

MAX_SELECTED_ROWS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerEntry:
    """One data set of a mixture. A float `amount` is a fraction of its rows, an int a count of rows.

    Example: `--mixer_list rows.jsonl 0.5 other.parquet 300` gives
    `MixerEntry(name="rows.jsonl", amount=0.5, split="train")` and
    `MixerEntry(name="other.parquet", amount=300, split="train")`.
    """

    name: str
    amount: float | int
    split: str
    flag: str = "--mixer_list"

    def count(self, num_rows: int) -> int:
        """Rows to take out of `num_rows`, rounded half up; more than `num_rows` when it upsamples.

        Raises:
            InputError: there is nothing to take, or more than could be meant.
        """
        if num_rows == 0:
            raise InputError(f"{self.flag}: {self.name} has no rows.")
        exact = self.amount if isinstance(self.amount, int) else self.amount * num_rows
        if exact > MAX_SELECTED_ROWS:
            raise InputError(
                f"{self.flag}: {self.name} {self.amount} takes more than {MAX_SELECTED_ROWS:,} rows "
                f"(it has {num_rows:,}); a fraction of 1.0 takes every row once."
            )
        count = exact if isinstance(exact, int) else math.floor(exact + 0.5)
        if count == 0:
            raise InputError(
                f"{self.flag}: {self.name} {self.amount} takes zero of its {counted(num_rows, 'row')}; "
                "take a larger fraction or a count of rows, or leave the data set out."
            )
        return count


def parse_mixer_list(
    words: Sequence[str], splits: Sequence[str] = ("train",), *, flag: str = "--mixer_list"
) -> tuple[MixerEntry, ...]:
    """The entries of a list of alternating names and amounts, with one split for all or one for each.

    An amount with a dot is a fraction (`1.0` is every row, `2.5` every row twice and half of them a third
    time), one without is a count.

    Raises:
        InputError: the list is empty or has an odd number of words; an amount is zero, negative or not a
            number; the number of splits fits neither way.
    """
    if not words:
        raise InputError(f"{flag} is empty: give a data set and an amount, such as `{flag} rows.jsonl 1.0`.")
    refuse(mixer_problems(flag.removeprefix("--"), words, splits))
    names, amounts = words[::2], words[1::2]
    each = list(splits) * len(names) if len(splits) == 1 else list(splits)
    return tuple(
        MixerEntry(name=name, amount=float(amount) if "." in amount else int(amount), split=split, flag=flag)
        for name, amount, split in zip(names, amounts, each, strict=True)
    )


def select_rows(entry: MixerEntry, num_rows: int, seed: int) -> np.ndarray:
    """Indices of the rows to take, int64: whole copies in file order, then a random part in file order.

    The part depends on the seed, the data set's file name and split, and nothing else of the mixture, and a
    smaller amount takes a subset of what a larger one takes. So a change to the mixture keeps most rows, and
    with them what is cached for each.

    Raises:
        InputError: see `MixerEntry.count`.
    """
    num_copies, num_more = divmod(entry.count(num_rows), num_rows)
    digest = hashlib.sha256(f"{seed}\n{entry.split}\n{PurePath(entry.name).name}".encode()).digest()
    shuffled = np.random.default_rng(int.from_bytes(digest[:16], "little")).permutation(num_rows)
    copies = np.tile(np.arange(num_rows, dtype=np.int64), num_copies)
    return np.concatenate([copies, np.sort(shuffled[:num_more]).astype(np.int64)])
