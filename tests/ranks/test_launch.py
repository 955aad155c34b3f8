"""The launcher itself: results in rank order, and failures that say what happened."""

import pytest

from tests.ranks.launch import RanksFailed


def test_results_come_back_in_rank_order(run_ranks):
    results = run_ranks(4, "tests.ranks.jobs.launching:all_reduced", num_nodes=2, scale=3)
    assert [result["sum"] for result in results] == [30] * 4
    assert [result["local_rank"] for result in results] == ["0", "1", "0", "1"]
    assert {result["num_nodes"] for result in results} == {"2"}


def test_failing_rank_ends_all_and_shows_its_error(run_ranks):
    with pytest.raises(RanksFailed, match=r"rank 1 ---[\s\S]*rank one says no"):
        run_ranks(2, "tests.ranks.jobs.launching:one_rank_raises")


def test_hang_is_killed_and_shows_where(run_ranks):
    with pytest.raises(RanksFailed, match=r"did not finish in 8 s[\s\S]*in hang"):
        # Far above what a rank needs until it hangs.
        run_ranks(2, "tests.ranks.jobs.launching:hang", timeout_s=8)
