"""`--eval_split`: which rows of a mixture are held out, decided by the content of each row
alone.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.text import counted

SHOWN_PER_UNIT = 1000  # shares in messages have three digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of the rows: the share that is held out, or the others.

    Example: `--eval_split 0.05` trains on the rows of `Side(share=0.05, is_held_out=False)`.
    """

    share: float
    is_held_out: bool

    def has(self, place: float) -> bool:
        """Whether a row with this `find_place` is on this side."""
        return (place < self.share) == self.is_held_out


class Divider:
    """Tells the rows of one side from the others while a data set is read."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.num_others = 0
        self._places: list[float] = []  # the least and the greatest of the other rows

    def takes(self, content: str) -> bool:
        """Whether a row with this content is on the side; the others are counted."""
        place = find_place(content)
        if self.side.has(place):
            return True
        self.num_others += 1
        self._places = [min([place, *self._places]), max([place, *self._places])]
        return False

    @property
    def num_held_out(self) -> int:
        """The rows that are held out, where those to train on are read."""
        return 0 if self.side.is_held_out else self.num_others

    def refusal(self) -> InputError:
        """The error where no row is on the side, with a share that would change that, if there is
        one.
        """
        least, greatest = self._places
        if self.side.is_held_out:
            what, share = "holds out none", math.ceil(least * SHOWN_PER_UNIT + 1e-6)
            remedy = f"give at least {share / SHOWN_PER_UNIT}"
        else:
            what, share = "leaves none to train on", math.floor(greatest * SHOWN_PER_UNIT)
            remedy = f"give at most {share / SHOWN_PER_UNIT}"
        if least == greatest or not 0 < share < SHOWN_PER_UNIT:
            remedy = "give more rows, or name held-out rows of another file"
        return InputError(
            f"--eval_split {self.side.share}: {what} of {counted(self.num_others, 'row')}; "
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


def row_content(row: Mapping[str, Any]) -> str:
    """The columns of a row as one text, whatever their order; values that JSON has not are written
    as Python does.
    """
    return json.dumps(dict(row), sort_keys=True, default=str)
