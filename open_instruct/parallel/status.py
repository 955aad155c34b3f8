"""What this process is doing, in words for people, and the processes it depends on.

Messages about a failure name the status. Other ranks read it in this rank's heartbeat.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from open_instruct.parallel.heartbeats import LOST_PEER_WORDS, Explanation, HeartbeatMonitor

STORE_TIMEOUT_S = 10.0
LAUNCHER_LOOK_S = 1.0

# Set if a launcher (torchrun's agent, the driver of GRPO) keeps the store, so that it can read
# heartbeats too.
STORE_OF_LAUNCHER = "TORCHELASTIC_USE_AGENT_STORE"
# Set if torch's elastic agent (torchrun, or a command that starts its ranks) is the parent.
RUN_OF_LAUNCHER = "TORCHELASTIC_RUN_ID"

# Words of gloo's and NCCL's errors about a rank that did not answer.
TIMEOUT_WORDS = ("Timed out waiting", "Wait timeout", "NCCL")


class ProcessStatus:
    """The status of a process, the stop that a signal asked it for, and the processes it needs.

    A process has one, `this_process`, as it has one rank and one parent. It installs no handler of
    signals: `commands.process` does, and sets `pending_stop` and `report_loss`.

    Attributes:
        status: what the process is doing, in words that follow "while": "training step 5".
        pending_stop: the exception that a signal has raised. A library that was being imported may
            have caught it, as PyTorch's C++ does.
        report_loss: called from a thread with words about a lost rank or launcher, or with "" if
            another rank prints them.
    """

    def __init__(self) -> None:
        self.status = "starting"
        self.pending_stop: BaseException | None = None
        self.report_loss: Callable[[str], object] = _ignore
        self._monitor: HeartbeatMonitor | None = None
        self._launcher: int | None = None

    def set_status(self, status: str) -> None:
        """Set the status, and have the other ranks read it."""
        self.status = status
        if self._monitor is not None:
            self._monitor.renew()

    def raise_pending_stop(self) -> None:
        """Raise the stop that a signal has asked for, unless an exception is on its way already."""
        if self.pending_stop is not None and sys.exception() is None:
            raise self.pending_stop

    def begin(self, stage: str) -> None:
        """Begin a stage of the work: a pending stop is raised here, or else the status is set."""
        self.raise_pending_stop()
        self.set_status(stage)

    def start_heartbeats(self, *, rank: int, num_ranks: int) -> None:
        """Give the first heartbeat.

        Every rank calls this after it joins the process group, before the next collective.
        """
        if num_ranks < 2 and STORE_OF_LAUNCHER not in os.environ:
            return  # no other rank
        from torch.distributed import TCPStore

        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
        )
        self._monitor = HeartbeatMonitor(
            store,
            rank=rank,
            num_ranks=num_ranks,
            read_status=lambda: self.status,
            report_loss=lambda words: self.report_loss(words),
            has_lost_store=self.has_lost_store,
        )

    def watch_ranks(self, limit_s: float) -> None:
        """Call `report_loss` if a rank is gone, or silent for `limit_s`; see `HeartbeatMonitor`."""
        if self._monitor is not None:
            self._monitor.watch(limit_s)

    def watch_launcher(self) -> None:
        """Call `report_loss` if the launcher of this rank ends first, which leaves it alone."""
        if RUN_OF_LAUNCHER not in os.environ or self._launcher is not None:
            return
        self._launcher = os.getppid()
        threading.Thread(target=self._await_loss_of_launcher, daemon=True, name="launcher").start()

    def leave(self, words: str = "") -> None:
        """Record that this rank ends in order; `words` describe its failure, if it failed."""
        if self._monitor is not None:
            self._monitor.leave(words)
            self._monitor = None

    def has_lost_store(self) -> bool:
        """Whether the store of this node's ranks has ended with their launcher, as of one node."""
        return self.has_lost_launcher() and os.environ.get("GROUP_WORLD_SIZE") == "1"

    def has_lost_launcher(self) -> bool:
        return self._launcher is not None and self._launcher != os.getppid()

    def explain_error(self, error: BaseException) -> Explanation | None:
        """A sentence about the lost rank or launcher behind `error`, and whether to print it here.

        None if there is none.
        """
        if self.has_lost_launcher():
            return self._explain_loss_of_launcher()
        if self._monitor is None or not _is_about(error, LOST_PEER_WORDS):
            return None
        return self._monitor.explain_loss()

    def find_loss_now(self) -> Explanation | None:
        """Explain, without an error, that a rank of this machine is gone."""
        if self._monitor is None:
            return None
        return self._monitor.find_loss_now()

    def describe_ranks(self, error: BaseException) -> str:
        """What all ranks are doing, in parentheses, if `error` is about one that did not answer."""
        if self._monitor is None or not _is_about(error, TIMEOUT_WORDS):
            return ""
        statuses = self._monitor.describe_statuses()
        if not statuses:
            return ""
        return f" ({statuses})"

    def _await_loss_of_launcher(self) -> None:
        while not self.has_lost_launcher():
            time.sleep(LAUNCHER_LOOK_S)
        words, is_printed_here = self._explain_loss_of_launcher()
        self.report_loss(words if is_printed_here else "")

    def _explain_loss_of_launcher(self) -> Explanation:
        words = (
            f"the launcher of its ranks (pid {self._launcher}) was killed or crashed while "
            f"{self.status}, and they end with it"
        )
        return words, os.environ.get("LOCAL_RANK") == "0"


def _ignore(words: str) -> None:
    """Do nothing: no run has begun that a loss could end."""


this_process = ProcessStatus()


def _is_about(error: BaseException | None, words: Sequence[str]) -> bool:
    while error is not None:
        # An OSError comes from the hub or from a network disk, whose connections break too.
        if not isinstance(error, OSError) and any(each in str(error) for each in words):
            return True
        error = error.__cause__ or error.__context__
    return False
