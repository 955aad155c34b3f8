"""Batches are built while the device is busy with the one before, and nobody can tell from what
they are given.
"""

import threading
from collections import defaultdict

import numpy as np
import pytest
import torch

from open_instruct.core.records import StepBatch
from open_instruct.training.rows.sample_loader import SampleLoader, build_ahead
from tests.unit.conftest import JoinAs
from tests.unit.training.test_training_pieces import make_pairs, shape_of


class Built:
    """Ten times an item, and a record of what was built."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.is_done: defaultdict[int, threading.Event] = defaultdict(threading.Event)

    def __call__(self, item: int) -> int:
        if item == 13:
            raise ValueError("row 13 is damaged")
        self.items.append(item)
        self.is_done[item].set()
        return 10 * item


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("built-ahead")}


def test_next_is_built_while_the_caller_is_busy_and_no_more() -> None:
    build = Built()
    for item, value in zip(range(5), build_ahead(build, range(100)), strict=False):
        assert value == 10 * item
        # Here a device would be busy: nothing is asked for, and it is built all the same.
        assert build.is_done[item + 1].wait(timeout=60)
        assert build.items == list(range(item + 2))


def test_all_come_in_order() -> None:
    assert list(build_ahead(Built(), range(12))) == [10 * item for item in range(12)]
    assert list(build_ahead(Built(), [7])) == [70]
    assert list(build_ahead(Built(), [])) == []


def test_error_is_raised_where_its_item_is_asked_for() -> None:
    others = threads()  # of tests before this one
    values = build_ahead(Built(), [11, 12, 13, 14])
    assert [next(values), next(values)] == [110, 120]
    with pytest.raises(ValueError, match=r"^row 13 is damaged$"):
        next(values)
    assert threads() <= others


def test_loader_ahead_leaves_no_thread_when_closed_early() -> None:
    others = threads()
    values = build_ahead(Built(), range(100))
    next(values)
    assert threads() - others
    values.close()  # type: ignore[attr-defined]
    assert threads() <= others


def rows_of(step: StepBatch) -> list[tuple[int, ...]]:
    return [batch.row_ids for batch in step.microbatches]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_packs_stay_together_and_each_row_is_seen_once_an_epoch(
    join_as: JoinAs, num_ranks: int
) -> None:
    pairs, packs = (
        make_pairs(18),
        [[3, 1, 0], [2], [4, 5], [6, 7, 8, 9], [10, 11], [12, 13], [14, 15, 16, 17]],
    )
    seen: list[list[tuple[int, ...]]] = []
    for rank in range(num_ranks):
        join_as(rank, num_ranks)
        # Packs have room for 8 tokens of each row of these, however many rows that are.
        shape = shape_of(
            max_seq_length=64, max_samples_per_microbatch=1, max_microbatches=2 // num_ranks
        )
        loader = SampleLoader(pairs, packs, shape=shape, seed=3, dp_group=None)
        steps = list(loader.rest_of_epoch())
        seen.append([row for step in steps for row in rows_of(step)])
        order = np.random.default_rng([3, 1]).permutation(7).tolist()
        for step, start in zip(steps, range(0, 7, 2), strict=True):
            rows = [row for pack in order[start : start + 2] for row in packs[pack]]
            assert step.counts == {
                "rows": len(rows),
                "labels": int(pairs.num_label_tokens[rows].sum()),
                "tokens": int(pairs.num_tokens[rows].sum()),
            }
    microbatches = [set(batch) for of_rank in seen for batch in of_rank]
    assert sorted(row for batch in microbatches for row in batch) == list(range(18))
    assert all(any(set(pack) <= batch for batch in microbatches) for pack in packs)


def test_loader_that_goes_on_gives_what_was_not_given_out(join_as: JoinAs) -> None:
    """Not what follows the step that was built ahead when the state was saved."""
    join_as(0, 1)

    def loader() -> SampleLoader:
        return SampleLoader(
            make_pairs(18), [(row,) for row in range(18)], shape=shape_of(), seed=3, dp_group=None
        )

    whole = list(loader().rest_of_epoch())
    assert len(whole) == 5 and len(whole[-1].microbatches[0].row_ids) == 2
    for given_out in range(6):
        stopped, other = loader(), loader()
        taken = stopped.rest_of_epoch()
        for _ in range(given_out):
            next(taken)
        other.load_state_dict(stopped.state_dict())
        rest = list(other.rest_of_epoch())
        assert list(map(rows_of, rest)) == list(map(rows_of, whole[given_out:]))
        for ours, theirs in zip(rest, whole[given_out:], strict=True):
            for a, b in zip(ours.microbatches, theirs.microbatches, strict=True):
                assert torch.equal(a.packed.input_ids_BT, b.packed.input_ids_BT)
