"""The charts of a run's page: curves of its metrics, and histograms of its rows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import fsum
from typing import Any

import numpy
import pyarrow

from open_instruct.core.metrics import in_order, metric_entry
from open_instruct.report.run_files import RunFiles, flat, lengths_of
from open_instruct.run.run_directory import is_number

# A curve is drawn some 700 pixels wide at most.
MAX_POINTS = 4000
NUM_BINS = 24
OF_RATIOS = re.compile(r"rho/hist_(([\d.]+)_to_([\d.]+|inf))")


def series_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of metrics as columns: `step`, `columns`, `constants` and `steps_in_a_point`.

    Each point is the mean of `steps_in_a_point` steps. Columns are in the order of the table of
    metrics. Where a row has no number the value is None; a column without any number is left out. A
    number that is the same at all of several steps is a constant.

    Example: `{"step": 1, "loss": 0.5}` and `{"step": 2}` give
    `{"step": [1, 2], "columns": {"loss": [0.5, None]}, "constants": {}, "steps_in_a_point": 1}`.
    """
    size = max(1, -(-len(rows) // MAX_POINTS))
    points = [rows[start : start + size] for start in range(0, len(rows), size)]
    names = {
        name
        for row in rows
        for name, value in row.items()
        if is_number(value) and metric_entry(name).drawn
    }
    series: dict[str, Any] = {
        "step": [point[-1]["step"] for point in points],
        "columns": {},
        "constants": {},
    }
    for name in in_order(names - {"step"}):
        values = [mean_of([row.get(name) for row in point]) for point in points]
        if len(values) > 1 and len(set(values)) == 1:
            series["constants"][name] = values[0]
        else:
            series["columns"][name] = values
    return series | {"steps_in_a_point": size}


def mean_of(values: Sequence[Any]) -> float | None:
    """The mean of the numbers in `values`, to six digits; None without any."""
    numbers = [value for value in values if is_number(value)]
    return rounded(fsum(numbers) / len(numbers)) if numbers else None


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def histograms_of(run: RunFiles, table: pyarrow.Table | None) -> list[dict[str, Any]]:
    """Histograms with a `title`, the `labels` of bars, and their shares `early` and `late`.

    In a run of few steps `early` is None, and `late` has all steps.
    """
    return [*_rollout_histograms(table), *_ratio_histogram(run)]


def _rollout_histograms(table: pyarrow.Table | None) -> Iterator[dict[str, Any]]:
    if table is None:
        return
    lengths = lengths_of(table)
    steps = table["step"].to_numpy()
    rewards = table["reward"].combine_chunks().fill_null(0).to_numpy(zero_copy_only=False)
    token_steps = numpy.repeat(steps, lengths)
    behind = token_steps - 1 - flat(table, "versions")
    yield from _histogram("length of a completion, in tokens", lengths, steps)
    yield from _histogram("reward of a completion", rewards, steps)
    yield from _histogram("staleness of a token, in steps", behind, token_steps)


def _histogram(title: str, values: numpy.ndarray, steps: numpy.ndarray) -> Iterator[dict[str, Any]]:
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
    """Edges and labels of the bars: one a value if these are few, else bars of equal width."""
    distinct = numpy.unique(values)
    if len(distinct) <= NUM_BINS:
        edges = numpy.concatenate([distinct, [distinct[-1] + 1]]).astype(float)
        return edges, [f"{value:g}" for value in distinct.tolist()]
    edges = numpy.histogram_bin_edges(values, bins=NUM_BINS)
    return edges, [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges.tolist())]


def _ratio_histogram(run: RunFiles) -> Iterator[dict[str, Any]]:
    """The ratios of learner to engine, which a run writes in bins such as `rho/hist_0.5_to_0.8`."""
    names = {name for row in run.rows for name in row}
    matches = sorted(
        filter(None, map(OF_RATIOS.fullmatch, names)), key=lambda match: float(match[2])
    )
    rows = [row for row in run.rows if any(match[0] in row for match in matches)]
    if not rows:
        return
    third = len(rows) // 3

    def shares(part: list[dict[str, Any]]) -> list[float]:
        return [mean_of([row.get(match[0]) for row in part]) or 0.0 for match in matches]

    yield {
        "title": "rho: ratio of learner to engine, share of tokens",
        "labels": [match[1].replace("_", " ") for match in matches],
        "early": shares(rows[:third]) if third else None,
        "late": shares(rows[-third:]),  # all of them where a third is 0
    }
