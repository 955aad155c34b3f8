"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable
from typing import Any

HANGS_AFTER_S = 600.0  # far above what a busy machine needs: it is no test of speed


def eventually(
    condition: Callable[[], Any],
    *,
    timeout_s: float = HANGS_AFTER_S,
    nap_s: float = 0.01,
    what: str = "it never came",
) -> None:
    """Return once `condition` holds; fail after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(nap_s)
