"""Warnings that follow from the metrics of a run, each given once.

They are about a process that is slower than the others at the same work, and about a loss or a
gradient that grows without bound.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from open_instruct.core.text import macro_text

# Steps between comparisons of processes: enough that a single slow step does not decide.
WINDOW = 10
# Equal work on equal devices differs by a few hundredths.
SLOWER_TIMES = 1.5
# The share of its time that a learner may wait for its rows beyond the other learners.
LATER_SHARE = 0.2
WAITING = {
    "learner": "all others wait for it in every step",
    "engine": "long completions wait for it",
}

# Steps in each of the two medians of a growth, at the start and at the end.
GROWTH_WINDOW = 16
TIMES_GRAD_NORM = 20.0
# A loss may begin near 0, as GRPO's does, so it must also have grown by an absolute amount.
TIMES_LOSS = 3.0
MORE_LOSS = 1.0
WATCHED = {"loss": "the loss", "grad_norm": "the norm of the gradient"}


def find_slowest(
    what: str, token_s: Sequence[float | None], hosts: Sequence[str | None] | None = None
) -> dict[str, float]:
    """Metrics of the slowest process by index, from the seconds per token of each, or None.

    They are empty if fewer than two are known. `hosts` names the host whose cores a process
    computes on (None: it has a device of its own); the fastest process stands for its host, as
    chance decides which one waits for a core.
    """
    known_seconds = {index: seconds for index, seconds in enumerate(token_s) if seconds}
    # By host, or by index where a process has a device of its own.
    fastest: dict[str | int, int] = {}
    for index in sorted(known_seconds, key=known_seconds.__getitem__):
        host = hosts[index] if hosts is not None else None
        fastest.setdefault(host or index, index)
    if len(fastest) < 2:
        return {}
    slow, others = _find_greatest({index: known_seconds[index] for index in fastest.values()})
    return {
        f"slowest_{what}": float(slow),
        f"slowest_{what}/times": known_seconds[slow] / others,
        f"{what}s/token_s": others,
    }


def find_slowest_loader(shares: Sequence[float]) -> dict[str, float]:
    """Metrics of the learner that waits longest for its rows; empty for a single learner."""
    if len(shares) < 2:
        return {}
    slow, others = _find_greatest(dict(enumerate(shares)))
    return {
        "slowest_loader": float(slow),
        "slowest_loader/share": shares[slow],
        "loaders/share": others,
    }


def _find_greatest(values: Mapping[int, float]) -> tuple[int, float]:
    """The index of the greatest of several values, and the median of the others."""
    greatest = max(values, key=values.__getitem__)
    return greatest, median(value for index, value in values.items() if index != greatest)


class SlownessWatch:
    """Reads the metrics of `slowest` and `slowest_loader` in rows.

    A process that is slow in a single comparison gets no warning: with more processes than cores
    any one may be.
    """

    def __init__(self) -> None:
        self._has_warned: set[str] = set()
        self._slow_before: set[str] = set()

    def after_step(self, row: Mapping[str, Any]) -> list[str]:
        """The warnings due after this step, at most once each for learners, loaders and engines."""
        warnings = []
        for what in ("loader", *WAITING):
            if f"slowest_{what}" not in row:
                continue
            if not _is_slow(what, row):
                self._slow_before.discard(what)
            elif what in self._slow_before and what not in self._has_warned:
                self._has_warned.add(what)
                warnings.append(_warn_of_slowness(what, row))
            else:
                self._slow_before.add(what)
        return warnings


def _warn_of_slowness(what: str, row: Mapping[str, Any]) -> str:
    if what == "loader":
        return write_warning("loader", row)
    return write_warning("process", what, WAITING[what], row)


def _is_slow(what: str, row: Mapping[str, Any]) -> bool:
    """Whether the slowest loader, learner or engine is much slower than the others."""
    if what == "loader":
        return row["slowest_loader/share"] > row["loaders/share"] + LATER_SHARE
    return row[f"slowest_{what}/times"] >= SLOWER_TIMES


def write_warning(what: str, *facts: object) -> str:
    """The warning of a macro in alarms.txt.jinja, on one line."""
    template = Path(__file__).with_name("alarms.txt.jinja")
    return " ".join(macro_text(template, what, *facts).split())


class GrowthWatch:
    """Compares the loss and the gradient norm of the last steps with those of the first ones."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, deque[float]] = {}
        for name in WATCHED:
            self._first[name] = []
            self._last[name] = deque(maxlen=GROWTH_WINDOW)
        self._has_warned = False

    def after_step(self, row: Mapping[str, float | None]) -> str | None:
        """The warning that is due after this step, at most once in a run."""
        for name, first in self._first.items():
            value = row.get(name)
            if value is None or not isfinite(value):
                continue  # a skipped step has a warning of its own
            if len(first) < GROWTH_WINDOW:
                first.append(value)
            else:
                self._last[name].append(value)
        growths = list(filter(None, map(self._describe_growth, WATCHED)))
        if not growths or self._has_warned:
            return None
        self._has_warned = True
        return write_warning("growth", growths, GROWTH_WINDOW)

    def _describe_growth(self, name: str) -> str:
        """A phrase about the growth of `name`; empty if it has hardly grown."""
        if len(self._last[name]) < GROWTH_WINDOW:
            return ""
        before = median(self._first[name])
        now = median(self._last[name])
        if name == "loss":
            is_grown = now > max(TIMES_LOSS * before, before + MORE_LOSS)
        else:
            is_grown = now > TIMES_GRAD_NORM * before > 0
        if not is_grown:
            return ""
        return f"{WATCHED[name]} has grown from {before:.3g} to {now:.3g}"
