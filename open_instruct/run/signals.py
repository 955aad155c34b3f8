"""A first SIGTERM, SIGHUP or Ctrl-C ends a run after the step that it falls in, with a checkpoint."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from open_instruct.errors import EXIT_OF_SIGNAL, stop_signals

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Noted:
    """The number of the first signal received, or None."""

    number: int | None = None


@contextmanager
def noting_signals(
    on_first: Callable[[str], None] | None = None, *, second_ends_at_once: bool = False
) -> Iterator[Noted]:
    """Note the first signal to stop while the block runs. By default later ones are ignored: launchers may send two.

    :param on_first: called with the name of the first signal.
    """
    noted = Noted()

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if noted.number is not None:
            # A closing terminal sends SIGHUP twice.
            if second_ends_at_once and number != signal.SIGHUP:
                raise KeyboardInterrupt
            return
        noted.number = number
        name = signal.Signals(number).name
        log.warning("%s received", name)
        if on_first is not None:
            on_first(name)

    before = {number: set_handler(number, note) for number in stop_signals()}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            set_handler(number, handler)


def set_handler(number: int, handler: Any) -> Any:
    """As `signal.signal`, but does nothing if the handler is None (not set from Python) or off the main thread."""
    if handler is None or threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(number, handler)


def stopped_by(number: int, *, step: int, folder: Path) -> tuple[str, int]:
    """The message and the exit code of a run that a signal stopped after `step`."""
    by = signal.Signals(number)
    where = "there is no checkpoint yet. The same command, given again, starts from the beginning"
    if step > 0:
        where = f"the checkpoint is {folder / f'step{step}'}. Give the same command again to go on from there"
    return f"{by.name}: stopped after step {step}; {where}", EXIT_OF_SIGNAL[by]
