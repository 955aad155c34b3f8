"""Notices learners that die while nobody asks anything of them: a step may wait for its rollouts for a long time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from open_instruct.cluster.learner_call import LearnerLost

INTERVAL_S = 3.0


@contextmanager
def watching(
    check: Callable[[], object], on_loss: Callable[[LearnerLost], None], *, interval_s: float = INTERVAL_S
) -> Iterator[None]:
    """While the block runs, call `check` every `interval_s` on a thread of its own, and `on_loss` at most once.

    Args:
        check: raises LearnerLost where a learner is gone.
        on_loss: ends what the block waits for.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(interval_s):
            try:
                check()
            except LearnerLost as lost:
                if not done.is_set():
                    on_loss(lost)
                return

    thread = threading.Thread(target=watch, name="learner-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
