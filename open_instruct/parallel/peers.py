"""Heartbeats between ranks, so that ranks that wait can name one that is gone or frozen.

A thread of each rank renews its sign in the key-value store of the process group every `BEAT_S`,
and whenever the rank begins something else. Rank 0 watches all ranks, the others watch rank 0. A
reader counts time since it last saw a sign change, never by another machine's clock. A rank in a
long computation or compilation still beats.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from open_instruct.parallel import processes

if TYPE_CHECKING:
    from torch.distributed import Store

BEAT_S = 5.0
# How long a rank may be silent.
SILENT_S = 90.0
# How long a rank may be silent once a connection to some rank broke.
SILENT_AFTER_LOSS_S = 2.5 * BEAT_S
# Time for the main thread, which waits in a collective, to fail and report by itself.
GRACE_S = 10.0
STORE_TIMEOUT_S = 10.0

# Set if a launcher (torchrun's agent, the driver of GRPO) keeps the store, so that it can read
# signs too.
STORE_OF_LAUNCHER = "TORCHELASTIC_USE_AGENT_STORE"
# Set if torch's elastic agent (torchrun, or a command that starts its ranks) is the parent.
RUN_OF_LAUNCHER = "TORCHELASTIC_RUN_ID"

# Words of gloo's and NCCL's errors about a peer that is gone.
LOST_PEER_WORDS = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "remote process exited",
    "Socket Timeout",
)
WAITED_WORDS = ("Timed out waiting", "Wait timeout", "NCCL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A rank's heartbeat. `last_words` are set once the rank ends in order: "" without an error,
    else the error.

    Sign(rank=1, host="node7", pid=4711, machine="…", beat=3, doing="training step 5",
    last_words=None)
    """

    rank: int
    host: str
    pid: int
    machine: str
    beat: int
    doing: str
    last_words: str | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A rank that will not enter the next collective, with the evidence for it."""

    sign: Sign
    reason: str

    def __str__(self) -> str:
        return f"{self.sign.name} was lost while {self.sign.doing}: {self.reason}"


class Signs:
    """A reader of all signs; raises the store's errors if the store is gone."""

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        self._store = store
        self._keys = [_key(rank) for rank in ranks]
        self._seen: dict[int, tuple[Sign, float]] = {}

    def look(self) -> list[Sign]:
        """The signs in rank order; none until every rank has given its first sign."""
        if not self._store.check(self._keys):
            return []
        signs = [Sign(**json.loads(content)) for content in self._store.multi_get(self._keys)]
        now_s = time.monotonic()
        for sign in signs:
            if sign.rank not in self._seen or self._seen[sign.rank][0] != sign:
                self._seen[sign.rank] = (sign, now_s)
        return signs

    def losses(self, *, silent_s: float) -> list[Loss]:
        """Read the signs, and return the ranks that are gone or were silent for `silent_s`."""
        reasons = (
            (sign, self._reason(sign, silent_s)) for sign in self.look() if sign.last_words is None
        )
        return [Loss(sign=sign, reason=reason) for sign, reason in reasons if reason is not None]

    def _reason(self, sign: Sign, silent_s: float) -> str | None:
        silence_s = time.monotonic() - self._seen[sign.rank][1]
        if sign.machine != processes.machine():
            heard = (
                f"nothing was heard of it for {silence_s:.0f} s: its machine is down, or not to "
                "be reached"
            )
            return heard if silence_s >= silent_s else None
        if processes.has_ended(sign.pid):
            return (
                "its process was killed or crashed (by the kernel, if memory ran out: `dmesg` "
                "says so)"
            )
        if processes.is_stopped(sign.pid) and silence_s >= silent_s:
            return f"its process is stopped (SIGSTOP, or a debugger), for {silence_s:.0f} s"
        return None


def _key(rank: int) -> str:
    # A launcher that restarts its ranks may keep the store, so the restart count is part of the
    # key.
    return f"open_instruct/sign/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


class Peers:
    """This rank's own sign, and its view of the others'."""

    def __init__(self, store: Store, *, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self._store = store
        self._signs = Signs(store, range(num_ranks))
        # If all ranks read all signs, the store would be overloaded.
        self._watched = self._signs if rank == 0 else Signs(store, [0])
        # Once set, the thread calls `on_loss` if a watched rank is lost.
        self.limit_s: float | None = None
        self._num_beats = 0
        self._does_other = threading.Event()
        self._has_left = threading.Event()
        self._give()
        self._thread = threading.Thread(target=self._run, daemon=True, name="peers")
        self._thread.start()

    def renew(self) -> None:
        """Make the thread give a new sign now, so that after a loss the others can read what this
        rank did last.
        """
        self._does_other.set()

    def leave(self, words: str) -> None:
        """Tell the others that this rank ends in order, with its error if it failed."""
        self._has_left.set()
        self.renew()  # wakes the thread
        with suppress(Exception):  # the store may already be gone
            self._give(words)

    def explanation(self, *, wait_s: float) -> tuple[str, bool] | None:
        """A sentence about lost or failed ranks, and whether this rank should print it;

        None if no loss is known.
        """
        deadline_s = time.monotonic() + wait_s
        with suppress(Exception):
            while True:
                losses = self._signs.losses(silent_s=SILENT_AFTER_LOSS_S)
                signs = self._signs.look()
                lost = {loss.sign.rank for loss in losses}
                first = min(
                    (
                        sign.rank
                        for sign in signs
                        if sign.rank not in lost and sign.last_words != ""
                    ),
                    default=0,
                )
                if losses:
                    return "; ".join(map(str, losses)), self.rank == first
                for sign in signs:
                    if sign.last_words and sign.rank != self.rank:
                        return f"[rank {sign.rank}] {sign.last_words}", self.rank == first
                if time.monotonic() >= deadline_s:
                    break
                time.sleep(0.2)
        return None

    def whereabouts(self) -> str:
        """The activity of each rank, the rarest first; "" if the store is gone."""
        at: dict[str, list[Sign]] = {}
        with suppress(Exception):
            for sign in self._signs.look():
                at.setdefault(sign.doing, []).append(sign)

        sentences = []
        for what, there in sorted(at.items(), key=lambda item: len(item[1]))[:4]:
            others = f" and {len(there) - 1} more" if len(there) > 1 else ""
            sentences.append(f"{there[0].name}{others}: {what}")
        return "; ".join(sentences)

    def _run(self) -> None:
        next_beat_s = time.monotonic() + BEAT_S
        while True:
            self._does_other.wait(max(0.0, next_beat_s - time.monotonic()))
            self._does_other.clear()
            if self._has_left.is_set():
                return
            losses: list[Loss] = []
            if is_beat := time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + BEAT_S
                self._num_beats += 1
            # The store ended with its process; the next collective fails and reports it.
            with suppress(Exception):
                self._give()
                if is_beat and self.limit_s is not None:
                    losses = self._watched.losses(silent_s=self.limit_s)
            if losses and not self._has_left.wait(GRACE_S):
                on_loss("; ".join(map(str, losses)))

    def _give(self, last_words: str | None = None) -> None:
        if _loss_of_launcher() is not None and os.environ.get("GROUP_WORLD_SIZE") == "1":
            return  # rank 0 kept the store, and torch would log its end at length
        sign = Sign(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=processes.machine(),
            beat=self._num_beats,
            doing=_doing,
            last_words=last_words,
        )
        self._store.set(_key(self.rank), json.dumps(asdict(sign)))


# What this process is doing; a process has one rank and does one thing at a time.
_doing = "starting"
_peers: Peers | None = None
_launcher: int | None = None


def _ignore(words: str) -> None:
    """Do nothing: no run has begun that a loss could end."""


on_loss: Callable[[str], Any] = _ignore
"""Called from a watching thread with words about the loss, or with "" if another rank prints
them.
"""


stop: BaseException | None = None
"""The exception that a signal has raised.

A library that was being imported may have caught it: PyTorch's C++ does.
"""


def doing(what: str) -> None:
    """Set the status of this process, in words that follow "while": "training step 5".

    A pending stop is raised here: a signal has asked for it, and no exception is on its way yet.
    """
    global _doing
    if stop is not None and sys.exception() is None:
        raise stop
    _doing = what
    if _peers is not None:
        _peers.renew()


def activity() -> str:
    return _doing


def meet(*, rank: int, num_ranks: int) -> None:
    """Give the first sign.

    Every rank calls this after it joins the process group, before the next collective.
    """
    global _peers
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
    _peers = Peers(store, rank=rank, num_ranks=num_ranks)


def watch_launcher() -> None:
    """Call `on_loss` if the launcher of this rank ends first, since nothing would end the rank
    then.
    """
    global _launcher
    if RUN_OF_LAUNCHER not in os.environ or _launcher is not None:
        return
    _launcher = os.getppid()

    def look() -> None:
        while (loss := _loss_of_launcher()) is None:
            time.sleep(1.0)
        on_loss(loss[0] if loss[1] else "")

    threading.Thread(target=look, daemon=True, name="launcher").start()


def _loss_of_launcher() -> tuple[str, bool] | None:
    """As `explanation`, for the loss of the process that started this one."""
    if _launcher in (None, os.getppid()):
        return None
    words = (
        f"the launcher of its ranks (pid {_launcher}) was killed or crashed while {_doing}, and "
        "they end with it"
    )
    return words, os.environ.get("LOCAL_RANK") == "0"


def watch(limit_s: float) -> None:
    """Call `on_loss` if a rank is gone or silent for `limit_s`, at most `SILENT_S`."""
    if _peers is not None:
        _peers.limit_s = min(limit_s, SILENT_S)


def leave(words: str = "") -> None:
    """Record that this rank ends in order; `words` describe its failure, if it failed."""
    global _peers
    if _peers is not None:
        _peers.leave(words)
        _peers = None


def explanation(error: BaseException) -> tuple[str, bool] | None:
    """A sentence about the lost peer behind `error`, and whether this rank should print it;

    None if there is none.
    """
    if (loss := _loss_of_launcher()) is not None:
        return loss
    if _peers is None:
        return None
    return (
        _peers.explanation(wait_s=SILENT_AFTER_LOSS_S + BEAT_S)
        if _is_about(error, LOST_PEER_WORDS)
        else None
    )


def whereabouts(error: BaseException) -> str:
    """The activities of ranks in parentheses if `error` is about a rank that did not answer; else
    "".
    """
    others = _peers.whereabouts() if _peers is not None and _is_about(error, WAITED_WORDS) else ""
    return f" ({others})" if others else ""


def loss_now() -> tuple[str, bool] | None:
    """As `explanation`, for a rank of this machine that is gone."""
    if _peers is not None:
        with suppress(Exception):
            if _peers._signs.losses(silent_s=SILENT_S):
                return _peers.explanation(wait_s=0)
    return None


def _is_about(error: BaseException | None, words: Sequence[str]) -> bool:
    while error is not None:
        # An OSError comes from the hub or from a network disk, whose connections break too.
        if not isinstance(error, OSError) and any(each in str(error) for each in words):
            return True
        error = error.__cause__ or error.__context__
    return False
