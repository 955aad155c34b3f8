"""The metrics of runs: group, unit and meaning of each, in the order in which people read them
(`metrics.json`).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

Better = Literal["higher", "lower"]
Reduction = Literal["mean", "max", "sum"]

HELD_OUT_PREFIX = "eval/"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricEntry:
    """A line of the table; `name` may be a pattern, and held-out rows have the same names behind
    `eval/`.

    `words` are its name in the line of a step. A number that is `exact` is never smoothed, one
    `of_its_loss` is compared within one loss alone, and one that is not `drawn` has no curve.
    `better` says which values of it show a better policy; None where neither does. `over_updates`
    is how the updates of a step are put together.

    Example: `MetricEntry(name="time/sync", group="Time", unit="s", meaning="sending the weights to
    the engines")`.
    """

    name: str
    group: str = "Others"
    unit: str = ""
    meaning: str = ""
    words: str = ""
    exact: bool = False
    of_its_loss: bool = False
    drawn: bool = True
    better: Better | None = None
    over_updates: Reduction = "mean"

    def improves(self, value: float, other: float) -> bool:
        """Whether `value` is better than `other`; never where one of them is NaN."""
        assert self.better is not None, (
            "a metric that says nothing of the policy is compared nowhere"
        )
        return value > other if self.better == "higher" else value < other


@cache
def metric_table() -> tuple[MetricEntry, ...]:
    groups = json.loads(Path(__file__).with_name("metrics.json").read_text(encoding="utf-8"))
    return tuple(
        MetricEntry(name=name, group=group, **facts)
        for group, entries in groups.items()
        for name, facts in entries.items()
    )


def list_console_metrics() -> tuple[MetricEntry, ...]:
    """The metrics in the console's line after every step."""
    return tuple(entry for entry in metric_table() if entry.words)


@cache
def metric_entry(name: str) -> MetricEntry:
    """The entry of a metric by its name in a run; an unknown one gets an entry of the last group,
    without a meaning.
    """
    for base_name in (name, name.removeprefix(HELD_OUT_PREFIX)):
        for entry in metric_table():
            if fnmatchcase(base_name, entry.name):
                return entry
    return MetricEntry(name=name, exact="num_" in name)


def sort_metrics(names: Iterable[str]) -> list[str]:
    """`names` in the table's order; unknown ones come last, by name."""
    places = {entry: place for place, entry in enumerate(metric_table())}
    return sorted(names, key=lambda name: (places.get(metric_entry(name), len(places)), name))
