"""Weights to the engines: in which order, and what becomes of it when an engine or a learner dies
on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, cast

import pytest

from open_instruct.cluster.learner_call import LearnerLost
from open_instruct.cluster.learner_group import LearnerGroup, LearnerProcess
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.errors import RunError
from open_instruct.generation.engine_pool import EnginePool
from open_instruct.generation.requests import Home
from open_instruct.rl import publisher as publisher_module
from open_instruct.rl.publisher import WeightPublisher
from tests.unit.fake_engine import (
    TIMEOUT_S,
    InProcessEngine,
    eventually,
    meanwhile,
    request,
)

SEND = "broadcast_to_vllm"
DENSE = {"port": 7, "backend": "shm", "changes_alone": False}
DELTA = {"port": 7, "backend": "gloo", "changes_alone": True}
FILES = {"backend": "files", "changes_alone": True}


class FakeLearners:
    """Learners that do what they are told at once.

    `effects`, by method: what happens at its next calls.
    """

    def __init__(self, number: int, calls: list[tuple[Any, ...]], channel: dict[str, Any]) -> None:
        self.number = number
        self.calls = calls
        self.channel = channel
        self.effects: dict[str, list[Callable[[], None]]] = {}

    def __len__(self) -> int:
        return self.number

    def start(self, method: Callable[..., Any], *args: Any) -> FakeLearners:
        self.calls.append((method.__name__, *args))
        effects = self.effects.get(method.__name__)
        self._effect = effects.pop(0) if effects else (lambda: None)
        return self

    def result(self, timeout_s: float) -> list[Any]:
        self._effect()
        return [self.channel]


class Stage:
    """A publisher between fake learners and a real pool of engines without models.

    Attributes:
        calls: of learners and of the first engines' cores, in order.
        made: every engine there was.
        abandoned: set when the learners were told not to wait any longer.
    """

    def __init__(
        self,
        num_engines: int,
        *,
        max_restarts: int = 3,
        drain: bool = False,
        tensor_size: int = 1,
        channel: dict[str, Any] = DENSE,
        placement: Literal["split", "shared", "mixed"] = "split",
        num_learners: int | None = None,
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.takes_turns = placement != "split"
        self.learners = FakeLearners(num_learners or num_engines * tensor_size, self.calls, channel)
        self.made = [InProcessEngine(f"engine {index}") for index in range(num_engines)]
        for engine in self.made:
            engine.core.calls = self.calls
        self.failing_restarts: list[Callable[[InProcessEngine], None]] = []
        self.abandoned = threading.Event()
        self.may_be_made = threading.Event()
        self.may_be_made.set()
        fleet = FleetSection(
            max_restarts=max_restarts,
            engine_timeout_s=int(TIMEOUT_S),
            weight_sync_timeout_s=int(TIMEOUT_S),
            vllm_tensor_parallel_size=tensor_size,
            placement=placement,
        )
        self.publisher = WeightPublisher(
            cast(LearnerGroup[LearnerProcess], self.learners), fleet, drain=drain
        )
        self.pool = EnginePool(
            list(self.made),
            make_engine=self._make,
            on_restart=self.publisher.handle_engine_restart,
            on_failure=self.publisher.handle_engine_failure,
            fleet=fleet,
            say=lambda text: None,
        )
        self.publisher.engines = self.pool
        self._threads = ThreadPoolExecutor(4)

    def publish(self, version: int) -> float:
        """With a time limit: a deadlock fails the test and holds nothing up."""
        return self._threads.submit(self._publish, version).result(TIMEOUT_S)

    def _publish(self, version: int) -> float:
        with self.publisher.learners_at_work():  # as the driver does it
            return self.publisher.publish(version)

    def generates(self) -> tuple[int, ...]:
        """The versions of a completion's tokens."""
        return self.pool.submit(request(1)).result(TIMEOUT_S).versions

    def generates_on(self, index: int) -> tuple[int, ...]:
        """The same, of the engine of this index."""
        completion = self.pool.submit(request(1), Home(engine=index))
        return completion.result(TIMEOUT_S).versions

    def _make(self, index: int) -> InProcessEngine:
        assert self.may_be_made.wait(TIMEOUT_S)
        with self.publisher.engine_start():
            if self.takes_turns:
                self.calls.append(("engine starts",))
            engine = InProcessEngine(f"engine {index}")
        if self.failing_restarts:
            self.failing_restarts.pop(0)(engine)
        self.made.append(engine)
        return engine

    @property
    def versions(self) -> list[int]:
        return [engine.core.version for engine in self.made if not engine.is_killed]

    def names(self) -> list[str]:
        return [call[0] for call in self.calls if call[0] not in ("add", "step")]


@contextmanager
def stage(num_engines: int, **settings: Any) -> Iterator[Stage]:
    it = Stage(num_engines, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher_module, "abandon", lambda info, reason: it.abandoned.set())
        yield it
    it.may_be_made.set()
    it.pool.close()


def dies_in(engine: InProcessEngine, method: str) -> None:
    """It will be lost when its workers are to run `method`, without a word, and as often as it is
    asked.
    """
    call_workers = engine.core.call_workers

    def dying(called: Callable[..., None], *args: Any) -> list[bool]:
        answers = call_workers(called, *args)
        if called.__name__ == method:
            engine.die()
            threading.Event().wait(TIMEOUT_S)
        return answers

    engine.core.call_workers = dying  # type: ignore[method-assign]


def hangs_in(engine: InProcessEngine, method: str, *, until: threading.Event) -> None:
    """As an engine does that waits for a learner."""
    call_workers = engine.core.call_workers

    def hanging(called: Callable[..., None], *args: Any) -> list[bool]:
        assert called.__name__ != method or until.wait(TIMEOUT_S)
        return call_workers(called, *args)

    engine.core.call_workers = hanging  # type: ignore[method-assign]


def raises(error: Exception) -> Callable[[], None]:
    def effect() -> None:
        raise error

    return effect


def wait_until_abandoned(it: Stage) -> Callable[[], None]:
    def effect() -> None:
        assert it.abandoned.wait(TIMEOUT_S)
        it.abandoned.clear()
        raise RunError("weight sync: an engine was lost")

    return effect


class TestPublish:
    def test_order_of_calls(self) -> None:
        with stage(1) as it:
            it.publish(1)
            assert it.names() == [
                *(
                    "open_weight_channel",
                    "join_weight_channel",
                    "open_channel",
                    "settle",
                    "start_update",
                ),
                *(SEND, "receive_weights", "finish_update", "weights_changed"),
            ]
            assert it.publisher.version == 1
            assert it.generates() == (1, 1, 1)

    def test_engine_stops_for_changes_once_it_has_them_from_the_first_version_on(self) -> None:
        with stage(1, channel=DELTA) as it:
            for version in (1, 2):
                it.calls.clear()
                it.publish(version)
                connecting = (
                    ["open_weight_channel", "join_weight_channel", "open_channel"]
                    if version == 1
                    else []
                )
                assert it.names() == [
                    *(*connecting, SEND, "start_staging", "has_staged", "settle", "start_update"),
                    *("receive_weights", "finish_update", "weights_changed"),
                ]
                assert it.generates() == (version,) * 3

    def test_channel_is_kept(self) -> None:
        with stage(2) as it:
            it.publish(1)
            it.calls.clear()
            it.publish(2)
            assert "open_weight_channel" not in it.names()
            assert (SEND, 2) in it.calls
            assert it.versions == [2, 2]

    def test_new_learners_need_a_new_channel(self) -> None:
        with stage(1) as it:
            it.publish(1)
            it.publisher.handle_learner_restart()
            assert it.publisher.version is None
            it.calls.clear()
            it.publish(0)
            assert "open_weight_channel" in it.names()
            assert it.versions == [0]

    def test_each_worker_of_each_engine_has_a_place(self) -> None:
        with stage(3, tensor_size=2) as it:
            it.publish(1)
            assert ("open_weight_channel", 6) in it.calls
            infos = [call[1] for call in it.calls if call[0] == "open_channel"]
            # The receiver makes the place of a worker of the engine's index.
            assert sorted(info["receiver_index"] for info in infos) == [0, 1, 2]

    @pytest.mark.parametrize("drain", [False, True])
    def test_drain_decides_what_becomes_of_running_completions(self, drain: bool) -> None:
        with stage(1, drain=drain) as it:
            it.publish(0)  # opens the channel
            core = it.made[0].core
            core.hold()
            future = it.pool.submit(request(1, num_tokens=6))
            core.allow(2)
            eventually(lambda: core.num_steps_begun == 3)
            publishing = it._threads.submit(it._publish, 1)
            eventually(lambda: it.made[0].engine._calls)
            core.release()
            publishing.result(TIMEOUT_S)
            assert future.result(TIMEOUT_S).versions == ((0,) * 6 if drain else (0, 0, 0, 1, 1, 1))


class TestThroughAFolder:
    """Nobody is sent anything: engines read what is there, and only then stop for it."""

    STAGED = (SEND, "start_staging", "has_staged")
    PUT = ("receive_weights", "finish_update", "weights_changed")

    def test_order_of_calls(self) -> None:
        with stage(1, channel=FILES) as it:
            it.publish(1)
            opening = ("open_weight_channel", "join_weight_channel", "open_channel")
            assert it.names() == [*opening, *self.STAGED, "settle", "start_update", *self.PUT]
            it.calls.clear()
            it.publish(2)
            assert it.names() == [*self.STAGED, "settle", "start_update", *self.PUT]
            assert (SEND, 2) in it.calls and ("start_staging", 2) in it.calls

    def test_no_engine_reads_what_learners_are_about_to_write(self) -> None:
        with stage(1, channel=FILES) as it:
            it.publish(1)
            it.calls.clear()
            it.learners.effects[SEND] = [lambda: it.calls.append(("written",))]
            it.publish(2)
            assert it.names().index("written") < it.names().index("start_staging")

    def test_new_engine_reads_the_chain_that_is_there(self) -> None:
        with stage(2, channel=FILES) as it:
            it.publish(1)
            it.calls.clear()
            it.made[0].die()
            eventually(lambda: len(it.made) == 3 and not it.publisher._new_engines)
            assert "open_weight_channel" not in it.names()
            # The other one generates meanwhile.
            assert it.names().index("has_staged") < it.names().index("start_update")
            assert it.versions == [1, 1] and not it.abandoned.is_set()

    @pytest.mark.parametrize("method", ["start_staging", "has_staged", "receive_weights"])
    @pytest.mark.parametrize("is_killed", [True, False])
    def test_engine_that_cannot_read_has_everything_written_anew(
        self, method: str, is_killed: bool
    ) -> None:
        with stage(2, channel=FILES) as it:
            it.publish(1)
            it.calls.clear()
            if is_killed:
                dies_in(it.made[0], method)
            else:
                it.made[0].core.failures[method] = RunError(
                    "weight sync: receiver 0 could not read version 2"
                )
            it.publish(2)
            assert "open_weight_channel" in it.names()
            assert it.versions == [2, 2] and not it.abandoned.is_set()
            it.calls.clear()
            it.publish(3)
            assert "open_weight_channel" not in it.names() and it.versions == [3, 3]


class TestEngineDies:
    @pytest.mark.parametrize(
        ("is_delta", "method"),
        [
            *(
                (False, method)
                for method in ("start_update", "open_channel", "receive_weights", "finish_update")
            ),
            *(
                (True, method)
                for method in ("start_staging", "has_staged", "start_update", "receive_weights")
            ),
        ],
    )
    def test_during_a_sync_everything_is_sent_again(self, is_delta: bool, method: str) -> None:
        with stage(2, channel=DELTA if is_delta else DENSE) as it:
            lost, other = it.made
            dies_in(lost, method)
            waits_in = {
                "open_channel": "join_weight_channel",
                "start_staging": SEND,
                "has_staged": SEND,
            }
            if not is_delta:
                waits_in["receive_weights"] = SEND
            if method in waits_in:
                it.learners.effects[waits_in[method]] = [wait_until_abandoned(it)]
            it.publish(1)
            eventually(lambda: it.publisher.version == 1 and not it.publisher._new_engines)
            eventually(lambda: len(it.made) == 3)
            assert other.core.version == it.made[2].core.version == 1
            assert {it.generates() for _ in range(8)} == {(1, 1, 1)}

    def test_engine_that_joins_between_syncs_gets_the_weights(self) -> None:
        with stage(1) as it:
            it.publish(1)
            it.calls.clear()
            it.made[0].die()
            assert it.generates() == (1, 1, 1)
            assert it.names() == ["open_weight_channel", "join_weight_channel", SEND]

    def test_while_the_learners_work_it_waits_for_them(self) -> None:
        with stage(1) as it:
            with it.publisher.learners_at_work():
                it.made[0].die()
                eventually(lambda: len(it.made) == 2)
                future = it.pool.submit(request(1))
                assert SEND not in it.names()
                assert not it.made[1].requests
            assert future.result(TIMEOUT_S).versions == (0, 0, 0)
            assert it.calls[-1] == (SEND, 0)

    def test_two_at_once_cost_two_restarts(self) -> None:
        with stage(2, max_restarts=2) as it:
            it.publish(1)
            it.may_be_made.clear()
            for engine in it.made:
                engine.die()
            eventually(lambda: all(engine.is_killed for engine in it.made))
            it.may_be_made.set()
            assert {it.generates() for _ in range(8)} == {(1, 1, 1)}
            eventually(lambda: it.versions == [1, 1])
            assert len(it.made) == 4

    def test_again_before_it_had_its_weights(self) -> None:
        with stage(1) as it:
            it.failing_restarts = [lambda engine: dies_in(engine, "receive_weights")]
            it.learners.effects[SEND] = [wait_until_abandoned(it)]
            it.made[0].die()
            assert it.generates() == (0, 0, 0)
            assert len(it.made) == 3

    def test_failure_of_every_attempt_ends_the_sync(self) -> None:
        with stage(1, max_restarts=1) as it:
            dies_in(it.made[0], "start_update")
            it.failing_restarts = [lambda engine: dies_in(engine, "start_update")] * 2
            with pytest.raises(RunError, match="--max_restarts 1"):
                it.publish(1)
            with pytest.raises(RunError, match="--max_restarts 1"):
                it.generates()

    def test_failure_of_an_unannounced_engine_ends_the_sync(self) -> None:
        """The sync dies of an engine that the pool has made and not yet reported, which is then
        reported dead.
        """
        with stage(1, max_restarts=1) as it:
            dies_in(it.made[0], "start_update")
            it.failing_restarts = [lambda engine: dies_in(engine, "start_update")]
            asked, silent = [0], it.pool.find_silent

            def late() -> set[int]:
                asked[0] += 1
                if asked[0] == 1:
                    eventually(
                        lambda: len(it.made) == 2 and it.pool._members[0].handle is it.made[1]
                    )
                return silent()

            it.pool.find_silent = late  # type: ignore[method-assign]
            with pytest.raises(RunError, match="--max_restarts 1"):
                it.publish(1)

    @pytest.mark.parametrize("method", ["start_update", "receive_weights", "finish_update"])
    def test_last_failure_ends_the_sync_with_the_error_of_the_pool(self, method: str) -> None:
        """Nobody waits for an engine that is not started again: it was lost before this sync, and
        is lost within it.
        """
        with stage(2, max_restarts=1) as it:
            it.publish(1)
            it.made[0].die()
            eventually(lambda: len(it.made) == 3 and not it.publisher._new_engines)
            dies_in(it.made[2], method)
            if method == "receive_weights":
                it.learners.effects[SEND] = [wait_until_abandoned(it)]
            with pytest.raises(
                RunError, match=r"^engine 0 was lost during .* one more than --max_restarts 1; give"
            ):
                it.publish(2)

    def test_last_failure_ends_the_sync_while_another_is_waited_for(self) -> None:
        """The one that is waited for is still being made when the pool gives up because of the
        other.
        """
        with stage(2, max_restarts=1) as it:
            it.may_be_made.clear()
            dies_in(it.made[0], "finish_update")
            publishing = it._threads.submit(it._publish, 1)
            eventually(lambda: it.made[0].is_killed)
            it.made[1].die()
            with pytest.raises(
                RunError, match=r"^engine 1 was lost during .* one more than --max_restarts 1; give"
            ):
                publishing.result(TIMEOUT_S)

    def test_engine_that_only_missed_it_is_sent_it_again(self) -> None:
        with stage(2) as it:
            it.made[1].core.failures["receive_weights"] = RunError(
                "weight sync: learner 0 waited 300 s"
            )
            it.publish(1)
            assert it.versions == [1, 1]
            assert len(it.made) == 2


class TestLearnerDies:
    @pytest.mark.parametrize("method", ["open_weight_channel", "join_weight_channel", SEND])
    def test_lost_engine_is_known_at_once(self, method: str) -> None:
        with stage(1) as it:
            it.learners.effects[method] = [raises(LearnerLost("learner rank 1 was lost"))]
            waiting = threading.Event()
            hangs_in(
                it.made[0], "receive_weights" if method == SEND else "open_channel", until=waiting
            )
            with pytest.raises(LearnerLost, match=r"^learner rank 1 was lost$"):
                it.publish(1)
            assert it.publisher.version is None
            waiting.set()
            it.publisher.handle_learner_restart()
            it.publish(1)
            assert it.generates() == (1, 1, 1)

    def test_engine_that_learns_of_it_late_does_not_end_the_next_channel(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It waits for lost learners until a node's silence is an error, while new ones have opened
        another channel.
        """
        with stage(1, channel=DELTA) as it:
            abandoned: list[int] = []
            monkeypatch.setattr(
                publisher_module, "abandon", lambda info, reason: abandoned.append(info["port"])
            )
            it.learners.effects[SEND] = [raises(LearnerLost("learner rank 0 was lost"))]
            it.made[0].core.failures["has_staged"] = RunError(
                "weight sync: receiver 0 lost learner 0"
            )
            may_learn = threading.Event()
            hangs_in(it.made[0], "has_staged", until=may_learn)
            with pytest.raises(LearnerLost):
                it.publish(1)
            it.publisher.handle_learner_restart()
            it.learners.channel = {**DELTA, "port": 8}
            publishing = it._threads.submit(it._publish, 1)
            eventually(lambda: it.publisher._channel["port"] == 8)
            may_learn.set()
            publishing.result(TIMEOUT_S)
            assert abandoned == [7]

    def test_engine_restarted_meanwhile_waits_for_the_next_publish(self) -> None:
        with stage(1) as it:
            it.publish(3)
            it.publisher.handle_learner_restart()
            it.calls.clear()
            it.made[0].die()
            future = it.pool.submit(request(1))
            eventually(lambda: it.publisher._new_engines)
            assert not it.calls
            it.publish(2)
            assert future.result(TIMEOUT_S).versions == (2, 2, 2)
            assert len(it.made) == 2

    def test_engine_that_dies_waiting_is_started_again(self) -> None:
        with stage(1) as it:
            it.publisher.handle_learner_restart()
            it.made[0].die()
            eventually(lambda: it.publisher._new_engines)
            it.made[1].die()
            it.publish(2)
            assert it.generates() == (2, 2, 2)
            assert len(it.made) == 3

    def test_loss_found_by_an_engine_reaches_those_who_wait(self) -> None:
        with stage(2) as it:
            it.learners.effects["open_weight_channel"] = [
                raises(LearnerLost("learner rank 0 was lost"))
            ]
            futures = [it.pool.submit(request(number, num_tokens=10**9)) for number in range(4)]
            it.made[0].die()
            for future in futures:
                with pytest.raises(LearnerLost):  # or the driver would wait for ever
                    future.result(TIMEOUT_S)
            it.publisher.handle_learner_restart()
            it.publish(2)
            assert {it.generates() for _ in range(8)} == {(2, 2, 2)}


# Learners and engines in turns


TURN = ["settle", "release_memory", "move_to_device"]


def test_in_turns_engines_give_up_memory_before_learners_come_and_take_it_after_they_left() -> None:
    with stage(1, placement="shared") as it:
        with it.publisher.learners_turn():
            it.calls.append(("learn",))
            assert it.publisher.version is None
        assert it.publish(1) >= 0
        assert it.names() == [
            *TURN,
            "learn",
            "move_to_device",  # where it is
            "open_weight_channel",
            "join_weight_channel",
            "take_memory",
            "open_channel",
            "start_update",
            "broadcast_to_vllm",
            "receive_weights",
            "move_to_host",
            "finish_update",
            "take_memory",
            "weights_changed",
        ]
        taken = [call[1] for call in it.calls if call[0] == "take_memory"]
        assert taken == ["weights", "kv_cache"]
        assert it.publisher.version == 1
        assert it.publisher.take_switch_seconds() > 0
        assert it.publisher.take_switch_seconds() == 0
        assert it.generates() == (1, 1, 1)


def test_completion_that_is_interrupted_by_a_turn_goes_on_with_the_new_version() -> None:
    with stage(1, placement="shared") as it:
        core = it.made[0].core
        core.hold()
        completion = it.pool.submit(request(1, num_tokens=5))
        eventually(lambda: core.num_steps_begun == 1)
        turn = meanwhile(it.publish, 1)
        eventually(lambda: it.made[0].engine._calls)
        core.release()
        turn.result(TIMEOUT_S)
        assert completion.result(TIMEOUT_S).versions == (0, 1, 1, 1, 1)


def test_drained_turn_waits_for_completions_that_run() -> None:
    with stage(1, placement="shared", drain=True) as it:
        completions = [it.pool.submit(request(number)) for number in range(3)]
        with it.publisher.learners_turn(drain=True):
            core = it.made[0].core
            assert core.absent_parts == {"weights", "kv_cache"}
        it.publish(1)
        for completion in completions:
            assert len(set(completion.result(TIMEOUT_S).versions)) == 1


def test_engine_on_a_device_of_its_own_goes_on_while_learners_have_their_turn() -> None:
    with stage(2, placement="mixed", num_learners=1) as it:
        with it.publisher.learners_turn():
            turning, other = (engine.core for engine in it.made)
            assert turning.absent_parts == {"weights", "kv_cache"}
            assert not other.absent_parts
            assert it.generates_on(1) == (0, 0, 0)
        it.publish(1)
        assert it.versions == [1, 1]
        assert it.generates_on(0) == it.generates_on(1) == (1, 1, 1)


def test_engine_that_dies_at_work_starts_only_when_learners_have_left() -> None:
    with stage(2, placement="shared") as it:
        it.publish(1)
        it.calls.clear()
        it.made[1].die()
        eventually(lambda: len(it.made) == 3)
        eventually(lambda: it.publisher.version == 1 and it.versions == [1, 1])
        names = it.names()
        start = names.index("engine starts")
        assert "move_to_host" in names[:start]
        # And then all engines take the weights again, in a turn of their own.
        assert "move_to_device" in names[start:]
        assert it.generates() == (1, 1, 1)


def test_engine_that_dies_in_the_learners_turn_is_replaced_within_the_delivery() -> None:
    with stage(2, placement="shared") as it:
        it.publish(1)
        with it.publisher.learners_turn():
            it.made[0].die()
            it.calls.append(("learn",))
            assert len(it.made) == 2  # nothing starts beside the learners
        it.publish(2)
        assert it.versions == [2, 2]
        assert it.generates() == (2, 2, 2)


def test_learners_that_are_lost_in_their_turn_leave_engines_without_memory_until_the_next() -> None:
    with stage(1, placement="shared") as it:
        it.publish(1)
        with it.publisher.learners_turn():
            pass
        it.publisher.handle_learner_restart()
        assert it.made[0].core.absent_parts == {"weights", "kv_cache"}
        it.publish(1)
        assert it.generates() == (1, 1, 1)
