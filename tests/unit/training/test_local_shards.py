"""What a rank holds of a tensor: of a box, of a run of values, and of a matrix that was cut along
its columns.
"""

import torch

from open_instruct.models.shards import find_local_shard, flat_shard, join_slabs, select_box

MATRIX = torch.arange(12).view(3, 4)
LEFT, RIGHT = [0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]


def test_parameter_is_held_whole_where_nobody_shares_it() -> None:
    mine = find_local_shard(MATRIX)
    assert (
        mine.shape == (3, 4)
        and mine.box == (slice(0, 3), slice(0, 4))
        and mine.find_boxes(5) == {5: mine.box}
    )
    assert mine.local.data_ptr() == MATRIX.data_ptr() and torch.equal(mine.values(MATRIX), MATRIX)


def test_part_is_read_from_where_the_parameter_is_stored() -> None:
    parameter = torch.empty(0)
    parameter.local_shard = flat_shard(
        MATRIX.flatten()[2:5], (3, 4), [(0, 2), (2, 5), (5, 12)], rank=1
    )  # type: ignore[attr-defined]
    assert (
        find_local_shard(parameter).values(MATRIX).tolist()
        == [2, 3, 4]
        == find_local_shard(parameter).local.tolist()
    )
    whole = torch.zeros(3, 4, dtype=torch.int64)
    select_box(whole, find_local_shard(parameter).box).copy_(find_local_shard(parameter).local)
    assert whole.flatten().tolist() == [0, 0, 2, 3, 4, *[0] * 7]


def test_matrix_cut_by_columns_is_stored_slab_by_slab() -> None:
    runs = [(0, 5), (5, 6), (6, 12)]
    values = [
        flat_shard(torch.empty(0), (3, 4), runs, rank=rank, num_slabs=2).values(MATRIX)
        for rank in range(3)
    ]
    assert [each.tolist() for each in values] == [LEFT[:5], LEFT[5:], RIGHT]
    assert torch.equal(join_slabs(torch.cat(values).view(3, 4), 2), MATRIX)


def test_shared_run_is_sent_once_and_preferably_by_its_owner() -> None:
    beside = flat_shard(torch.empty(0), (4,), [(0, 2), (2, 4), (0, 2), (2, 4)], rank=0).find_boxes
    first, second = (slice(0, 2),), (slice(2, 4),)
    assert beside(0) == {0: first, 3: second} and beside(1) == {2: first, 1: second}
