"""Which rows of a mixture `--eval_split` holds out, decided by the content of each row alone."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.text import spell_count

SHOWN_PER_UNIT = 1000  # shares in messages have three digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of the rows: the share that is held out, or the others.

    Example: `--eval_split 0.05` trains on the rows of `Side(share=0.05, is_held_out=False)`.
    """

    share: float
    is_held_out: bool

    def includes(self, place: float) -> bool:
        """Whether a row at this place, see `find_place`, is on this side."""
        return (place < self.share) == self.is_held_out


class SideFilter:
    """Accepts the rows of one side while a data set is read, and counts the others."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.num_others = 0
        # Of the other rows.
        self._min_place = math.inf
        self._max_place = -math.inf

    def accepts(self, content: str) -> bool:
        """Whether a row with this content is on the side; otherwise it is counted."""
        place = find_place(content)
        if self.side.includes(place):
            return True
        self.num_others += 1
        self._min_place = min(place, self._min_place)
        self._max_place = max(place, self._max_place)
        return False

    @property
    def num_held_out(self) -> int:
        """The rows that are held out, where those to train on are read."""
        return 0 if self.side.is_held_out else self.num_others

    def empty_side_error(self) -> InputError:
        """The error where no row is on the side; names a share that would do, if there is one."""
        if self.side.is_held_out:
            problem = "holds out none"
            share = math.ceil(self._min_place * SHOWN_PER_UNIT + 1e-6)
            remedy = f"give at least {share / SHOWN_PER_UNIT}"
        else:
            problem = "leaves none to train on"
            share = math.floor(self._max_place * SHOWN_PER_UNIT)
            remedy = f"give at most {share / SHOWN_PER_UNIT}"
        if self._min_place == self._max_place or not 0 < share < SHOWN_PER_UNIT:
            remedy = "give more rows, or name held-out rows of another file"
        return InputError(
            f"--eval_split {self.side.share}: {problem} of {spell_count(self.num_others, 'row')}; "
            f"{remedy}",
            kind="out_of_range",
            flag="eval_split",
            remedy=remedy,
        )


def find_place(content: str) -> float:
    """Where a row stands among all possible rows, from 0 to below 1, by the hash of its content.

    Neither other rows nor their order move it, equal rows are at one place, and a larger share
    holds out the rows of a smaller one and more.
    """
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def join_columns(row: Mapping[str, Any]) -> str:
    """The columns of a row as one text, whatever their order.

    Values that JSON has not are written as Python does.
    """
    return json.dumps(dict(row), sort_keys=True, default=str)
