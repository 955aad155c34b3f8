"""A run warns once if its metrics show a loss or a gradient that grows without bound."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isfinite
from statistics import median

# The number of steps in each of the two medians, at the start and at the end.
WINDOW = 16
TIMES_GRAD_NORM = 20.0
# A loss may begin near 0, as GRPO's does, so it must also have grown by an absolute amount.
TIMES_LOSS, MORE_LOSS = 3.0, 1.0


class GrowthWatch:
    """Compares the last steps with the first ones."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        self._last: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in self._first}
        self._has_warned = False

    def after_step(self, row: Mapping[str, float | None]) -> str | None:
        """The warning that is due after this step, at most once in a run."""
        for name, first in self._first.items():
            value = row.get(name)
            if value is None or not isfinite(value):
                continue  # a skipped step has a warning of its own
            (first if len(first) < WINDOW else self._last[name]).append(value)
        grown = [*filter(None, map(self._growth_of, self._first))]
        if not grown or self._has_warned:
            return None
        self._has_warned = True
        return (
            f"{' and '.join(grown)} (medians of {WINDOW} steps): the training is coming apart, and seldom comes back. "
            "Stop it (Ctrl-C leaves a checkpoint) and start again in another --output_dir with half the "
            "--learning_rate or less, with more --warmup_ratio, or, if single steps stand out, with --optimizer "
            "skip_step_adamw"
        )

    def _growth_of(self, name: str) -> str:
        """A phrase about the growth of `name`; empty if it has hardly grown."""
        if len(self._last[name]) < WINDOW:
            return ""
        before, now = median(self._first[name]), median(self._last[name])
        is_grown, what = now > TIMES_GRAD_NORM * before > 0, "the norm of the gradient"
        if name == "loss":
            is_grown, what = now > max(TIMES_LOSS * before, before + MORE_LOSS), "the loss"
        return f"{what} has grown from {before:.3g} to {now:.3g}" if is_grown else ""
