"""Who is lost among the ranks, as their heartbeats tell, and who says it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
from torch.distributed import HashStore

from open_instruct.parallel import heartbeats
from open_instruct.parallel.heartbeats import Heartbeat, HeartbeatMonitor, HeartbeatReader, LostRank
from open_instruct.parallel.processes import machine_id
from open_instruct.parallel.status import this_process
from tests.unit.fake_engine import TIMEOUT_S, eventually


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeats, "time", clock)
    return clock


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


class Ranks:
    """Three ranks: 0 is this process, 1 a child of it, 2 is on another machine."""

    def __init__(self, child_pid: int) -> None:
        self.store = HashStore()
        there = {"host": "a", "machine": machine_id(), "beat": 0, "status": "training step 5"}
        self.heartbeats = [
            Heartbeat(rank=0, pid=os.getpid(), **there),
            Heartbeat(rank=1, pid=child_pid, **there),
            Heartbeat(rank=2, pid=7, **there | {"host": "b", "machine": "b"}),
        ]
        for heartbeat in self.heartbeats:
            self.give(heartbeat)
        self.reader = HeartbeatReader(self.store, range(3))

    def give(self, heartbeat: Heartbeat) -> None:
        self.store.set(heartbeats._key(heartbeat.rank), json.dumps(asdict(heartbeat)))
        self.heartbeats[heartbeat.rank] = heartbeat

    def beat(self, *ranks: int) -> None:
        for rank in ranks:
            self.give(replace(self.heartbeats[rank], beat=self.heartbeats[rank].beat + 1))

    def losses(self, silent_s: float = 90.0) -> list[LostRank]:
        return self.reader.find_lost(silent_s=silent_s)


def monitor(store: HashStore, *, rank: int, num_ranks: int) -> HeartbeatMonitor:
    return HeartbeatMonitor(
        store,
        rank=rank,
        num_ranks=num_ranks,
        read_status=lambda: this_process.status,
        report_loss=this_process.report_loss,
        has_lost_store=lambda: False,
    )


@pytest.fixture
def ranks(child: subprocess.Popen[bytes]) -> Ranks:
    return Ranks(child.pid)


def test_peers_are_not_lost_while_all_beat(ranks: Ranks, clock: Clock) -> None:
    for _ in range(30):
        assert ranks.losses() == []
        ranks.beat(0, 1, 2)
        clock.now_s += 60


def test_rank_that_computes_for_long_without_a_beat_is_not_lost(ranks: Ranks, clock: Clock) -> None:
    """One of this machine can be looked at: it runs."""
    ranks.losses()
    for _ in range(30):
        clock.now_s += 60
        ranks.beat(2)
        assert ranks.losses() == []


def test_killed_rank_is_lost_at_once(
    ranks: Ranks, clock: Clock, child: subprocess.Popen[bytes]
) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    (loss,) = ranks.losses()
    assert str(loss).startswith(
        f"rank 1 (host a, pid {child.pid}) was lost while training step 5: its process was killed"
    )


def test_stopped_rank_is_lost_after_a_while(
    ranks: Ranks, clock: Clock, child: subprocess.Popen[bytes]
) -> None:
    ranks.losses()
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    clock.now_s += 80
    ranks.beat(2)
    assert ranks.losses() == []
    clock.now_s += 20
    ranks.beat(2)
    (loss,) = ranks.losses()
    assert (
        loss.heartbeat.rank == 1
        and "its process is stopped (SIGSTOP, or a debugger), for 100 s" in str(loss)
    )


def test_machine_that_is_silent_is_lost_after_a_while(ranks: Ranks, clock: Clock) -> None:
    ranks.losses()
    clock.now_s += 80
    assert ranks.losses() == []
    clock.now_s += 15
    (loss,) = ranks.losses()
    assert "rank 2 (host b, pid 7)" in str(loss) and "nothing was heard of it for 95 s" in str(loss)


def test_peer_that_left_in_order_is_not_lost(
    ranks: Ranks, clock: Clock, child: subprocess.Popen[bytes]
) -> None:
    ranks.give(replace(ranks.heartbeats[1], last_words="dpo.py: SIGTERM"))
    ranks.give(replace(ranks.heartbeats[2], last_words=""))
    child.kill()
    child.wait()
    clock.now_s += 1000
    assert ranks.losses() == []


def test_peers_are_silent_before_all_have_met() -> None:
    assert HeartbeatReader(HashStore(), range(2)).read() == []


class TestExplanations:
    @pytest.fixture
    def me(self, ranks: Ranks) -> Iterator[HeartbeatMonitor]:
        me = monitor(ranks.store, rank=0, num_ranks=3)
        yield me
        me.leave("")

    def test_lowest_rank_that_lives_speaks(
        self, ranks: Ranks, me: HeartbeatMonitor, clock: Clock, child: subprocess.Popen[bytes]
    ) -> None:
        child.kill()
        child.wait()
        words, is_mine = me.explain_loss(wait_s=10)
        assert "rank 1" in words and is_mine
        other = monitor(ranks.store, rank=2, num_ranks=3)
        assert other.explain_loss(wait_s=10) == (words, False)
        other.leave("")

    def test_rank_that_told_why_it_ends_is_quoted(
        self, ranks: Ranks, me: HeartbeatMonitor, clock: Clock
    ) -> None:
        ranks.give(replace(ranks.heartbeats[1], last_words="dpo.py: row 7 is damaged"))
        assert me.explain_loss(wait_s=10) == ("[rank 1] dpo.py: row 7 is damaged", True)

    def test_timeout_names_what_each_peer_does_when_all_live(
        self, ranks: Ranks, me: HeartbeatMonitor, clock: Clock
    ) -> None:
        this_process.begin("training step 5")
        me._write()
        ranks.give(replace(ranks.heartbeats[1], status="training step 4"))
        assert me.explain_loss(wait_s=0) is None
        told = me.describe_statuses().split("; ")
        assert told[0].endswith(": training step 4") and told[0].startswith("rank 1 (host a")
        assert told[1].startswith("rank 0 ") and told[1].endswith(" and 1 more: training step 5")

    def test_only_words_about_peers_are_explained(
        self, me: HeartbeatMonitor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(this_process, "_monitor", me)
        assert this_process.explain_error(KeyError("x")) is None
        assert (
            this_process.explain_error(ConnectionResetError(104, "Connection reset by peer"))
            is None
        )
        assert this_process.describe_ranks(KeyError("x")) == ""
        assert "training step 5" in this_process.describe_ranks(
            RuntimeError("Timed out waiting 1800000ms for recv operation")
        )


class TestStatus:
    """A heartbeat tells at once what its rank does: a rank that is killed between two beats is named
    with its last step.
    """

    @pytest.fixture
    def me(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeartbeatMonitor]:
        monkeypatch.setattr(heartbeats, "BEAT_S", 3600.0)
        me = monitor(HashStore(), rank=0, num_ranks=1)
        monkeypatch.setattr(this_process, "_monitor", me)
        yield me
        me.leave("")
        me._thread.join(TIMEOUT_S)
        assert not me._thread.is_alive()

    def test_is_told_before_the_next_beat(self, me: HeartbeatMonitor) -> None:
        for step in (4, 5):
            this_process.begin(f"training step {step}")
            eventually(
                lambda: [each.status for each in me._all_ranks.read()] == [f"training step {step}"]  # noqa: B023
            )
        assert me._num_beats == 0

    def test_does_not_keep_a_rank_that_does_much_from_its_beat(
        self, me: HeartbeatMonitor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(heartbeats, "BEAT_S", 0.01)
        other = monitor(HashStore(), rank=0, num_ranks=1)
        monkeypatch.setattr(this_process, "_monitor", other)

        def has_beaten() -> bool:
            this_process.begin("training")
            return other._num_beats > 2

        eventually(has_beaten)
        other.leave("")


def test_single_process_has_no_peers() -> None:
    this_process.start_heartbeats(rank=0, num_ranks=1)
    assert this_process.explain_error(RuntimeError("Connection closed by peer")) is None
