"""How values were spread over a page's run, in its first third and in its last."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from open_instruct.report.rollouts import Rollouts, flat, lengths_of
from open_instruct.report.run_files import RunFiles
from open_instruct.report.series import mean_of, rounded

if TYPE_CHECKING:
    import numpy

NUM_BINS = 24


def histograms_of(run: RunFiles, rollouts: Rollouts) -> list[dict[str, Any]]:
    """Each with its `title`, the `labels` of its bars, and the share of each bar `early` and `late`.

    A run of few steps has `late` alone: everything.
    """
    return [*_of_rollouts(rollouts), *_of_ratios(run)]


def _of_rollouts(rollouts: Rollouts) -> Iterator[dict[str, Any]]:
    if (table := rollouts.table) is None:
        return
    import numpy

    lengths = lengths_of(table)
    steps = table["step"].to_numpy()
    rewards = table["reward"].combine_chunks().fill_null(0).to_numpy(zero_copy_only=False)
    token_steps = numpy.repeat(steps, lengths)
    behind = token_steps - 1 - flat(table, "versions")
    yield from _halves("length of a completion, in tokens", lengths, steps)
    yield from _halves("reward of a completion", rewards, steps)
    yield from _halves("staleness of a token, in steps", behind, token_steps)


def _halves(title: str, values: numpy.ndarray, steps: numpy.ndarray) -> Iterator[dict[str, Any]]:
    import numpy

    known = numpy.isfinite(values)
    values, steps = values[known], steps[known]
    if not len(values):
        return
    first, last = int(steps.min()), int(steps.max())
    third = (last - first) / 3
    edges, labels = _bins(values)

    def shares(chosen: numpy.ndarray) -> list[float]:
        counts, _ = numpy.histogram(values[chosen], bins=edges)
        return [rounded(share) for share in (counts / max(1, counts.sum())).tolist()]

    early = shares(steps <= first + third) if third else None
    yield {"title": title, "labels": labels, "early": early, "late": shares(steps >= last - third)}


def _bins(values: numpy.ndarray) -> tuple[numpy.ndarray, list[str]]:
    """A bar a value where there are few, else bars of equal width."""
    import numpy

    distinct = numpy.unique(values)
    if len(distinct) <= NUM_BINS:
        edges = numpy.concatenate([distinct, [distinct[-1] + 1]]).astype(float)
        return edges, [f"{value:g}" for value in distinct.tolist()]
    edges = numpy.histogram_bin_edges(values, bins=NUM_BINS)
    return edges, [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges.tolist())]


def _of_ratios(run: RunFiles) -> Iterator[dict[str, Any]]:
    """Of learner to engine, which a run writes in bins: `rho/hist_0.5_to_0.8`."""
    names = {name for row in run.rows for name in row if re.fullmatch(r"rho/hist_[\d.]+_to_([\d.]+|inf)", name)}
    if not names:
        return
    ranges = {name: name.removeprefix("rho/hist_").replace("_", " ") for name in names}
    ordered = sorted(names, key=lambda name: float(ranges[name].split(" ")[0]))
    rows = [row for row in run.rows if any(name in row for name in names)]
    third = len(rows) // 3

    def shares(part: list[dict[str, Any]]) -> list[float]:
        return [mean_of([row.get(name) for row in part]) or 0.0 for name in ordered]

    yield {
        "title": "rho: ratio of learner to engine, share of tokens",
        "labels": [ranges[name] for name in ordered],
        "early": shares(rows[:third]) if third else None,
        "late": shares(rows[-third:] if third else rows),
    }
