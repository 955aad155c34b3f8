"""Steps on shards are torch's, of Muon on whole matrices and of AdamW on the same shards; also
where there are fewer rows than shards, as of narrow heads.
"""

from typing import Any

import pytest

# Rows, replicas, shards and tensor ranks; then the rows that each of four ranks holds of a matrix,
# and of one that tensor parallelism splits by columns.
CASES = {
    (5, 1, 4, 1): ([2, 2, 1, 0], [2, 2, 1, 0]),
    (3, 1, 4, 1): ([1, 1, 1, 0], [1, 1, 1, 0]),
    (1, 1, 4, 1): ([1, 0, 0, 0], [1, 0, 0, 0]),
    (1, 2, 2, 1): ([1, 0, 1, 0], [1, 0, 1, 0]),
    (4, 4, 1, 1): ([4, 4, 4, 4], [4, 4, 4, 4]),
    (6, 1, 2, 2): ([2, 2, 1, 1], [3, 3, 3, 3]),
    (2, 2, 1, 2): ([1, 1, 1, 1], [2, 2, 2, 2]),
}


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_step_on_shards_is_torchs(run_ranks: Any, kind: str) -> None:
    results = run_ranks(4, "tests.ranks.jobs.sharded_steps:take_each", kind=kind, cases=list(CASES))
    for index, (case, rows_of_kinds) in enumerate(CASES.items()):
        for rank, (rows, *are_same) in enumerate(of_rank[index] for of_rank in results):
            assert rows[:2] == [of_kind[rank] for of_kind in rows_of_kinds], case
            assert are_same == [True, True], f"{case}, rank {rank}"
