"""One engine: a process that generates completions, with a loop of its own around vLLM's steps.

A step makes one token for every running request. Control calls, which change the weights, run between two
steps and nowhere else, so which weights made a token is known exactly.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from open_instruct.engines.answers import EngineAnswers, EngineHealth
from open_instruct.engines.requests import EngineSettings, GenerationRequest
from open_instruct.engines.vllm_core import VLLMCore
from open_instruct.errors import RunError
from open_instruct.records import Completion

Result = TypeVar("Result")


class Core(Protocol):
    """What makes the tokens. All its methods are called from one thread."""

    def add(self, key: str, request: GenerationRequest) -> None:
        """Begin a request; a ValueError says why it cannot be."""

    def abort(self, key: str) -> None:
        """Give a request up."""

    def step(self) -> Mapping[str, Completion]:
        """Make one token for each request; returns those that are finished with it."""

    def call_workers(self, method: str, *args: Any) -> None:
        """Call a method of the weight receiver in every process that holds weights."""

    def weights_changed(self, version: int) -> None:
        """Tokens are of `version` from now on; nothing computed with other weights is used again."""

    def close(self) -> None: ...


class Engine:
    """Generates completions, and takes new weights between two steps. To be wrapped as a Ray actor; knows no Ray.

    Usable once constructed, from many threads at once. If its loop fails, everything raises RunError from then on.

    Args:
        settings: of the model and of vLLM.
        make_core: builds what makes the tokens, on the loop's thread.
    """

    def __init__(self, settings: EngineSettings, *, make_core: Callable[[EngineSettings], Core] = VLLMCore) -> None:
        self._settings = settings
        self._changed = threading.Condition()  # guards everything below
        self._calls: deque[tuple[Callable[[Core], Any], Future[Any]]] = deque()
        self._waiting: deque[tuple[GenerationRequest, Future[Completion]]] = deque()
        self._running: dict[str, Future[Completion]] = {}
        self._begun: dict[int, Future[Completion]] = {}
        self._completions: dict[int, Completion] = {}
        self._refused: dict[int, str] = {}
        self._num_admitted = 0
        self._num_generated_tokens = 0
        self._version = 0
        self._is_admitting = True
        self._is_stepping = True
        self._is_closed = False
        self._step_began: float | None = None
        self._failure: RunError | None = None
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._loop, args=(make_core, ready), name="engine", daemon=True)
        self._thread.start()
        ready.result()

    # Completions

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Ask, and wait until all are done.

        Raises:
            ValueError: a request cannot be generated, such as a prompt that is too long.
            RunError: the engine failed.
        """
        futures = [self._ask(request) for request in requests]
        return [future.result() for future in futures]

    def begin(self, requests: Mapping[int, GenerationRequest]) -> None:
        """Ask without waiting; `poll` will tell what came of it, under the same keys."""
        for key, request in requests.items():
            future = self._begun[key] = self._ask(request)
            future.add_done_callback(partial(self._answer, key))

    def cancel(self, keys: Sequence[int]) -> None:
        """Give up what was begun under these keys; nothing will be told of it."""
        with self._changed:
            for key in keys:
                self._completions.pop(key, None)
                self._refused.pop(key, None)
                future = self._begun.pop(key, None)
                if future is not None:
                    future.cancel()
            self._changed.notify_all()

    def poll(self, wait_s: float) -> EngineAnswers:
        """What has come of requests begun, each told once; waits up to `wait_s` for something to tell."""
        with self._changed:
            self._changed.wait_for(lambda: self._completions or self._refused or self._failure, wait_s)
            health = self.health()
            completions, self._completions = self._completions, {}
            refused, self._refused = self._refused, {}
        return EngineAnswers(health=health, completions=completions, refused=refused)

    # Weights

    @property
    def version(self) -> int:
        """Of the weights: 0 is the model the run started from, s the policy after step s."""
        return self._version

    def open_channel(self, info: dict[str, Any]) -> None:
        """Connect to the sender of weights."""
        self._between_steps(lambda core: core.call_workers("open_channel", info))

    def begin_update(self, drain: bool) -> None:
        """Stop between two steps and get ready for weights; requests that come meanwhile wait.

        Args:
            drain: finish the running requests first, so that every completion is of one version.
        """

        def stop(core: Core) -> None:
            self._is_admitting = False
            self._is_stepping = drain

        self._between_steps(stop)
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not (drain and self._running))
        self._between_steps(lambda core: core.call_workers("start_update"))

    def receive_weights(self) -> None:
        """Take one set of weights from the channel; returns when it is complete."""
        self._between_steps(lambda core: core.call_workers("receive_weights"))

    def finish_update(self, version: int) -> None:
        """Go on with the weights received. What was running is computed anew from its prompt and tokens so far."""

        def go_on(core: Core) -> None:
            core.call_workers("finish_update")
            core.weights_changed(version)
            self._version = version
            self._is_admitting = self._is_stepping = True

        self._between_steps(go_on)

    # The process

    def health(self) -> EngineHealth:
        """How it is; answers at once, whatever the loop does.

        Raises:
            RunError: the engine failed.
        """
        if self._failure is not None:
            raise self._failure
        began = self._step_began
        return EngineHealth(
            pid=os.getpid(),
            version=self._version,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_generated_tokens=self._num_generated_tokens,
            seconds_in_step=0.0 if began is None else time.monotonic() - began,
            is_updating=not self._is_admitting,
        )

    def shutdown(self) -> None:
        """End the loop; whoever waits gets a RunError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    # Callers' side of the loop

    def _ask(self, request: GenerationRequest) -> Future[Completion]:
        future: Future[Completion] = Future()
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._waiting.append((request, future))
            self._changed.notify_all()
        return future

    def _answer(self, key: int, future: Future[Completion]) -> None:
        with self._changed:
            if self._begun.pop(key, None) is None:
                return  # cancelled
            error = future.exception()
            if error is None:
                self._completions[key] = future.result()
            elif isinstance(error, ValueError):
                self._refused[key] = str(error)
            self._changed.notify_all()

    def _between_steps(self, function: Callable[[Core], Result]) -> Result:
        future: Future[Result] = Future()
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._calls.append((function, future))
            self._changed.notify_all()
        return future.result()

    # The loop's thread

    def _loop(self, make_core: Callable[[EngineSettings], Core], ready: Future[None]) -> None:
        try:
            core = make_core(self._settings)
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while not self._is_closed:
                self._run_calls(core)
                self._drop_cancelled(core)
                self._admit(core)
                if self._running and self._is_stepping:
                    self._step(core)
                else:
                    with self._changed:
                        self._changed.wait_for(lambda: self._calls or self._can_admit() or self._is_closed)
            failure = RunError("the engine was shut down")
        except BaseException as error:
            failure = _failure_of(error)
        self._fail(failure)
        core.close()

    def _run_calls(self, core: Core) -> None:
        while self._calls:
            with self._changed:
                function, future = self._calls.popleft()
            try:
                future.set_result(function(core))
            except Exception as error:
                future.set_exception(error)  # the caller's to judge: a peer may be gone, and the update tried again
            except BaseException as error:
                future.set_exception(_failure_of(error))
                raise

    def _can_admit(self) -> bool:
        return self._is_admitting and bool(self._waiting) and len(self._running) < self._settings.max_num_seqs

    def _admit(self, core: Core) -> None:
        while self._can_admit():
            with self._changed:
                request, future = self._waiting.popleft()
            key = str(self._num_admitted)
            self._num_admitted += 1
            if future.cancelled():
                continue
            try:
                core.add(key, request)
            except ValueError as error:
                set_outcome(future, error)
            except BaseException as error:
                set_outcome(future, _failure_of(error))
                raise
            else:
                self._running[key] = future

    def _drop_cancelled(self, core: Core) -> None:
        for key in [key for key, future in self._running.items() if future.cancelled()]:
            core.abort(key)
            with self._changed:
                del self._running[key]
                self._changed.notify_all()

    def _step(self, core: Core) -> None:
        self._step_began = time.monotonic()
        finished = core.step()
        self._step_began = None
        if not finished:
            return
        with self._changed:
            done = [(self._running.pop(key), completion) for key, completion in finished.items()]
            self._num_generated_tokens += sum(len(completion.token_ids) for _, completion in done)
            self._changed.notify_all()
        for future, completion in done:
            set_outcome(future, completion)

    def _fail(self, failure: RunError) -> None:
        with self._changed:
            self._failure = failure
            futures: list[Future[Any]] = [*self._running.values()]
            futures += [future for _, future in (*self._waiting, *self._calls)]
            self._running.clear()
            self._waiting.clear()
            self._calls.clear()
            self._changed.notify_all()
        for future in futures:
            set_outcome(future, failure)


def _failure_of(error: BaseException) -> RunError:
    failure = RunError(f"the engine failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def set_outcome(future: Future[Any], outcome: Any) -> None:
    """Set a result, or an exception where `outcome` is one; nothing where the future was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
