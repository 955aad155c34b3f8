"""The charts of a run's page: curves of its metrics, and histograms of its rows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import fsum
from typing import Any

import numpy
import pyarrow

from open_instruct.core.metrics import metric_entry, sort_metrics
from open_instruct.report.run_files import RunFiles, flatten_column, list_lengths
from open_instruct.run.run_directory import is_number

# A curve is drawn some 700 pixels wide at most.
MAX_POINTS = 4000
NUM_BINS = 24
RATIO_NAME = re.compile(r"rho/hist_(([\d.]+)_to_([\d.]+|inf))")


def build_series(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of metrics as columns: `step`, `columns`, `constants` and `steps_in_a_point`.

    Each point is the mean of `steps_in_a_point` steps. Columns are in the order of the table of
    metrics. Where a row has no number the value is None; a column without any number is left out. A
    number that is the same at all of several steps is a constant.

    Example: `{"step": 1, "loss": 0.5}` and `{"step": 2}` give
    `{"step": [1, 2], "columns": {"loss": [0.5, None]}, "constants": {}, "steps_in_a_point": 1}`.
    """
    size = max(1, -(-len(rows) // MAX_POINTS))
    points = [rows[start : start + size] for start in range(0, len(rows), size)]
    columns: dict[str, list[float | None]] = {}
    constants: dict[str, float | None] = {}
    for name in sort_metrics(_drawn_names(rows) - {"step"}):
        values = [mean_or_none([row.get(name) for row in point]) for point in points]
        if len(values) > 1 and len(set(values)) == 1:
            constants[name] = values[0]
        else:
            columns[name] = values
    return {
        "step": [point[-1]["step"] for point in points],
        "columns": columns,
        "constants": constants,
        "steps_in_a_point": size,
    }


def _drawn_names(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """The metrics of which some row has a number, and which the table of metrics has drawn."""
    names: set[str] = set()
    for row in rows:
        names |= {name for name, value in row.items() if is_number(value)}
    return {name for name in names if metric_entry(name).drawn}


def mean_or_none(values: Sequence[Any]) -> float | None:
    """The mean of the numbers in `values`, to six digits; None without any."""
    numbers = [value for value in values if is_number(value)]
    if not numbers:
        return None
    return round_to_six_digits(fsum(numbers) / len(numbers))


def round_to_six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def build_histograms(run: RunFiles, table: pyarrow.Table | None) -> list[dict[str, Any]]:
    """Histograms with a `title`, the `labels` of bars, and their shares `early` and `late`.

    In a run of few steps `early` is None, and `late` has all steps.
    """
    return [*_rollout_histograms(table), *_ratio_histogram(run)]


def _rollout_histograms(table: pyarrow.Table | None) -> Iterator[dict[str, Any]]:
    if table is None:
        return
    lengths = list_lengths(table)
    steps = table["step"].to_numpy()
    rewards = table["reward"].combine_chunks().fill_null(0).to_numpy(zero_copy_only=False)
    token_steps = numpy.repeat(steps, lengths)
    staleness = token_steps - 1 - flatten_column(table, "versions")
    yield from _histogram("length of a completion, in tokens", lengths, steps)
    yield from _histogram("reward of a completion", rewards, steps)
    yield from _histogram("staleness of a token, in steps", staleness, token_steps)


def _histogram(title: str, values: numpy.ndarray, steps: numpy.ndarray) -> Iterator[dict[str, Any]]:
    is_known = numpy.isfinite(values)
    values = values[is_known]
    steps = steps[is_known]
    if not len(values):
        return
    first = int(steps.min())
    last = int(steps.max())
    third = (last - first) / 3
    edges, labels = _bins(values)

    def shares(selection: numpy.ndarray) -> list[float]:
        counts, _ = numpy.histogram(values[selection], bins=edges)
        return [round_to_six_digits(share) for share in (counts / max(1, counts.sum())).tolist()]

    early = shares(steps <= first + third) if third else None
    yield {
        "title": title,
        "labels": labels,
        "early": early,
        "late": shares(steps >= last - third),
    }


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
    bins = _ratio_bins(run)
    rows = [row for row in run.rows if bins.keys() & row.keys()]
    if not rows:
        return
    third = len(rows) // 3

    def shares(part: list[dict[str, Any]]) -> list[float]:
        return [mean_or_none([row.get(name) for row in part]) or 0.0 for name in bins]

    yield {
        "title": "rho: ratio of learner to engine, share of tokens",
        "labels": list(bins.values()),
        "early": shares(rows[:third]) if third else None,
        "late": shares(rows[-third:]),  # all of them where a third is 0
    }


def _ratio_bins(run: RunFiles) -> dict[str, str]:
    """The metrics that are bins of ratios, by their lower edge, and the label of each."""
    bins = []
    names: set[str] = set().union(*run.rows)
    for name in names:
        match = RATIO_NAME.fullmatch(name)
        if match:
            bins.append((float(match[2]), name, match[1].replace("_", " ")))
    return {name: label for _, name, label in sorted(bins)}
