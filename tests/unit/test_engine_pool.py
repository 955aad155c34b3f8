"""Engines as one: every request is answered once, whatever becomes of the engine that it was with."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from open_instruct.engines import engine_pool
from open_instruct.engines.engine import Engine
from open_instruct.engines.engine_pool import EnginePool
from open_instruct.errors import RunError
from open_instruct.records import Completion
from open_instruct.run.alarms import slowest
from tests.unit.fake_engine import (
    MAX_NUM_SEQS,
    MAX_PROMPT_LENGTH,
    TIMEOUT_S,
    InProcessEngine,
    eventually,
    request,
    text_of,
)


class Pool:
    """A pool with its engines: `made` has every engine there was, in the order in which they were made.

    Attributes:
        restarts: what was done to bring engines back, in order, as ("make" or "restart", index).
        may_be_made: cleared, an engine that is made anew waits for it; `may_get_weights` likewise.
        failures: raised in turn when an engine is to be made anew.
    """

    def __init__(self, num_engines: int, *, max_restarts: int = 3, timeout_s: float = TIMEOUT_S) -> None:
        self.made = [InProcessEngine(f"engine {index}") for index in range(num_engines)]
        self._latest: dict[int, InProcessEngine] = {}
        self.restarts: list[tuple[str, int]] = []
        self.said: list[str] = []
        self.told_failures: list[RunError] = []
        self.failures: list[Exception] = []
        self.failures_of_restart: list[Exception] = []
        self.may_be_made = threading.Event()
        self.may_get_weights = threading.Event()
        self.may_be_made.set()
        self.may_get_weights.set()
        self.pool = EnginePool(
            list(self.made),
            make_engine=self._make,
            on_restart=self._restarted,
            on_failure=self.told_failures.append,
            timeout_s=timeout_s,
            max_restarts=max_restarts,
            say=self.said.append,
        )

    def hold(self) -> None:
        for engine in self.made:
            engine.core.hold()

    def submit(self, *numbers: int, num_tokens: int = 3) -> list[Future[Completion]]:
        return [self.pool.submit(request(number, num_tokens=num_tokens)) for number in numbers]

    def close(self) -> None:
        self.may_be_made.set()
        self.may_get_weights.set()
        self.pool.close()

    def _make(self, index: int) -> InProcessEngine:
        self.restarts.append(("make", index))
        assert self.may_be_made.wait(TIMEOUT_S)
        if self.failures:
            raise self.failures.pop(0)
        engine = self._latest[index] = InProcessEngine(f"engine {index}")
        self.made.append(engine)
        return engine

    def _restarted(self, index: int) -> None:
        self.restarts.append(("restart", index))
        assert self.may_get_weights.wait(TIMEOUT_S)
        if self.failures_of_restart:
            raise self.failures_of_restart.pop(0)
        assert not self._latest[index].requests


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tests leave engines that hang."""
    monkeypatch.setattr(engine_pool, "END_TIMEOUT_S", 0.5)


@pytest.fixture
def one() -> Iterator[Pool]:
    it = Pool(1)
    yield it
    it.close()


@pytest.fixture
def two() -> Iterator[Pool]:
    it = Pool(2)
    yield it
    it.close()


def num_in_flight(pool: Pool) -> int:
    return len(pool.pool._homeless) + sum(len(member.asked) for member in pool.pool._members)


def texts(futures: list[Future[Completion]]) -> list[str]:
    return [future.result(TIMEOUT_S).text for future in futures]


def answers(*numbers: int) -> list[str]:
    return [text_of(request(number)) for number in numbers]


def test_a_slow_engine_is_known_by_its_own_requests(two: Pool) -> None:
    step = two.made[1].core.step

    def slowed() -> Any:
        time.sleep(0.03)
        return step()

    two.made[1].core.step = slowed  # type: ignore[method-assign]
    assert two.pool.paces() == [None, None]
    texts(two.submit(*range(48)))
    row = slowest("engine", two.pool.paces())
    assert row["slowest_engine"] == 1 and row["slowest_engine/times"] > 1.5


class TestRequests:
    def test_each_gets_its_own_also_where_ids_come_again(self, two: Pool) -> None:
        numbers = [*range(100), 1, 1, 1]
        assert texts(two.submit(*numbers)) == answers(*numbers)
        assert num_in_flight(two) == 0
        assert all(engine.requests for engine in two.made)

    def test_go_to_the_least_busy(self, two: Pool) -> None:
        two.hold()
        futures = two.submit(*range(6), num_tokens=1)
        assert [len(engine.requests) for engine in two.made] == [3, 3]
        busy, free = two.made
        free.core.release()
        texts(futures[1::2])
        eventually(lambda: num_in_flight(two) == 3)
        two.submit(6, 7, num_tokens=1)
        assert [len(engine.requests) for engine in two.made] == [3, 5]
        busy.core.release()

    def test_one_that_cannot_be_fails_alone(self, one: Pool) -> None:
        refused = one.pool.submit(request(1, prompt_length=MAX_PROMPT_LENGTH + 1))
        with pytest.raises(RunError, match="request 1/0 cannot be generated: the prompt is too long"):
            refused.result(TIMEOUT_S)
        assert texts(one.submit(2)) == answers(2)

    def test_what_hangs_on_an_answer_may_ask_again(self, one: Pool) -> None:
        second: Future[Future[Completion]] = Future()
        one.submit(1)[0].add_done_callback(lambda _: second.set_result(one.submit(2)[0]))
        assert second.result(TIMEOUT_S).result(TIMEOUT_S).text == text_of(request(2))


class TestCancel:
    def test_reaches_the_engine(self, one: Pool) -> None:
        one.hold()
        futures = one.submit(*range(3))
        assert futures[1].cancel()
        assert num_in_flight(one) == 2
        (engine,) = one.made
        assert [args for method, args in engine.told if method == "cancel"] == [([1],)]
        engine.core.release()
        assert texts([futures[0], futures[2]]) == answers(0, 2)

    def test_is_not_asked_again_after_a_death(self, one: Pool) -> None:
        one.hold()
        one.may_be_made.clear()
        futures = one.submit(0, 1)
        one.made[0].die()
        eventually(lambda: one.restarts)
        assert futures[0].cancel()
        one.may_be_made.set()
        assert texts(futures[1:]) == answers(1)
        assert one.made[1].requests == [request(1)]
        with pytest.raises(CancelledError):
            futures[0].result()


class TestDeath:
    def test_everything_is_asked_again_once_the_engine_has_its_weights(self, one: Pool) -> None:
        one.hold()
        one.may_get_weights.clear()
        futures = one.submit(*range(MAX_NUM_SEQS + 3))
        one.made[0].die()
        eventually(lambda: ("restart", 0) in one.restarts)
        late = one.submit(50)
        assert one.made[0].is_killed
        assert not one.made[1].requests
        one.may_get_weights.set()
        assert texts(futures + late) == answers(*range(MAX_NUM_SEQS + 3), 50)
        assert one.restarts == [("make", 0), ("restart", 0)]
        assert one.said == ["engine 0 was lost during poll; starting it again (1 of 3 restarts)"]

    def test_the_other_engine_goes_on_meanwhile(self, two: Pool) -> None:
        two.hold()
        two.may_be_made.clear()
        futures = two.submit(*range(6))
        lost, other = two.made
        lost.die()
        other.core.release()
        assert texts(futures) == answers(*range(6))
        assert texts(two.submit(7, 8)) == answers(7, 8)
        assert {asked.seed for asked in other.requests} == {*range(6), 7, 8}
        two.may_be_made.set()
        eventually(lambda: ("restart", 0) in two.restarts)
        eventually(lambda: texts(two.submit(9, 10)) == answers(9, 10) and two.made[2].requests)

    def test_an_engine_that_fails_is_started_again(self, one: Pool) -> None:
        one.made[0].core.failures["step"] = OSError("out of memory")
        assert texts(one.submit(1)) == answers(1)
        assert "the engine failed: OSError: out of memory" in one.said[0]

    def test_an_engine_that_hangs_in_a_step_is_started_again_and_an_idle_one_is_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine_pool, "POLL_WAIT_S", 0.2)
        pool = Pool(1, timeout_s=0.2)
        eventually(lambda: pool.made[0].asked.count("poll") > 3)
        assert not pool.restarts
        pool.hold()
        assert texts(pool.submit(1)) == answers(1)
        assert "has been in one step for" in pool.said[0]
        assert pool.made[0].is_killed
        pool.close()

    def test_an_engine_that_answers_nonsense_is_started_again(self, one: Pool) -> None:
        one.hold()
        one.made[0].engine.poll = lambda wait_s: 3  # type: ignore[assignment,method-assign,return-value]
        assert texts(one.submit(1)) == answers(1)
        assert one.said[0].startswith("engine 0 could not be asked")

    def test_both_at_once(self, two: Pool) -> None:
        two.hold()
        futures = two.submit(*range(9))
        for engine in two.made[:2]:
            engine.die()
        assert texts(futures) == answers(*range(9))
        eventually(lambda: sorted(two.restarts) == [("make", 0), ("make", 1), ("restart", 0), ("restart", 1)])

    def test_none_is_lost_and_none_answered_twice_while_engines_die(self) -> None:
        dying = Pool(2, max_restarts=100)
        num_answers = 0
        lock = threading.Lock()

        def count(future: Future[Completion]) -> None:
            nonlocal num_answers
            with lock:
                num_answers += 1

        futures = []
        for number in range(200):
            futures += dying.submit(number, num_tokens=2)
            futures[-1].add_done_callback(count)
            if number % 20 == 10:
                dying.made[-1].die()
        assert texts(futures) == answers(*range(200))
        assert num_answers == 200
        assert num_in_flight(dying) == 0
        dying.close()

    @pytest.mark.parametrize("error", [RunError("no place"), OSError("no place")], ids=["known", "unknown"])
    def test_an_engine_that_cannot_be_made_or_does_not_take_its_weights_is_tried_again(
        self, one: Pool, error: Exception
    ) -> None:
        one.failures.append(error)
        one.failures_of_restart.append(error)
        one.made[0].die()
        assert texts(one.submit(1)) == answers(1)
        assert one.restarts == [("make", 0), ("make", 0), ("restart", 0), ("make", 0), ("restart", 0)]
        assert one.made[1].is_killed


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_the_last_death_fails_all_who_wait_and_all_who_come(max_restarts: int) -> None:
    pool = Pool(1, max_restarts=max_restarts)
    for engine_number in range(max_restarts):
        pool.hold()
        futures = pool.submit(0, 1)
        pool.made[engine_number].die()
        assert texts(futures) == answers(0, 1)
    pool.made[-1].core.hold()
    late = pool.submit(2, 3)
    pool.made[-1].die()
    sentence = f"^engine 0 was lost during poll. That was one more than --max_restarts {max_restarts}; give the same"
    for future in (*late, *pool.submit(5)):
        with pytest.raises(RunError, match=sentence):
            future.result(TIMEOUT_S)
    assert num_in_flight(pool) == 0
    assert pool.restarts == [("make", 0), ("restart", 0)] * max_restarts
    eventually(lambda: len(pool.told_failures) == 1)
    pool.close()


class TestClose:
    def test_fails_who_waits_and_ends_the_engines(self, two: Pool) -> None:
        two.hold()
        futures = two.submit(*range(4))
        two.close()
        for future in (*futures, *two.submit(5)):
            with pytest.raises(RunError, match="shut down"):
                future.result(TIMEOUT_S)
        assert all(engine.is_killed for engine in two.made)
        assert not two.restarts

    def test_an_engine_puts_its_things_away_before_it_is_killed(self, two: Pool) -> None:
        two.close()
        assert all(engine.is_killed and engine.was_closed for engine in two.made)

    def test_one_that_hangs_is_killed_all_the_same(self) -> None:
        hanging = Pool(1)
        hanging.hold()
        hanging.submit(1)
        eventually(lambda: hanging.made[0].core.num_steps_begun)
        hanging.close()
        assert hanging.made[0].is_killed and not hanging.made[0].was_closed

    def test_during_a_restart_ends_the_new_engine_too(self, one: Pool) -> None:
        one.may_be_made.clear()
        one.made[0].die()
        eventually(lambda: one.restarts)
        one.close()
        eventually(lambda: len(one.made) == 2 and one.made[1].is_killed)
        assert one.restarts == [("make", 0)]


class TestCallAll:
    def test_calls_each_and_raises_what_one_raised(self, two: Pool) -> None:
        two.made[1].core.failures["start_update"] = RunError("engine 1 has no room")
        with pytest.raises(RunError, match=r"^engine 1 has no room$"):
            two.pool.call_all(TIMEOUT_S, Engine.begin_update, False)
        assert not two.made[0].engine._is_admitting
        two.pool.call_all(TIMEOUT_S, Engine.finish_update, 3)
        assert [engine.core.version for engine in two.made] == [3, 3]

    def test_gives_each_its_own(self, two: Pool) -> None:
        calls = two.pool.start_each(TIMEOUT_S, Engine.open_channel, [{"n": 0}, {"n": 1}])
        assert two.pool.results(calls) == [None, None]
        assert [engine.core.calls for engine in two.made] == [[("open_channel", {"n": n})] for n in range(2)]

    def test_who_is_silent(self, two: Pool) -> None:
        assert two.pool.silent() == set()
        assert len(two.pool.pids()) == 2
        two.may_be_made.clear()
        two.made[1].die()
        assert two.pool.silent() == {1}
        assert len(two.pool.pids()) == 1

    def test_fail_waiting_fails_what_is_out_and_nothing_later(self, two: Pool) -> None:
        two.hold()
        futures = two.submit(*range(4))
        two.pool.fail_waiting(RunError("the learners were lost"))
        for future in futures:
            with pytest.raises(RunError, match=r"^the learners were lost$"):
                future.result(TIMEOUT_S)
        for engine in two.made:
            assert engine.told[-1][0] == "cancel"
            engine.core.release()
        assert texts(two.submit(5, 6)) == answers(5, 6)
