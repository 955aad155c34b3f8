"""A run warns once if metrics show twice that a learner or an engine is slower than the others at the same work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

# Steps between checks: enough that a single slow step does not decide.
WINDOW = 10
# Equal work on equal devices differs by a few hundredths.
TIMES = 1.5
# The share of its time that a learner may wait for its rows beyond the other learners.
LATE = 0.2
WAITING = {"learner": "all others wait for it in every step", "engine": "long completions wait for it"}


def slowest(what: str, token_s: Sequence[float | None], hosts: Sequence[str | None] | None = None) -> dict[str, float]:
    """Metrics of the slowest of several processes, by index, from each one's seconds per token (None if not known).

    They are empty if fewer than two are known. `hosts` names the host whose cores a process computes on (None: it has a
    device of its own); the fastest process stands for its host, as chance decides which one waits for a core.
    """
    fastest: dict[str | int, tuple[float, int]] = {}
    for index, (seconds, host) in enumerate(zip(token_s, hosts or [None] * len(token_s), strict=True)):
        if seconds:
            place = host or index
            fastest[place] = min(fastest.get(place, (seconds, index)), (seconds, index))
    known = {index: seconds for seconds, index in fastest.values()}
    if len(known) < 2:
        return {}
    slow = max(known, key=lambda index: known[index])
    others = median(seconds for index, seconds in known.items() if index != slow)
    return {f"slowest_{what}": float(slow), f"slowest_{what}/times": known[slow] / others, f"{what}s/token_s": others}


def slowest_loader(shares: Sequence[float]) -> dict[str, float]:
    """Metrics of the learner that waits for its rows for the greatest share of its time."""
    if len(shares) < 2:
        return {}
    slow = max(range(len(shares)), key=lambda index: shares[index])
    others = median(share for index, share in enumerate(shares) if index != slow)
    return {"slowest_loader": float(slow), "slowest_loader/share": shares[slow], "loaders/share": others}


class SlownessWatch:
    """Reads the metrics of `slowest` and `slowest_loader` in rows.

    A process that is slow in a single check gets no warning: with more processes than cores any one may be.
    """

    def __init__(self) -> None:
        self._told, self._slow_before = set[str](), set[str]()

    def after_step(self, row: Mapping[str, Any]) -> Iterator[str]:
        """The warnings due after this step, at most once each for learners, loaders and engines."""
        for what, words in _looks(row):
            if words and what in self._slow_before - self._told:
                self._told.add(what)
                yield words
            (self._slow_before.add if words else self._slow_before.discard)(what)


def _looks(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields each kind that this row measures, with a phrase about its slowest; empty if it is hardly slower."""
    if "slowest_loader" in row:
        share, others = row["slowest_loader/share"], row["loaders/share"]
        words = (
            f"learner-{row['slowest_loader']:.0f} waits for its own rows for {share:.0%} of its time (the others' "
            f"median is {others:.0%}), and all others wait for it. See on its node whether its CPU cores are taken by "
            "other programs, and whether the disk that the token cache is on is slow"
        )
        yield "loader", words if share > others + LATE else ""
    for what in (what for what in WAITING if f"slowest_{what}" in row):
        times, others = row[f"slowest_{what}/times"], row[f"{what}s/token_s"]
        words = (
            f"{what}-{row[f'slowest_{what}']:.0f} takes {times:.1f} times as long as the other {what}s for a token "
            f"({1000 * times * others:.3g} ms, their median {1000 * others:.3g}): {WAITING[what]}. "
            "See on its node whether other programs take its GPUs or CPU cores; where it computes on a GPU, nvidia-smi "
            "-q -d PERFORMANCE says whether that is throttled. Where it stays so, leave that node out"
        )
        yield what, words if times >= TIMES else ""
