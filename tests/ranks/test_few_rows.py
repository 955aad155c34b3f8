"""Matrices with fewer rows than there are shards: narrow heads over many GPUs."""

from __future__ import annotations

from typing import Any


def test_muon_takes_the_step_of_one_process_where_ranks_hold_nothing(run_ranks: Any) -> None:
    """As large a step where every rank holds rows, and one rank fewer; the last is replicated."""
    cases = [[5, [4]], [3, [4]], [1, [4]], [1, [2, 2]]]
    results = run_ranks(4, "tests.ranks.jobs.few_rows:each", timeout_s=60, cases=cases)
    assert [[rows for rows, *_ in of_case] for of_case in zip(*results, strict=True)] == [
        [2, 2, 1, 0],
        [1, 1, 1, 0],
        [1, 0, 0, 0],
        [1, 0, 1, 0],
    ]
    for of_rank in results:
        assert all(difference < 1e-6 for _, *differences in of_rank for difference in differences), results
