"""The publisher brings the learners' weights to every engine, also to one that restarts."""

import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

from open_instruct.cluster.learner_call import LearnerCall, LearnerLost
from open_instruct.cluster.learner_group import LearnerGroup, LearnerProcess
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.errors import RunError
from open_instruct.generation.engine import Engine
from open_instruct.generation.engine_pool import EnginePool
from open_instruct.weight_sync.progress import abandon
from open_instruct.weight_sync.transports import FOLDER, ON_DEVICE

log = logging.getLogger(__name__)


class WeightPublisher:
    """Keeps all engines at one version of the weights; the version is the number of steps taken.

    Weights are sent while the learners do nothing else. Other calls to the learners run within
    `learners_at_work`, and the pool's threads, which report restarted engines, wait until it ends.
    """

    def __init__(
        self, learners: LearnerGroup[LearnerProcess], fleet: FleetSection, *, drain: bool
    ) -> None:
        self._learners = learners
        self._fleet = fleet
        self._drain = drain
        self._condition = threading.Condition(threading.RLock())
        self._new_engines: set[int] = set()  # hold the start model until they are sent weights
        self._dead_new_engines: set[int] = set()  # of these, those that died before
        self._num_new_engines = 0  # ever
        self._is_connected = False
        self._switch_s = 0.0
        self._channel: dict[str, Any] = {}
        # Set once there is one, which calls `handle_engine_restart` and `handle_engine_failure`.
        self.engines: EnginePool
        self._engines_failure: RunError | None = None
        self._learners_version: int | None = 0  # None: they were lost, and hold nothing to be sent
        self.version: int | None = 0
        """The version that every engine has; None while that is unknown."""

    def learners_at_work(self) -> AbstractContextManager[bool]:
        """While it is entered, no other thread asks the learners for weights."""
        return self._condition

    @contextmanager
    def learners_turn(self, *, drain: bool = False) -> Iterator[None]:
        """While it is entered the learners may compute, save or load, and nobody else asks them.

        Where they take turns with engines, these have no weights afterwards, and `version` is None:
        `publish` gives the devices back to them. Engines on devices of their own go on meanwhile.

        Args:
            drain: engines finish their running requests first.
        """
        with self._condition:
            if self._fleet.takes_turns:
                self._let_learners_work(drain)
            yield

    @contextmanager
    def engine_start(self) -> Iterator[None]:
        """While it is entered an engine may start: no learner has its state on that device."""
        if not self._fleet.takes_turns:
            yield
            return
        with self._condition:
            # Of learners that were lost nothing is left there, and the driver restarts them.
            with suppress(LearnerLost):
                self._let_engines_work()
            yield

    def take_switch_seconds(self) -> float:
        """Seconds that turns have taken since the last call."""
        seconds = self._switch_s
        self._switch_s = 0.0
        return seconds

    def publish(self, version: int) -> float:
        """Bring every engine to the learners' weights as `version`; returns the seconds it took.

        The seconds of turns are not among them, see `take_switch_seconds`. If an engine dies
        meanwhile, this waits for its restart and sends everything again.

        Raises:
            LearnerLost: a learner died or did not answer.
            RunError: an engine did not answer, and did not come back.
        """
        with self._condition:
            began_s = time.monotonic()
            switch_s = self._switch_s
            self._learners_version = version
            for attempt in itertools.count():
                if self._try_to_deliver(attempt):
                    break
            return time.monotonic() - began_s - (self._switch_s - switch_s)

    def handle_engine_restart(self, index: int) -> None:
        """Bring a new engine to the weights of the others.

        The pool calls it before the engine gets requests.

        Raises:
            RunError: it does not take them.
        """
        # A channel has the number of its members; a new member needs a new channel.
        with self._condition:
            self._is_connected = False
            self._new_engines.add(index)
            self._dead_new_engines.discard(index)
            self._num_new_engines += 1
            self._condition.notify_all()
            # Whoever sends meanwhile sends to this engine as well.
            for attempt in itertools.count():
                self._condition.wait_for(
                    lambda: (
                        self._learners_version is not None
                        or index not in self._new_engines
                        or index in self._dead_new_engines
                    )
                )
                if index not in self._new_engines:
                    return
                if index in self._dead_new_engines:
                    raise RunError(f"engine {index} died before it had its weights")
                try:
                    self._try_to_deliver(attempt, new_engine=index)
                except LearnerLost as lost:
                    log.warning("engine %d waits for the learners: %s", index, lost)
                    self._learners_version = None
                    # The driver may wait for these, and the learners are its business.
                    self.engines.fail_waiting(lost)

    def handle_engine_failure(self, failure: RunError) -> None:
        """Have threads that wait for an engine raise `failure`.

        The pool calls it once it starts no engine again.
        """
        with self._condition:
            self._engines_failure = failure
            self._condition.notify_all()

    def handle_learner_restart(self) -> None:
        """Drop the channel: new learners have no end of it, and no weights before `publish`."""
        with self._condition:
            if self._fleet.takes_turns:
                self._release_engines(drain=False)  # the new learners load where these are
            self._is_connected = False
            self._learners_version = None
            self.version = None

    def _try_to_deliver(self, attempt: int, *, new_engine: int | None = None) -> bool:
        """Deliver; returns False if it failed, and another attempt may succeed.

        It may once all engines that died have been restarted.

        Raises:
            LearnerLost: a learner died or did not answer.
            RunError: the pool's failure, if it starts no engine again. Otherwise that of the
                delivery: if engines stay away, if this was the last attempt and none had died, or
                if `new_engine` itself died.
        """
        num_new_engines = self._num_new_engines
        try:
            self._deliver()
            return True
        except LearnerLost:
            raise
        except RunError as error:
            log.warning("weights did not reach every engine: %s", error)
            dead = self.engines.find_silent()
            # The pool does not watch these yet, `handle_engine_restart` does.
            self._dead_new_engines |= dead & self._new_engines
            self._condition.notify_all()
            if new_engine in dead:
                raise
            # The pool restarts an engine or gives up, but only after it has noticed the death.
            is_whole = not dead or self._condition.wait_for(
                lambda: (
                    self._engines_failure is not None or self._num_new_engines > num_new_engines
                ),
                self._fleet.engine_timeout_s,
            )
            if self._engines_failure is not None:
                raise self._engines_failure from error
            # The pool counts deaths; of errors without one there may be as many.
            if not is_whole or (not dead and attempt >= self._fleet.max_restarts):
                raise
            return False

    def _let_learners_work(self, drain: bool) -> None:
        """Have engines give up their memory, and bring the learners' state to the devices."""
        began_s = time.monotonic()
        self.version = None
        self._release_engines(drain)
        bringing = self._learners.start(LearnerProcess.move_to_device)
        bringing.result(self._fleet.step_timeout_s)
        self._switch_s += time.monotonic() - began_s

    def _let_engines_work(self) -> None:
        """Bring the learners' state to the host; engines take their memory when they go on."""
        began_s = time.monotonic()
        leaving = self._learners.start(LearnerProcess.move_to_host)
        leaving.result(self._fleet.step_timeout_s)
        self._switch_s += time.monotonic() - began_s

    def _release_engines(self, drain: bool) -> None:
        """Have engines in turns give up weights and cache; the pool restarts those that are dead.

        Raises:
            RunError: an engine that lives did not.
        """
        timeout_s = self._fleet.step_timeout_s if drain else self._fleet.engine_timeout_s
        turning = range(self._fleet.count_turning_engines(len(self._learners)))
        calls = self.engines.start_on(turning, timeout_s, Engine.release_memory, drain)
        errors = {index: call.exception() for index, call in enumerate(calls)}
        failed = {index for index, error in errors.items() if error is not None}
        for index in sorted(failed - self.engines.find_silent() if failed else failed):
            raise RunError(f"engine {index} did not give up its memory: {errors[index]}")

    def _deliver(self) -> None:
        timeout_s = self._fleet.weight_sync_timeout_s
        if self._fleet.takes_turns:
            self._let_learners_work(self._drain)
        engines = self.engines
        version = self._learners_version
        assert version is not None, "the learners were lost"
        # A chain in a folder goes on as long as all goes well, also for engines that are new to it.
        goes_on = self.version is not None and self._channel.get("backend") == FOLDER
        self.version = None
        if not self._is_connected:
            self._connect(timeout_s, goes_on=goes_on)
        self._is_connected = False  # unless all goes well
        is_delta = self._channel["changes_alone"]
        # Through the CPU changes arrive while engines generate; from GPU to GPU they would compete
        # with the engines' steps.
        is_staged = is_delta and self._channel["backend"] not in ON_DEVICE
        if not is_staged:
            engines.call_all(self._fleet.step_timeout_s, Engine.begin_update, self._drain)
        sending = self._learners.start(LearnerProcess.broadcast_to_vllm, version)
        if self._channel["backend"] == FOLDER:
            sending.result(timeout_s)  # engines do not wait for files, they read them
        if is_delta:
            arriving = engines.start_all(timeout_s, Engine.stage_weights, version)
        else:
            arriving = engines.start_all(timeout_s, Engine.receive_weights)
        self._wait_for_both(sending, arriving)
        if is_staged:
            engines.call_all(self._fleet.step_timeout_s, Engine.begin_update, self._drain)
        if is_delta:
            engines.call_all(timeout_s, Engine.receive_weights)
        if self._fleet.takes_turns:
            self._let_engines_work()
        engines.call_all(timeout_s, Engine.finish_update, version)
        self._is_connected = True
        self.version = version
        self._new_engines.clear()
        self._condition.notify_all()

    def _connect(self, timeout_s: float, *, goes_on: bool) -> None:
        if not goes_on:
            num_workers = len(self.engines) * self._fleet.vllm_tensor_parallel_size
            opening = self._learners.start(LearnerProcess.open_weight_channel, num_workers)
            self._channel = opening.result(timeout_s)[0]
        joining = self._learners.start(LearnerProcess.join_weight_channel)
        infos = [{**self._channel, "receiver_index": index} for index in range(len(self.engines))]
        self._wait_for_both(joining, self.engines.start_each(timeout_s, Engine.open_channel, infos))

    def _wait_for_both(self, learners: LearnerCall[None], engines: Sequence[Future[None]]) -> None:
        """Return when learners and engines have finished their joint call.

        Raises:
            LearnerLost: a learner died or did not answer.
            RunError: an engine failed, or else the learners did.
        """
        for call in engines:
            call.add_done_callback(partial(self._abandon_after_failure, self._channel))
        try:
            # The learners first: the death of one is known in seconds, and engines wait for it.
            learners.result(self._fleet.weight_sync_timeout_s)
        except LearnerLost:
            raise
        except RunError:
            EnginePool.results(engines)  # raises an engine's own reason, if it has one
            raise
        EnginePool.results(engines)

    def _abandon_after_failure(self, channel: dict[str, Any], call: Future[None]) -> None:
        """Abandon the channel if an engine failed, so that the learners do not wait for it."""
        error = call.exception()
        if error is not None and channel["backend"] != FOLDER:
            abandon(channel, str(error))
