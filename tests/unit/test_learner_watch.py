"""Learners that die while a step waits for its rollouts."""

import threading
from queue import Queue

import pytest

from open_instruct.cluster.learner_call import LearnerLost, watching


def test_a_loss_is_told_once_and_ends_the_watch() -> None:
    lost, told = LearnerLost("rank 1 was lost"), Queue[LearnerLost]()
    checks: list[int] = []

    def check() -> None:
        checks.append(1)
        if len(checks) == 3:
            raise lost

    with watching(check, told.put, interval_s=0.01):
        assert told.get(timeout=10) is lost
    assert len(checks) == 3 and told.empty()


def test_nothing_is_told_where_all_live_and_the_thread_ends_with_the_block() -> None:
    told, checked = Queue[LearnerLost](), threading.Event()
    with watching(checked.set, told.put, interval_s=0.01):
        assert checked.wait(10)
    assert told.empty()
    assert not any(thread.name == "learner-watch" for thread in threading.enumerate())


def test_what_the_block_raises_passes() -> None:
    with pytest.raises(KeyError), watching(lambda: None, lambda lost: None, interval_s=0.01):
        raise KeyError
