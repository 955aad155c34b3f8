"""The engine's loop around a core: who gets which completion, and which weights made its tokens."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion
from open_instruct.generation.engine import Engine
from open_instruct.generation.requests import GenerationRequest
from tests.unit.fake_engine import (
    MAX_NUM_SEQS,
    MAX_PROMPT_LENGTH,
    SETTINGS,
    TIMEOUT_S,
    FakeCore,
    eventually,
    meanwhile,
    request,
    text_of,
)


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def engine(core: FakeCore) -> Iterator[Engine]:
    it = Engine(SETTINGS, make_core=lambda settings: core)
    yield it
    core.release()
    it.shutdown()


def poll_all(engine: Engine, num_keys: int) -> dict[int, Completion]:
    told: dict[int, Completion] = {}

    def all_are_told() -> bool:
        answers = engine.poll(0.01)
        assert not told.keys() & answers.keys()
        told.update({key: each for key, each in answers.items() if isinstance(each, Completion)})
        return len(told) >= num_keys

    eventually(all_are_told)
    return told


def generate(engine: Engine, *requests: GenerationRequest) -> list[Completion]:
    """The completions of requests that nobody else asks for meanwhile."""
    engine.begin(dict(enumerate(requests)))
    told = poll_all(engine, len(requests))
    return [told[key] for key in range(len(requests))]


@contextmanager
def held_after(
    engine: Engine, core: FakeCore, num_steps: int, *requests: GenerationRequest
) -> Iterator[None]:
    """Begin requests, by their numbers; inside the block the engine stands in its next step,
    `num_steps` done.
    """
    core.hold()
    engine.begin({request.seed: request for request in requests})
    core.allow(num_steps)
    eventually(lambda: core.num_steps_begun == num_steps + 1)
    yield
    core.release()


def update(engine: Engine, version: int, *, drain: bool = False) -> None:
    engine.begin_update(drain)
    engine.receive_weights()
    engine.finish_update(version)


class TestGenerate:
    def test_many_threads_ask_at_once_and_each_gets_its_own(self, engine: Engine) -> None:
        asked = {
            10 * c + i: request(10 * c + i, num_tokens=1 + (c + i) % 5)
            for c in range(64)
            for i in range(5)
        }

        def ask(caller: int) -> None:
            for key in range(10 * caller, 10 * caller + 5):
                engine.begin({key: asked[key]})

        with ThreadPoolExecutor(16) as callers:
            list(callers.map(ask, range(64), timeout=TIMEOUT_S))
        told = poll_all(engine, len(asked))
        assert {key: (it.text, len(it.token_ids)) for key, it in told.items()} == {
            key: (text_of(each), each.sampling.max_tokens) for key, each in asked.items()
        }
        assert not engine._running and not engine._waiting

    def test_never_more_at_once_than_the_engine_takes(self, engine: Engine, core: FakeCore) -> None:
        with held_after(engine, core, 1, *(request(key) for key in range(MAX_NUM_SEQS + 3))):
            assert (len(engine._running), len(engine._waiting)) == (MAX_NUM_SEQS, 3)
        poll_all(engine, MAX_NUM_SEQS + 3)
        assert max(call[1] for call in core.calls if call[0] == "step") == MAX_NUM_SEQS

    def test_request_that_cannot_be_is_refused_and_no_other(self, engine: Engine) -> None:
        too_long = request(1, prompt_length=MAX_PROMPT_LENGTH + 1)
        engine.begin({5: too_long, 6: request(6)})
        assert poll_all(engine, 1).keys() == {6}
        engine.begin({7: too_long})
        assert engine.poll(TIMEOUT_S) == {7: "the prompt is too long"}
        assert not engine.poll(0)


class TestPoll:
    def test_completion_that_ends_during_a_report_is_in_the_next(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ended = engine._store_outcomes

        def ended_after_a_poll(outcomes: Any) -> None:
            engine.poll(0)
            ended(outcomes)

        monkeypatch.setattr(engine, "_store_outcomes", ended_after_a_poll)
        engine.begin({1: request(1)})
        assert poll_all(engine, 1).keys() == {1}

    def test_waits_for_something_to_tell(self, engine: Engine, core: FakeCore) -> None:
        core.hold()
        engine.begin({1: request(1, num_tokens=1)})
        polled = meanwhile(engine.poll, TIMEOUT_S)
        assert not engine.poll(0)
        core.allow(1)
        assert polled.result(TIMEOUT_S).keys() == {1}


class TestCancel:
    def test_cancelling_a_running_request_aborts_it(self, engine: Engine, core: FakeCore) -> None:
        with held_after(engine, core, 1, *(request(key, num_tokens=10) for key in range(2))):
            engine.cancel([0])
        assert poll_all(engine, 1).keys() == {1}
        assert [call for call in core.calls if call[0] == "abort"] == [("abort", 0)]
        assert not engine.poll(0.02)

    def test_cancelling_a_waiting_request_never_begins_it(
        self, engine: Engine, core: FakeCore
    ) -> None:
        with held_after(engine, core, 0, *(request(key) for key in range(MAX_NUM_SEQS + 2))):
            engine.cancel([MAX_NUM_SEQS])
        assert poll_all(engine, MAX_NUM_SEQS + 1).keys() == {*range(MAX_NUM_SEQS), MAX_NUM_SEQS + 1}
        assert len([call for call in core.calls if call[0] == "add"]) == MAX_NUM_SEQS + 1

    def test_cancelling_a_finished_request_reports_nothing(self, engine: Engine) -> None:
        engine.begin({1: request(1)})
        eventually(lambda: engine._outcomes)
        engine.cancel([1])
        assert not engine.poll(0.02)

    def test_cancelling_the_last_request_ends_a_drain(self, engine: Engine, core: FakeCore) -> None:
        with held_after(engine, core, 1, request(1, num_tokens=50)):
            updating = meanwhile(engine.begin_update, True)
            engine.cancel([1])
        updating.result(TIMEOUT_S)
        assert not engine._is_admitting


class TestUpdate:
    @pytest.mark.parametrize(("drain", "num_old"), [(False, 4), (True, 9)])
    def test_tokens_switch_version_exactly_at_it(
        self, engine: Engine, core: FakeCore, drain: bool, num_old: int
    ) -> None:
        """The fourth token is on its way when the update is asked for; a drain finishes what runs
        first.
        """
        with held_after(engine, core, 3, request(1, num_tokens=9), request(2, num_tokens=10)):
            updating = meanwhile(partial(update, engine, 4, drain=drain))
        updating.result(TIMEOUT_S)
        assert core.version == 4
        assert poll_all(engine, 2)[1].versions == (0,) * num_old + (4,) * (9 - num_old)
        names = [call[0] for call in core.calls]
        first = names.index("start_update")
        assert names[first : first + 4] == [
            "start_update",
            "receive_weights",
            "finish_update",
            "weights_changed",
        ]

    def test_engine_takes_in_async_steps_before_new_weights(
        self, engine: Engine, core: FakeCore
    ) -> None:
        """A step that vLLM has scheduled ahead is of the old weights, and is told as such."""
        core.is_ahead = True
        with held_after(engine, core, 1, request(1, num_tokens=2), request(2, num_tokens=9)):
            beginning = meanwhile(engine.begin_update, False)
        beginning.result(TIMEOUT_S)
        assert poll_all(engine, 1)[1].versions == (0, 0)
        names = [call[0] for call in core.calls]
        assert names.index("start_update") == names.index("settle") + 1
        engine.receive_weights()
        engine.finish_update(1)
        assert poll_all(engine, 1)[2].versions == (0,) * 2 + (1,) * 7

    def test_completions_have_one_version_when_engines_drain(
        self, engine: Engine, core: FakeCore
    ) -> None:
        for version in range(1, 6):
            engine.begin(
                {
                    number: request(number, num_tokens=7)
                    for number in range(40 * version - 40, 40 * version)
                }
            )
            update(engine, version, drain=True)
        seen = {completion.versions for completion in poll_all(engine, 200).values()}
        assert all(len(set(versions)) == 1 for versions in seen)
        assert len(seen) > 1

    @pytest.mark.parametrize("drain", [False, True])
    def test_requests_that_come_meanwhile_wait(
        self, engine: Engine, core: FakeCore, drain: bool
    ) -> None:
        engine.begin_update(drain)
        engine.begin({1: request(1)})
        assert not engine.poll(0.05)
        assert (engine._is_admitting, len(engine._waiting), len(engine._running)) == (False, 1, 0)
        engine.receive_weights()
        assert not engine.poll(0.05)
        engine.finish_update(2)
        assert poll_all(engine, 1)[1].versions == (2, 2, 2)

    def test_memory_given_up_between_steps_is_taken_again_with_the_next_weights(
        self, engine: Engine, core: FakeCore
    ) -> None:
        core.hold()
        engine.begin({0: request(0, num_tokens=3)})
        eventually(lambda: core.num_steps_begun == 1)
        released = meanwhile(engine.release_memory, False)
        eventually(lambda: engine._calls)
        core.release()
        released.result(TIMEOUT_S)
        num_steps = core.num_steps_begun
        engine.begin({1: request(1, num_tokens=2)})  # waits
        engine.release_memory(True)  # nothing more to give up, and nothing that could be finished
        engine.open_channel({})
        engine.begin_update(True)
        assert core.num_steps_begun == num_steps
        engine.receive_weights()
        engine.finish_update(4)
        told = poll_all(engine, 2)
        assert told[0].versions == (0, 4, 4) and told[1].versions == (4, 4)
        parts = [call for call in core.calls if call[0] in ("release_memory", "take_memory")]
        assert parts == [
            ("release_memory",),
            ("take_memory", "weights"),
            ("take_memory", "kv_cache"),
        ]

    def test_weights_that_did_not_come_may_come_again(self, engine: Engine, core: FakeCore) -> None:
        core.failures["receive_weights"] = RunError("learner 0 failed")
        with held_after(engine, core, 1, request(1, num_tokens=4)):
            beginning = meanwhile(engine.begin_update, False)
        beginning.result(TIMEOUT_S)
        with pytest.raises(RunError, match=r"^learner 0 failed$"):
            engine.receive_weights()
        assert not engine.poll(0.05)  # nothing is made with half of the new weights
        engine.open_channel({"port": 1})
        update(engine, 6)
        assert poll_all(engine, 1)[1].versions == (0, 0, 6, 6)

    def test_channel_is_opened_at_the_workers(self, engine: Engine, core: FakeCore) -> None:
        engine.open_channel({"port": 1})
        assert core.calls == [("open_channel", {"port": 1})]


class TestFailure:
    @pytest.mark.parametrize("error", [OSError("no memory"), SystemExit(3)], ids=["error", "exit"])
    def test_failure_of_a_step_fails_waiting_and_later_requests(
        self, engine: Engine, core: FakeCore, error: BaseException
    ) -> None:
        core.hold()
        generating = meanwhile(
            generate, engine, *(request(number) for number in range(MAX_NUM_SEQS + 2))
        )
        eventually(lambda: core.num_steps_begun == 1)
        polling = meanwhile(engine.poll, TIMEOUT_S)
        draining = meanwhile(engine.begin_update, True)
        core.failures["step"] = error
        core.allow(1)
        sentence = f"^the engine failed: {type(error).__name__}: {error}$"
        for future in (generating, polling, draining):
            with pytest.raises(RunError, match=sentence):
                future.result(TIMEOUT_S)
        for call in (
            lambda: engine.begin({1: request(1)}),
            lambda: engine.poll(TIMEOUT_S),
            lambda: engine.begin_update(False),
            engine.receive_weights,
            engine.pid,
        ):
            with pytest.raises(RunError, match=sentence):
                call()
        eventually(lambda: core.is_closed)

    def test_failure_to_begin_a_request_ends_the_engine(
        self, engine: Engine, core: FakeCore
    ) -> None:
        core.failures["add"] = OSError("no memory")
        with pytest.raises(RunError, match="the engine failed: OSError: no memory"):
            generate(engine, request(1), request(2))

    def test_failure_of_a_control_call_reaches_its_caller(
        self, engine: Engine, core: FakeCore
    ) -> None:
        core.failures["receive_weights"] = SystemExit(3)
        receiving = meanwhile(engine.receive_weights)
        with pytest.raises(RunError, match="SystemExit"):
            receiving.result(TIMEOUT_S)
        with pytest.raises(RunError, match="SystemExit"):
            engine.pid()

    def test_failure_of_the_construction_is_raised_as_it_is(self) -> None:
        def broken(settings: object) -> FakeCore:
            raise OSError("no such model")

        with pytest.raises(OSError, match="no such model"):
            Engine(SETTINGS, make_core=broken)


class TestShutdown:
    def test_fails_who_waits_and_closes_the_core(self, engine: Engine, core: FakeCore) -> None:
        core.hold()
        generating = meanwhile(
            generate, engine, *(request(number) for number in range(MAX_NUM_SEQS + 2))
        )
        eventually(lambda: core.num_steps_begun == 1)
        ending = meanwhile(engine.shutdown)
        core.release()
        ending.result(TIMEOUT_S)
        for call in (generating.result, lambda: generate(engine, request(1))):
            with pytest.raises(RunError, match="shut down"):
                call()
        assert core.is_closed
        engine.shutdown()


class TestHealth:
    def test_step_that_lasts_too_long_is_a_failure(self, core: FakeCore) -> None:
        hasty = FleetSection(engine_timeout_s=0.05)  # type: ignore[arg-type]
        engine = Engine(replace(SETTINGS, fleet=hasty), make_core=lambda settings: core)
        time.sleep(0.1)
        assert engine.poll(0) == {}  # none is under way
        core.hold()
        engine.begin({1: request(1)})
        eventually(lambda: core.num_steps_begun == 1)
        time.sleep(0.1)
        with pytest.raises(RunError, match="in one step for"):
            engine.poll(0)
        core.release()
        engine.shutdown()
