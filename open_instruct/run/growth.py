"""A loss or a gradient that grows without bound: seen in the metrics of a run, and told once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isfinite
from statistics import median

# A median of so many steps at the start, and of as many at last.
WINDOW = 16
TIMES_GRAD_NORM = 20.0
# A loss may begin near 0, as GRPO's does, so it has to have grown by something too.
TIMES_LOSS, MORE_LOSS = 3.0, 1.0


class GrowthWatch:
    """Compares the last steps with the first ones."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        self._last: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in self._first}
        self._has_warned = False

    def after_step(self, row: Mapping[str, float | None]) -> str | None:
        """What people should be told of after this step; at most once."""
        for name, first in self._first.items():
            value = row.get(name)
            if value is None or not isfinite(value):
                continue  # a step that was left out is told of elsewhere
            (first if len(first) < WINDOW else self._last[name]).append(value)
        grown = [self._told(name) for name in self._first if self._is_grown(name)]
        if not grown or self._has_warned:
            return None
        self._has_warned = True
        return (
            f"{' and '.join(grown)} (medians of {WINDOW} steps): the training is coming apart, and seldom comes back. "
            "Stop it (Ctrl-C leaves a checkpoint) and start again in another --output_dir with half the "
            "--learning_rate or less, with more --warmup_ratio, or, if single steps stand out, with --optimizer "
            "skip_step_adamw"
        )

    def _is_grown(self, name: str) -> bool:
        if len(self._last[name]) < WINDOW:
            return False
        before, now = median(self._first[name]), median(self._last[name])
        if name == "loss":
            return now > TIMES_LOSS * before and now > before + MORE_LOSS
        return now > TIMES_GRAD_NORM * before > 0

    def _told(self, name: str) -> str:
        what = {"loss": "the loss", "grad_norm": "the norm of the gradient"}[name]
        return f"{what} has grown from {median(self._first[name]):.3g} to {median(self._last[name]):.3g}"
