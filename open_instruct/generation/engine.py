"""One engine: a process that generates completions, with its own loop around vLLM's steps.

A step makes one token for every running request. Calls that change the weights run between two
steps and nowhere else, so it is known exactly which weights made a token.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, TypeVar

from open_instruct.core.errors import RunError
from open_instruct.generation.requests import EngineSettings, GenerationRequest
from open_instruct.generation.vllm_core import Outcome, P, VLLMCore
from open_instruct.weight_sync.receiver import WeightReceiver

R = TypeVar("R")
Outcomes = Mapping[int, Outcome]
"""What came of requests, by their keys."""

SECONDS_BETWEEN_LOOKS = 0.02


class Engine:
    """Generates completions, and takes new weights between two steps.

    A Ray actor wraps it, but it knows no Ray. Usable once constructed, from many threads at once.
    If its loop fails, all methods raise RunError from then on.

    Args:
        settings: of the model and of vLLM.
        make_core: builds the core that makes the tokens, on the loop's thread.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        make_core: Callable[[EngineSettings], VLLMCore] = VLLMCore,
    ) -> None:
        self._settings = settings
        self._condition = threading.Condition()  # guards everything below
        self._calls: deque[tuple[Callable[[VLLMCore], Any], Future[Any]]] = deque()
        # Each request's key is in one of these; its caller waits in another process.
        self._waiting: dict[int, GenerationRequest] = {}
        self._running: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}
        self._cancelled_keys: set[int] = set()  # of those that run
        self._is_admitting = True
        self._is_stepping = True
        self._is_released = False  # its memory is given up
        self._is_closed = False
        self._step_began_s: float | None = None
        self._failure: RunError | None = None
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._loop,
            args=(make_core, ready),
            name="engine",
            daemon=True,
        )
        self._thread.start()
        ready.result()

    # Completions

    def begin(self, requests: Mapping[int, GenerationRequest]) -> None:
        """Begin requests without waiting; `poll` returns their outcomes under the same keys.

        Raises:
            RunError: the engine failed.
        """
        with self._condition:
            self._check()
            self._waiting |= requests
            self._condition.notify_all()

    def cancel(self, keys: Sequence[int]) -> None:
        """Give up the requests of these keys; `poll` will not return them."""
        with self._condition:
            self._cancelled_keys |= self._running.intersection(keys)
            for key in keys:
                self._waiting.pop(key, None)
                self._outcomes.pop(key, None)

    def poll(self, wait_s: float) -> Outcomes:
        """The outcomes that no earlier poll returned, by their keys; waits up to `wait_s` for one.

        Raises:
            RunError: the engine failed, or one step lasts longer than --engine_timeout_s.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._outcomes or self._failure, wait_s)
            self._check()
            began_s = self._step_began_s  # the loop may change it at any time
            if began_s is not None:
                step_s = time.monotonic() - began_s
                if step_s > self._settings.fleet.engine_timeout_s:
                    raise RunError(f"it has been in one step for {step_s:.0f} s")
            outcomes = self._outcomes
            self._outcomes = {}
        return outcomes

    # Weights

    def release_memory(self, drain: bool) -> None:
        """Stop between two steps, and give up weights and cache; nothing if that was done.

        It goes on after the next `finish_update`.

        Args:
            drain: finish the running requests first.
        """
        if self._is_released:
            return
        self._pause(drain)
        self._between_steps(lambda core: core.release_memory())
        self._is_released = True

    def open_channel(self, info: dict[str, Any]) -> None:
        """Connect to the sender of weights."""
        self._between_steps(lambda core: core.take_memory("weights"))
        self._call_workers(WeightReceiver.open_channel, info)

    def stage_weights(self, version: int) -> None:
        """Receive what changed in the weights while steps go on; `receive_weights` applies it."""
        self._call_workers(WeightReceiver.start_staging, version)
        while not all(self._call_workers(WeightReceiver.has_staged)):
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def begin_update(self, drain: bool) -> None:
        """Stop between two steps and get ready for weights; requests that come meanwhile wait.

        Args:
            drain: finish the running requests first, so that every completion is of one version.
        """

        self._pause(drain)

        def prepare(core: VLLMCore) -> None:
            core.take_memory("weights")
            core.call_workers(WeightReceiver.start_update)

        self._between_steps(prepare)

    def receive_weights(self) -> None:
        """Take one version of the weights from the channel, or from what was staged."""
        self._call_workers(WeightReceiver.receive_weights)

    def finish_update(self, version: int) -> None:
        """Go on with the new weights; running requests are recomputed from their tokens so far."""

        def continue_generation(core: VLLMCore) -> None:
            core.call_workers(WeightReceiver.finish_update)
            core.take_memory("kv_cache")
            core.weights_changed(version)
            self._is_released = False
            self._is_admitting = self._is_stepping = True

        self._between_steps(continue_generation)

    def _pause(self, drain: bool) -> None:
        """Take no step any more; whoever has no memory takes none already."""
        if self._is_released:
            return

        def stop(core: VLLMCore) -> None:
            self._is_admitting = False
            self._is_stepping = drain

        self._between_steps(stop)
        with self._condition:
            self._condition.wait_for(lambda: self._failure or not (drain and self._running))

        def settle(core: VLLMCore) -> None:
            self._is_stepping = False
            # A step that vLLM runs ahead while weights change would make tokens of neither version.
            self._store_outcomes(core.settle())

        self._between_steps(settle)

    # The process

    def pid(self) -> int:
        """The id of its process; answers at once, also while the loop is in a step.

        Raises:
            RunError: the engine failed.
        """
        self._check()
        return os.getpid()

    def shutdown(self) -> None:
        """End the loop; whoever waits gets a RunError."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join()

    # Callers' side of the loop

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _call_workers(self, method: Callable[..., R], *arguments: Any) -> list[R]:
        """Call a method of each worker of the engine between two steps."""
        return self._between_steps(lambda core: core.call_workers(method, *arguments))

    def _between_steps(self, function: Callable[[VLLMCore], R]) -> R:
        future: Future[R] = Future()
        with self._condition:
            self._check()
            self._calls.append((function, future))
            self._condition.notify_all()
        return future.result()

    # The loop's thread

    def _loop(self, make_core: Callable[[EngineSettings], VLLMCore], ready: Future[None]) -> None:
        try:
            # Kept until the process ends; see `VLLMCore.close`.
            core = self._core = make_core(self._settings)
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while not self._is_closed:
                self._run_calls(core)
                self._abort_cancelled(core)
                self._admit(core)
                if self._running and self._is_stepping:
                    self._step_began_s = time.monotonic()
                    outcomes = core.step()
                    self._step_began_s = None
                    self._store_outcomes(outcomes)
                else:
                    with self._condition:
                        self._condition.wait_for(
                            lambda: self._calls or self._can_admit() or self._is_closed
                        )
            failure = RunError("the engine was shut down")
        except BaseException as error:
            failure = _make_failure(error)
        self._fail(failure)
        core.close()

    def _run_calls(self, core: VLLMCore) -> None:
        while self._calls:
            with self._condition:
                function, future = self._calls.popleft()
            try:
                future.set_result(function(core))
            except Exception as error:
                # The caller decides: a peer may be gone, and another try of the update succeed.
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(_make_failure(error))
                raise

    def _can_admit(self) -> bool:
        return (
            self._is_admitting
            and bool(self._waiting)
            and len(self._running) < self._settings.batching.max_num_seqs
        )

    def _admit(self, core: VLLMCore) -> None:
        while True:
            with self._condition:
                if not self._can_admit():
                    return
                key = next(iter(self._waiting))
                request = self._waiting.pop(key)
                self._running.add(key)
            try:
                core.add(key, request)
            except ValueError as error:
                self._store_outcomes({key: str(error)})

    def _abort_cancelled(self, core: VLLMCore) -> None:
        for key in [*self._cancelled_keys]:
            core.abort(key)
            self._store_outcomes({key: "cancelled"})

    def _store_outcomes(self, outcomes: Outcomes) -> None:
        """Remove finished requests, and store outcomes for `poll` unless they were cancelled."""
        if not outcomes:
            return
        with self._condition:
            self._outcomes |= {
                key: outcome for key, outcome in outcomes.items() if key not in self._cancelled_keys
            }
            self._running -= outcomes.keys()
            self._cancelled_keys -= outcomes.keys()
            self._condition.notify_all()

    def _fail(self, failure: RunError) -> None:
        with self._condition:
            self._failure = failure
            calls = [future for _, future in self._calls]
            self._running.clear()
            self._waiting.clear()
            self._calls.clear()
            self._condition.notify_all()
        for call in calls:
            call.set_exception(failure)


EngineMethod = Callable[Concatenate[Engine, P], R]


def _make_failure(error: BaseException) -> RunError:
    failure = RunError(f"the engine failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
