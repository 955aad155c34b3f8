"""Engines as one: every request is answered once, whatever becomes of the engine that it was
with.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion
from open_instruct.generation import engine_pool
from open_instruct.generation.engine import Engine
from open_instruct.generation.engine_pool import EnginePool
from open_instruct.generation.requests import Home
from open_instruct.run.alarms import find_slowest
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
    """A pool with its engines: `made` has every engine there was, in the order in which they were
    made.

    Attributes:
        restarts: what was done to bring engines back, in order, as ("make" or "restart", index).
        hooks: called in turn before an engine is made, or gets its weights, anew; they may wait, or
            raise.
    """

    def __init__(
        self, num_engines: int, *, max_restarts: int = 3, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.fleet = FleetSection(engine_timeout_s=timeout_s, max_restarts=max_restarts)  # type: ignore[arg-type]
        self.made = [
            InProcessEngine(f"engine {index}", fleet=self.fleet) for index in range(num_engines)
        ]
        self.restarts: list[tuple[str, int]] = []
        self.hooks: dict[str, list[Callable[[], Any]]] = {"make": [], "restart": []}
        self.said: list[str] = []
        self.failures: list[RunError] = []
        self.pool = EnginePool(
            list(self.made),
            make_engine=self._make,
            on_restart=lambda index: self._note("restart", index),
            on_failure=self.failures.append,
            fleet=self.fleet,
            say=self.said.append,
        )

    def hold(self) -> None:
        for engine in self.made:
            engine.core.hold()

    def submit(self, *numbers: int, num_tokens: int = 3) -> list[Future[Completion]]:
        return [self.pool.submit(request(number, num_tokens=num_tokens)) for number in numbers]

    def gate(self, what: str) -> threading.Event:
        """The next engine waits before `what` until this is set."""
        gate = threading.Event()
        self.hooks[what].append(lambda: gate.wait(TIMEOUT_S))
        return gate

    def num_in_flight(self) -> int:
        return len(self.pool._unsent) + sum(len(member.requests) for member in self.pool._members)

    def _make(self, index: int) -> InProcessEngine:
        self._note("make", index)
        self.made.append(InProcessEngine(f"engine {index}", fleet=self.fleet))
        return self.made[-1]

    def _note(self, what: str, index: int) -> None:
        self.restarts.append((what, index))
        if self.hooks[what]:
            self.hooks[what].pop(0)()


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tests leave engines that hang."""
    monkeypatch.setattr(engine_pool, "END_TIMEOUT_S", 0.5)


@pytest.fixture
def pool_of() -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make(num_engines: int, **settings: Any) -> Pool:
        pools.append(Pool(num_engines, **settings))
        return pools[-1]

    yield make
    for each in pools:
        each.pool.close()


@pytest.fixture
def one(pool_of: Callable[..., Pool]) -> Pool:
    return pool_of(1)


@pytest.fixture
def two(pool_of: Callable[..., Pool]) -> Pool:
    return pool_of(2)


def texts(futures: list[Future[Completion]]) -> list[str]:
    return [future.result(TIMEOUT_S).text for future in futures]


def answers(*numbers: int) -> list[str]:
    return [text_of(request(number)) for number in numbers]


def assert_all_fail(futures: list[Future[Completion]], sentence: str) -> None:
    for future in futures:
        with pytest.raises(RunError, match=sentence):
            future.result(TIMEOUT_S)


def test_slow_engine_is_known_by_its_own_requests(two: Pool) -> None:
    step = two.made[1].core.step

    def slowed() -> Any:
        time.sleep(0.03)
        return step()

    two.made[1].core.step = slowed
    assert two.pool.paces() == [None, None]
    texts(two.submit(*range(48)))
    row = find_slowest("engine", two.pool.paces())
    assert row["slowest_engine"] == 1 and row["slowest_engine/times"] > 1.5


class TestRequests:
    def test_requests_of_an_episode_go_to_its_engine_unless_it_is_busier(self, two: Pool) -> None:
        two.hold()
        home = Home()
        two.submit(0)  # so that the other engine is the idlest
        two.pool.submit(request(1, num_tokens=1), home)
        assert home.engine == 1
        two.pool.submit(request(2, num_tokens=1), home)
        assert home.engine == 1 and [len(engine.requests) for engine in two.made] == [1, 2]
        for number in range(3, 10):
            two.pool.submit(request(number), Home(engine=1))
        # 7 are more than twice 1 and 4; 8 are not more than twice 2 and 4.
        assert [len(engine.requests) for engine in two.made] == [2, 8]

    def test_requests_of_an_episode_move_when_its_engine_is_lost(self, two: Pool) -> None:
        gate = two.gate("make")
        home = Home(engine=1)
        two.made[1].kill()
        eventually(lambda: two.restarts)
        assert two.pool.submit(request(1), home).result(TIMEOUT_S).text == text_of(request(1))
        assert home.engine == 0
        gate.set()

    def test_go_to_the_least_busy(self, two: Pool) -> None:
        two.hold()
        futures = two.submit(*range(6), num_tokens=1)
        assert [len(engine.requests) for engine in two.made] == [3, 3]
        two.made[1].core.release()
        texts(futures[1::2])
        eventually(lambda: two.num_in_flight() == 3)
        two.submit(6, 7, num_tokens=1)
        assert [len(engine.requests) for engine in two.made] == [3, 5]

    def test_impossible_request_fails_alone(self, one: Pool) -> None:
        refused = one.pool.submit(request(1, prompt_length=MAX_PROMPT_LENGTH + 1))
        assert_all_fail([refused], "request 1/0 cannot be generated: the prompt is too long")
        assert texts(one.submit(2, 2)) == answers(2, 2)

    def test_callback_of_an_answer_may_ask_again(self, one: Pool) -> None:
        second: Future[Future[Completion]] = Future()
        one.submit(1)[0].add_done_callback(lambda _: second.set_result(one.submit(2)[0]))
        assert texts([second.result(TIMEOUT_S)]) == answers(2)


class TestCancel:
    def test_reaches_the_engine(self, one: Pool) -> None:
        one.hold()
        futures = one.submit(*range(3))
        assert futures[1].cancel()
        assert one.num_in_flight() == 2
        (engine,) = one.made
        assert [args for method, args in engine.told if method == "cancel"] == [([1],)]
        engine.core.release()
        assert texts([futures[0], futures[2]]) == answers(0, 2)

    def test_is_not_asked_again_after_a_death(self, one: Pool) -> None:
        one.hold()
        may_be_made = one.gate("make")
        futures = one.submit(0, 1)
        one.made[0].die()
        eventually(lambda: one.restarts)
        assert futures[0].cancel()
        may_be_made.set()
        assert texts(futures[1:]) == answers(1)
        assert one.made[1].requests == [request(1)]
        with pytest.raises(CancelledError):
            futures[0].result()


class TestDeath:
    def test_everything_is_asked_again_once_the_engine_has_its_weights(self, one: Pool) -> None:
        one.hold()
        may_get_weights = one.gate("restart")
        futures = one.submit(*range(MAX_NUM_SEQS + 3))
        one.made[0].die()
        eventually(lambda: ("restart", 0) in one.restarts)
        late = one.submit(50)
        assert one.made[0].is_killed
        assert not one.made[1].requests
        may_get_weights.set()
        assert texts(futures + late) == answers(*range(MAX_NUM_SEQS + 3), 50)
        assert one.restarts == [("make", 0), ("restart", 0)]
        assert one.said == ["engine 0 was lost during poll; starting it again (1 of 3 restarts)"]

    def test_other_engine_goes_on_meanwhile(self, two: Pool) -> None:
        two.hold()
        may_be_made = two.gate("make")
        futures = two.submit(*range(6))
        lost, other = two.made
        lost.die()
        other.core.release()
        assert texts(futures + two.submit(7, 8)) == answers(*range(6), 7, 8)
        assert {asked.seed for asked in other.requests} == {*range(6), 7, 8}
        may_be_made.set()
        eventually(lambda: ("restart", 0) in two.restarts)
        eventually(lambda: texts(two.submit(9, 10)) == answers(9, 10) and two.made[2].requests)

    def test_engine_that_fails_or_answers_nonsense_is_started_again(self, one: Pool) -> None:
        one.made[0].core.failures["step"] = OSError("out of memory")
        assert texts(one.submit(1)) == answers(1)
        one.made[1].core.hold()
        one.made[1].engine.poll = lambda wait_s: 3
        assert texts(one.submit(2)) == answers(2)
        assert "the engine failed: OSError: out of memory" in one.said[0]
        assert one.said[1].startswith("engine 0 could not be asked")

    def test_engine_that_hangs_in_a_step_is_started_again_and_an_idle_one_is_not(
        self, pool_of: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine_pool, "POLL_WAIT_S", 0.2)
        pool = pool_of(1, timeout_s=0.2)
        eventually(lambda: pool.made[0].asked.count("poll") > 3)
        assert not pool.restarts
        pool.hold()
        assert texts(pool.submit(1)) == answers(1)
        assert "has been in one step for" in pool.said[0]
        assert pool.made[0].is_killed

    def test_none_is_lost_and_none_answered_twice_while_engines_die(
        self, pool_of: Callable[..., Pool]
    ) -> None:
        dying = pool_of(2, max_restarts=100)
        answered: list[Future[Completion]] = []
        futures = []
        for number in range(200):
            futures += dying.submit(number, num_tokens=2)
            futures[-1].add_done_callback(answered.append)
            if number % 20 == 10:
                for engine in dying.made[-2:]:
                    engine.die()
        assert texts(futures) == answers(*range(200))
        assert len(answered) == 200
        assert dying.num_in_flight() == 0

    @pytest.mark.parametrize(
        "error", [RunError("no place"), OSError("no place")], ids=["known", "unknown"]
    )
    def test_engine_that_cannot_be_made_or_does_not_take_its_weights_is_tried_again(
        self, one: Pool, error: Exception
    ) -> None:
        def fail() -> None:
            raise error

        for hooks in one.hooks.values():
            hooks.append(fail)
        one.made[0].die()
        assert texts(one.submit(1)) == answers(1)
        assert one.restarts == [
            ("make", 0),
            ("make", 0),
            ("restart", 0),
            ("make", 0),
            ("restart", 0),
        ]
        assert one.made[1].is_killed

    @pytest.mark.parametrize("max_restarts", [0, 1])
    def test_last_one_fails_all_who_wait_and_all_who_come(
        self, pool_of: Callable[..., Pool], max_restarts: int
    ) -> None:
        pool = pool_of(1, max_restarts=max_restarts)
        for _ in range(max_restarts):
            futures = pool.submit(0, 1)
            pool.made[-1].die()
            assert texts(futures) == answers(0, 1)
        pool.made[-1].core.hold()
        late = pool.submit(2, 3)
        pool.made[-1].die()
        sentence = (
            "^engine 0 was lost during poll. That was one more than --max_restarts "
            f"{max_restarts}; give the same"
        )
        assert_all_fail([*late, *pool.submit(5)], sentence)
        assert pool.num_in_flight() == 0
        assert pool.restarts == [("make", 0), ("restart", 0)] * max_restarts
        eventually(lambda: len(pool.failures) == 1)


class TestClose:
    def test_fails_who_waits_and_ends_the_engines(self, two: Pool) -> None:
        two.hold()
        futures = two.submit(*range(4))
        eventually(lambda: two.made[0].core.num_steps_begun and two.made[1].core.num_steps_begun)
        two.pool.close()
        assert_all_fail([*futures, *two.submit(5)], "shut down")
        assert all(engine.is_killed and not engine.was_closed for engine in two.made)  # they hang
        assert not two.restarts

    def test_engine_puts_its_things_away_before_it_is_killed(self, two: Pool) -> None:
        two.pool.close()
        assert all(engine.is_killed and engine.was_closed for engine in two.made)

    def test_during_a_restart_ends_the_new_engine_too(self, one: Pool) -> None:
        may_be_made = one.gate("make")
        one.made[0].die()
        eventually(lambda: one.restarts)
        one.pool.close()
        may_be_made.set()
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
        assert [engine.core.calls for engine in two.made] == [
            [("open_channel", {"n": n})] for n in range(2)
        ]

    def test_silent_engines_are_named(self, two: Pool) -> None:
        assert two.pool.find_silent() == set()
        assert len(two.pool.pids()) == 2
        may_be_made = two.gate("make")
        two.made[1].die()
        assert two.pool.find_silent() == {1}
        assert len(two.pool.pids()) == 1
        may_be_made.set()

    def test_fail_waiting_fails_what_is_out_and_nothing_later(self, two: Pool) -> None:
        two.hold()
        futures = two.submit(*range(4))
        two.pool.fail_waiting(RunError("the learners were lost"))
        assert_all_fail(futures, "^the learners were lost$")
        for engine in two.made:
            assert engine.told[-1][0] == "cancel"
            engine.core.release()
        assert texts(two.submit(5, 6)) == answers(5, 6)
