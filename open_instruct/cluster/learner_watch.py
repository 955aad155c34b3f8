"""Checks the learners while the driver waits for rollouts, which may take long, and calls nothing on them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from open_instruct.cluster.learner_call import LearnerLost

INTERVAL_S = 3.0


@contextmanager
def watching(
    check: Callable[[], object], on_loss: Callable[[LearnerLost], None], *, interval_s: float = INTERVAL_S
) -> Iterator[None]:
    """While the block runs, call `check` every `interval_s` on a thread of its own.

    Args:
        check: raises LearnerLost if a learner is gone.
        on_loss: called at most once with that error; ends what the block waits for.
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
