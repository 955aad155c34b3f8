"""How long documents are, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """How many documents have from `first` to `last` tokens: `Bar(first=0, last=49, count=12, share=0.4)`.

    `share` is that of the highest bar.
    """

    first: int
    last: int
    count: int
    share: float


def bars_of(lengths: Sequence[int], *, num_bars: int = 16) -> list[Bar]:
    """Bars of one width from the shortest to the longest."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // num_bars))
    counts = np.bincount((np.asarray(lengths) - low) // width)
    return [
        Bar(first=low + index * width, last=low + (index + 1) * width - 1, count=int(count), share=count / counts.max())
        for index, count in enumerate(counts)
    ]


def summary(lengths: Sequence[int]) -> str:
    """`median 120, 90% up to 310, longest 512`."""
    median, high = np.percentile(lengths, [50, 90], method="lower")
    return f"median {median:,}, 90% up to {high:,}, longest {max(lengths):,}"
