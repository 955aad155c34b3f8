"""How a future gets its outcome where whoever asked may have given it up."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


def set_outcome(future: Future[Any], outcome: Any) -> None:
    """Set a result, or an exception where `outcome` is one; nothing where the future was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
