"""From the learners' shards to every engine, under a version number; again, for an engine that was started anew."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from open_instruct.config.rollout_sections import FleetSection
from open_instruct.errors import RunError
from open_instruct.rollout.learner_group import LearnerGroup, LearnerLost
from open_instruct.rollout.weight_sync import abandon

if TYPE_CHECKING:
    from open_instruct.rollout.engine_pool import EnginePool

log = logging.getLogger(__name__)


class WeightPublisher:
    """Keeps all engines at one version of the weights.

    Weights are sent while the learners hold still: whoever has them take a step does so within `learners_at_work`,
    and the pool's threads, which report engines that were started anew, wait for its end.
    """

    def __init__(self, learners: LearnerGroup, fleet: FleetSection, *, drain: bool) -> None:
        self._learners = learners
        self._fleet = fleet
        self._drain = drain
        self._changed = threading.Condition(threading.RLock())
        self._new_engines: set[int] = set()  # hold the start model until they are sent weights
        self._num_new_engines = 0  # ever
        self._is_connected = False
        self._engines: EnginePool | None = None
        self.version = 0

    def attach(self, engines: EnginePool) -> None:
        """Once the pool is there; it calls `engine_restarted` of this object."""
        self._engines = engines

    @contextmanager
    def learners_at_work(self) -> Iterator[None]:
        """Nothing else asks the learners for weights while the block runs."""
        with self._changed:
            yield

    def publish(self, version: int) -> float:
        """Bring every engine to the learners' weights, called `version` from now on; returns the seconds it took.

        An engine that dies meanwhile is waited for, and everything is sent again.

        Raises:
            LearnerLost: a learner died or did not answer.
            RunError: an engine did not answer, and did not come back.
        """
        began_s = time.monotonic()
        with self._changed:
            self.version = version
            for attempt in range(self._fleet.max_restarts + 1):
                num_new_engines = self._num_new_engines
                try:
                    self._deliver()
                    break
                except LearnerLost:
                    raise
                except RunError as error:
                    log.warning("weights of version %d did not reach every engine: %s", version, error)
                    if attempt == self._fleet.max_restarts or not self._has_come_back(num_new_engines):
                        raise
        return time.monotonic() - began_s

    def engine_restarted(self, index: int) -> None:
        """Called by the pool, before a new engine gets requests; returns once it has the weights of the others.

        Raises:
            RunError: it does not take them.
        """
        # A channel has the number of its members; a new member needs a new channel.
        with self._changed:
            self._is_connected = False
            self._new_engines.add(index)
            self._num_new_engines += 1
            self._changed.notify_all()
            try:
                # Whoever is publishing sends to this engine as well; what it sent meanwhile is enough.
                if index in self._new_engines:
                    self._deliver()
            except LearnerLost as lost:
                log.warning("engine %d waits for the learners: %s", index, lost)
                self._changed.wait_for(lambda: index not in self._new_engines)

    def learners_restarted(self) -> None:
        """The channel's other end is gone."""
        with self._changed:
            self._is_connected = False

    def _has_come_back(self, num_new_engines_before: int) -> bool:
        """Wait for the pool to start an engine anew; False where it does not."""
        return self._changed.wait_for(
            lambda: self._num_new_engines > num_new_engines_before, self._fleet.engine_timeout_s
        )

    def _deliver(self) -> None:
        timeout_s = self._fleet.weight_sync_timeout_s
        engines = self._engines
        assert engines is not None, "attach() comes first"
        is_connected, self._is_connected = self._is_connected, False
        engines.call_all("begin_update", self._drain, timeout_s=self._fleet.step_timeout_s)
        if not is_connected:
            self._connect(timeout_s)
        sending = self._learners.start("send_weights", self.version)
        receiving = engines.start_all("receive_weights", timeout_s=timeout_s)
        for call in receiving:
            call.add_done_callback(self._abandon_after_failure)
        try:
            # The learners first: when one dies that is known in seconds, and the engines would wait for it.
            sending.result(timeout_s)
        except LearnerLost:
            raise
        except RunError:
            engines.results(receiving)  # an engine's own word for it, where it has one
            raise
        engines.results(receiving)
        engines.call_all("finish_update", self.version, timeout_s=timeout_s)
        self._is_connected = True
        self._new_engines.clear()
        self._changed.notify_all()

    def _connect(self, timeout_s: float) -> None:
        engines = self._engines
        assert engines is not None
        num_workers = len(engines) * self._fleet.vllm_tensor_parallel_size
        self._channel: dict[str, Any] = self._learners.call("open_weight_channel", num_workers, timeout_s=timeout_s)[0]
        joining = self._learners.start("join_weight_channel")
        infos = [
            ({**self._channel, "receiver_index": index * self._fleet.vllm_tensor_parallel_size},)
            for index in range(len(engines))
        ]
        opening = engines.start_each("open_channel", infos, timeout_s=timeout_s)
        for call in opening:
            call.add_done_callback(self._abandon_after_failure)
        try:
            joining.result(timeout_s)
        except LearnerLost:
            raise
        except RunError:
            engines.results(opening)
            raise
        engines.results(opening)

    def _abandon_after_failure(self, call: Future[Any]) -> None:
        """An engine that died will never answer: the learners need not wait for it."""
        if (error := call.exception()) is not None:
            abandon(self._channel, str(error))
