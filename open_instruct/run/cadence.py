"""The steps after which a run saves, evaluates or compares processes; and stop signals.

A first SIGTERM, SIGHUP or Ctrl-C ends a run after the step that it falls in, with a checkpoint.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import EXIT_OF_SIGNAL, stop_signals
from open_instruct.run.alarms import WINDOW

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """The steps after which a run saves and evaluates. Steps count from 1.

    Example: `Cadence(num_steps=10, save_every=4, evaluate_every=5)` saves after steps 4, 8 and 10
    and evaluates after steps 5 and 10.
    """

    num_steps: int
    save_every: int
    """Steps between checkpoints that last."""
    save_ephemeral_every: int | None = None
    """Steps between checkpoints that are removed once there is a newer one; None for none."""
    evaluate_every: int | None = None
    """Steps between evaluations; 0 for one after the last step alone, None for no evaluation."""
    saves_best: bool = False
    """Whether the best step has a checkpoint, which is removed once there is a better one."""

    @property
    def lasting_interval(self) -> int:
        """A checkpoint lasts if its step is a multiple of this."""
        if self.save_ephemeral_every or self.saves_best:
            return self.save_every
        return 1

    def is_last(self, step: int) -> bool:
        return step == self.num_steps

    def saves_after(self, step: int) -> bool:
        return (
            self.is_last(step)
            or _is_multiple(step, self.save_every)
            or _is_multiple(step, self.save_ephemeral_every)
        )

    def evaluates_after(self, step: int) -> bool:
        return self.evaluate_every is not None and (
            self.is_last(step) or _is_multiple(step, self.evaluate_every)
        )

    def compares_speed_after(self, step: int) -> bool:
        return step % WINDOW == 0


def build_cadence(config: GRPOConfig) -> Cadence:
    """The cadence of a run of GRPO."""
    evaluate_every = None
    if config.data.has_held_out_rows:
        evaluate_every = config.evaluation.local_eval_every
    return Cadence(
        num_steps=config.num_steps,
        save_every=config.run.checkpointing_steps,
        save_ephemeral_every=config.run.ephemeral_save_interval,
        evaluate_every=evaluate_every,
        saves_best=config.run.keep_best is not None,
    )


def _is_multiple(step: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and step % interval == 0


@dataclass(slots=True)
class ReceivedSignal:
    """The number of the first signal received, or None."""

    number: int | None = None


@contextmanager
def record_signals(
    on_first: Callable[[str], None] | None = None, *, second_ends_at_once: bool = False
) -> Iterator[ReceivedSignal]:
    """Record the first signal to stop while the block runs.

    Args:
        on_first: called with the name of the first signal.
        second_ends_at_once: raise KeyboardInterrupt at a second signal. By default later ones are
            ignored, as launchers may send two.
    """
    received_signal = ReceivedSignal()

    def record(number: int, frame: FrameType | None) -> None:
        del frame
        if received_signal.number is not None:
            # A closing terminal sends SIGHUP twice.
            if second_ends_at_once and number != signal.SIGHUP:
                raise KeyboardInterrupt
            return
        received_signal.number = number
        name = signal.Signals(number).name
        log.warning("%s received", name)
        if on_first is not None:
            on_first(name)

    with handle_stop_signals(record):
        yield received_signal


@contextmanager
def handle_stop_signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Call `handler` at each signal to stop while the block runs."""
    before = {number: set_handler(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            set_handler(number, earlier)


def set_handler(number: int, handler: Any) -> Any:
    """Do as `signal.signal`, on the main thread alone; a handler of None (not Python's) stays."""
    if handler is None or threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(number, handler)


def describe_stop(number: int, *, step: int, folder: Path) -> tuple[str, int]:
    """The message and the exit code of a run that a signal stopped after `step`."""
    received_signal = signal.Signals(number)
    where = "there is no checkpoint yet. The same command, given again, starts from the beginning"
    if step > 0:
        checkpoint = folder / f"step{step}"
        where = f"the checkpoint is {checkpoint}. Give the same command again to go on from there"
    return f"{received_signal.name}: stopped after step {step}; {where}", EXIT_OF_SIGNAL[
        received_signal
    ]
