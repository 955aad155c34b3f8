"""Who is lost among the ranks, as their signs tell, and who says it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
from torch.distributed import HashStore

from open_instruct.parallel import peers
from open_instruct.parallel.peers import Loss, Peers, Sign, Signs, doing
from open_instruct.parallel.processes import machine
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
    monkeypatch.setattr(peers, "time", clock)
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
        there = {"host": "a", "machine": machine(), "beat": 0, "doing": "training step 5"}
        self.signs = [
            Sign(rank=0, pid=os.getpid(), **there),
            Sign(rank=1, pid=child_pid, **there),
            Sign(rank=2, pid=7, **there | {"host": "b", "machine": "b"}),
        ]
        for sign in self.signs:
            self.give(sign)
        self.reader = Signs(self.store, range(3))

    def give(self, sign: Sign) -> None:
        self.store.set(peers._key(sign.rank), json.dumps(asdict(sign)))
        self.signs[sign.rank] = sign

    def beat(self, *ranks: int) -> None:
        for rank in ranks:
            self.give(replace(self.signs[rank], beat=self.signs[rank].beat + 1))

    def losses(self, silent_s: float = 90.0) -> list[Loss]:
        return self.reader.losses(silent_s=silent_s)


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
        loss.sign.rank == 1
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
    ranks.give(replace(ranks.signs[1], last_words="dpo.py: SIGTERM"))
    ranks.give(replace(ranks.signs[2], last_words=""))
    child.kill()
    child.wait()
    clock.now_s += 1000
    assert ranks.losses() == []


def test_peers_are_silent_before_all_have_met() -> None:
    assert Signs(HashStore(), range(2)).look() == []


class TestExplanations:
    @pytest.fixture
    def me(self, ranks: Ranks) -> Iterator[Peers]:
        me = Peers(ranks.store, rank=0, num_ranks=3)
        yield me
        me.leave("")

    def test_lowest_rank_that_lives_speaks(
        self, ranks: Ranks, me: Peers, clock: Clock, child: subprocess.Popen[bytes]
    ) -> None:
        child.kill()
        child.wait()
        words, is_mine = me.explanation(wait_s=10)
        assert "rank 1" in words and is_mine
        other = Peers(ranks.store, rank=2, num_ranks=3)
        assert other.explanation(wait_s=10) == (words, False)
        other.leave("")

    def test_rank_that_told_why_it_ends_is_quoted(
        self, ranks: Ranks, me: Peers, clock: Clock
    ) -> None:
        ranks.give(replace(ranks.signs[1], last_words="dpo.py: row 7 is damaged"))
        assert me.explanation(wait_s=10) == ("[rank 1] dpo.py: row 7 is damaged", True)

    def test_timeout_names_what_each_peer_does_when_all_live(
        self, ranks: Ranks, me: Peers, clock: Clock
    ) -> None:
        doing("training step 5")
        me._give()
        ranks.give(replace(ranks.signs[1], doing="training step 4"))
        assert me.explanation(wait_s=0) is None
        told = me.whereabouts().split("; ")
        assert told[0].endswith(": training step 4") and told[0].startswith("rank 1 (host a")
        assert told[1].startswith("rank 0 ") and told[1].endswith(" and 1 more: training step 5")

    def test_only_words_about_peers_are_explained(
        self, me: Peers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(peers, "_peers", me)
        assert peers.explanation(KeyError("x")) is None
        assert peers.explanation(ConnectionResetError(104, "Connection reset by peer")) is None
        assert peers.whereabouts(KeyError("x")) == ""
        assert "training step 5" in peers.whereabouts(
            RuntimeError("Timed out waiting 1800000ms for recv operation")
        )


class TestWhatIsDone:
    """A sign tells at once what its rank does: a rank that is killed between two beats is named
    with its last step.
    """

    @pytest.fixture
    def me(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
        monkeypatch.setattr(peers, "BEAT_S", 3600.0)
        me = Peers(HashStore(), rank=0, num_ranks=1)
        monkeypatch.setattr(peers, "_peers", me)
        yield me
        me.leave("")
        me._thread.join(TIMEOUT_S)
        assert not me._thread.is_alive()

    def test_is_told_before_the_next_beat(self, me: Peers) -> None:
        for step in (4, 5):
            doing(f"training step {step}")
            eventually(
                lambda: [sign.doing for sign in me._signs.look()] == [f"training step {step}"]  # noqa: B023
            )
        assert me._num_beats == 0

    def test_does_not_keep_a_rank_that_does_much_from_its_beat(
        self, me: Peers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(peers, "BEAT_S", 0.01)
        other = Peers(HashStore(), rank=0, num_ranks=1)
        monkeypatch.setattr(peers, "_peers", other)
        eventually(lambda: doing("training") or other._num_beats > 2)
        other.leave("")


def test_single_process_has_no_peers() -> None:
    peers.meet(rank=0, num_ranks=1)
    assert peers.explanation(RuntimeError("Connection closed by peer")) is None
