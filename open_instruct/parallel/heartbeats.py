"""Heartbeats between ranks, by which a rank that waits can name one that is gone or frozen.

A thread of each rank renews its heartbeat in the key-value store of the process group every
`BEAT_S`, and whenever the rank begins something else. Rank 0 watches all ranks, the others watch
rank 0. A reader counts time since it last saw a heartbeat change, never by another machine's clock.
A rank in a long computation or compilation still beats.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

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
MAX_STATUSES_SHOWN = 4

# A sentence about ranks that are lost, and whether this rank should print it.
Explanation = tuple[str, bool]

# Words of gloo's and NCCL's errors about a peer that is gone.
LOST_PEER_WORDS = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "remote process exited",
    "Socket Timeout",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The newest report of a rank about itself: who it is, and what it is doing.

    `last_words` are set once the rank ends in order: "" without an error, else the error.

    Heartbeat(rank=1, host="node7", pid=4711, machine="…", beat=3, status="training step 5",
    last_words=None)
    """

    rank: int
    host: str
    pid: int
    machine: str
    beat: int
    status: str
    last_words: str | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRank:
    """A rank that will not enter the next collective, with the evidence for it."""

    heartbeat: Heartbeat
    reason: str

    def __str__(self) -> str:
        return f"{self.heartbeat.name} was lost while {self.heartbeat.status}: {self.reason}"


class HeartbeatReader:
    """A reader of the heartbeats of some ranks; raises the store's errors if the store is gone."""

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        self._store = store
        self._keys = [_key(rank) for rank in ranks]
        self._newest: dict[int, tuple[Heartbeat, float]] = {}  # with the time of its first sight

    def read(self) -> list[Heartbeat]:
        """The heartbeats in rank order; none until every rank has given its first."""
        if not self._store.check(self._keys):
            return []
        heartbeats = [
            Heartbeat(**json.loads(content)) for content in self._store.multi_get(self._keys)
        ]
        now_s = time.monotonic()
        for heartbeat in heartbeats:
            before = self._newest.get(heartbeat.rank)
            if before is None or before[0] != heartbeat:
                self._newest[heartbeat.rank] = (heartbeat, now_s)
        return heartbeats

    def find_lost(self, *, silent_s: float) -> list[LostRank]:
        """Read the heartbeats, and return the ranks that are gone or were silent for `silent_s`."""
        losses = []
        for heartbeat in self.read():
            if heartbeat.last_words is not None:
                continue
            reason = self._find_reason(heartbeat, silent_s)
            if reason is not None:
                losses.append(LostRank(heartbeat=heartbeat, reason=reason))
        return losses

    def _find_reason(self, heartbeat: Heartbeat, silent_s: float) -> str | None:
        """Why this rank counts as lost; None where it does not."""
        silence_s = time.monotonic() - self._newest[heartbeat.rank][1]
        is_silent = silence_s >= silent_s
        if heartbeat.machine != processes.machine_id():
            if not is_silent:
                return None
            return (
                f"nothing was heard of it for {silence_s:.0f} s: its machine is down, or not to "
                "be reached"
            )
        if processes.has_ended(heartbeat.pid):
            return (
                "its process was killed or crashed (by the kernel, if memory ran out: `dmesg` "
                "says so)"
            )
        if processes.is_stopped(heartbeat.pid) and is_silent:
            return f"its process is stopped (SIGSTOP, or a debugger), for {silence_s:.0f} s"
        return None


def _key(rank: int) -> str:
    # A launcher that restarts its ranks may keep the store, so the restart count is part of the
    # key.
    return f"open_instruct/sign/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


class HeartbeatMonitor:
    """This rank's own heartbeat, and its view of the others'.

    Args:
        read_status: gives what this process is doing.
        report_loss: is called with words about lost ranks, from a thread, once `watch` was called.
        has_lost_store: whether the store ended with the launcher, so that none can be written.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        num_ranks: int,
        read_status: Callable[[], str],
        report_loss: Callable[[str], object],
        has_lost_store: Callable[[], bool],
    ) -> None:
        self.rank = rank
        self._store = store
        self._read_status = read_status
        self._report_loss = report_loss
        self._has_lost_store = has_lost_store
        self._all_ranks = HeartbeatReader(store, range(num_ranks))
        # If all ranks read all heartbeats, the store would be overloaded.
        self._watched_ranks = self._all_ranks
        if rank != 0:
            self._watched_ranks = HeartbeatReader(store, [0])
        self._limit_s: float | None = None
        self._num_beats = 0
        self._has_news = threading.Event()
        self._has_left = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeats")
        self._thread.start()

    def watch(self, limit_s: float) -> None:
        """Report ranks that are gone, or silent for `limit_s`, at most `SILENT_S`."""
        self._limit_s = min(limit_s, SILENT_S)

    def renew(self) -> None:
        """Have the thread write a heartbeat now: others then read what this rank did last."""
        self._has_news.set()

    def leave(self, words: str) -> None:
        """Tell the others that this rank ends in order, with its error if it failed."""
        self._has_left.set()
        self.renew()  # wakes the thread
        with suppress(Exception):  # the store may already be gone
            self._write(words)

    def find_loss_now(self) -> Explanation | None:
        """Explain, without waiting, the loss of a rank of this machine that is gone."""
        with suppress(Exception):
            if self._all_ranks.find_lost(silent_s=SILENT_S):
                return self.explain_loss(wait_s=0)
        return None

    def explain_loss(self, *, wait_s: float = SILENT_AFTER_LOSS_S + BEAT_S) -> Explanation | None:
        """A sentence about lost or failed ranks, and whether this rank should print it.

        None if no loss is known after `wait_s`.
        """
        deadline_s = time.monotonic() + wait_s
        with suppress(Exception):
            while True:
                explanation = self._find_explanation()
                if explanation is not None:
                    return explanation
                if time.monotonic() >= deadline_s:
                    break
                time.sleep(0.2)
        return None

    def _find_explanation(self) -> Explanation | None:
        losses = self._all_ranks.find_lost(silent_s=SILENT_AFTER_LOSS_S)
        heartbeats = self._all_ranks.read()
        lost_ranks = {loss.heartbeat.rank for loss in losses}
        # Ranks that have not left in order can speak; the first of them does.
        present = [each for each in heartbeats if each.rank not in lost_ranks]
        speakers = [each.rank for each in present if each.last_words != ""]
        is_first = self.rank == min(speakers, default=0)
        if losses:
            return "; ".join(map(str, losses)), is_first
        for heartbeat in heartbeats:
            if heartbeat.last_words and heartbeat.rank != self.rank:
                return f"[rank {heartbeat.rank}] {heartbeat.last_words}", is_first
        return None

    def describe_statuses(self) -> str:
        """The status of each rank, the rarest first; "" if the store is gone."""
        by_status: dict[str, list[Heartbeat]] = {}
        with suppress(Exception):
            for heartbeat in self._all_ranks.read():
                by_status.setdefault(heartbeat.status, []).append(heartbeat)

        sentences = []
        rarest_first = sorted(by_status.items(), key=lambda item: len(item[1]))
        for status, heartbeats in rarest_first[:MAX_STATUSES_SHOWN]:
            who = heartbeats[0].name
            if len(heartbeats) > 1:
                who += f" and {len(heartbeats) - 1} more"
            sentences.append(f"{who}: {status}")
        return "; ".join(sentences)

    def _run(self) -> None:
        next_beat_s = time.monotonic() + BEAT_S
        while True:
            self._has_news.wait(max(0.0, next_beat_s - time.monotonic()))
            self._has_news.clear()
            if self._has_left.is_set():
                return
            losses: list[LostRank] = []
            is_beat = time.monotonic() >= next_beat_s
            if is_beat:
                next_beat_s = time.monotonic() + BEAT_S
                self._num_beats += 1
            # The store ended with its process; the next collective fails and reports it.
            with suppress(Exception):
                self._write()
                if is_beat and self._limit_s is not None:
                    losses = self._watched_ranks.find_lost(silent_s=self._limit_s)
            if losses and not self._has_left.wait(GRACE_S):
                self._report_loss("; ".join(map(str, losses)))

    def _write(self, last_words: str | None = None) -> None:
        if self._has_lost_store():
            return  # torch would log its end at length
        heartbeat = Heartbeat(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=processes.machine_id(),
            beat=self._num_beats,
            status=self._read_status(),
            last_words=last_words,
        )
        self._store.set(_key(self.rank), json.dumps(asdict(heartbeat)))
