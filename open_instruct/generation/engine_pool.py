"""The pool of all engines: it distributes requests, and restarts engines that die.

A request goes to the least busy engine, or to the one that holds its episode, and is sent again
when its engine dies. The pool gives every request a key of its own, since request ids repeat after
a restart of the learners. A completion is handed out once: outcomes of an engine that was given up
are ignored.
"""

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, TypeVar

from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion
from open_instruct.generation.engine import Engine, EngineMethod, Outcomes, P, R
from open_instruct.generation.engine_host import RayEngine
from open_instruct.generation.requests import GenerationRequest, Home

log = logging.getLogger(__name__)

A = TypeVar("A")

POLL_WAIT_S = 1.0
# An episode leaves the engine that holds its keys and values if that has more requests than
# MAX_RATIO times those of another, and MAX_EXCESS.
MAX_RATIO = 2
MAX_EXCESS = 4
# Completions from which an engine's pace is computed; it has none with fewer than a quarter.
PACE_WINDOW = 64
END_TIMEOUT_S = 10.0


class RequestRefused(RunError):
    """An engine takes no such request, and would take none of its kind."""


@dataclass(slots=True)
class InFlight:
    """A request in flight, and the future of its completion; its engine knows only the key."""

    request: GenerationRequest
    home: Home
    future: Future[Completion] = field(default_factory=Future)
    sent_s: float = 0.0  # when it was last sent to an engine


@dataclass(slots=True)
class _Member:
    """An engine with the requests that are with it. Guarded by the pool's lock."""

    handle: RayEngine
    requests: dict[int, InFlight] = field(default_factory=dict)
    is_alive: bool = True
    token_s: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_WINDOW))


class EnginePool:
    """All engines of a run. Thread-safe; usable once constructed, and until `close`.

    It does not know weights: `on_restart` brings them to a new engine.

    Args:
        engines: by index, each constructed.
        make_engine: builds the engine of an index anew; blocks until it is constructed.
        on_restart: brings a new engine to the weights of the others; the engine gets requests after
            that.
        on_failure: called with the reason once the pool has given up and starts no engine again.
        fleet: has the time-out of an engine's answers, and the most restarts of all engines.
        say: called with a line about each engine that died.
    """

    def __init__(
        self,
        engines: Sequence[RayEngine],
        *,
        make_engine: Callable[[int], RayEngine],
        on_restart: Callable[[int], None],
        on_failure: Callable[[RunError], None],
        fleet: FleetSection,
        say: Callable[[str], None],
    ) -> None:
        self._make_engine = make_engine
        self._on_restart = on_restart
        self._on_failure = on_failure
        self._timeout_s = fleet.engine_timeout_s
        self._max_restarts = fleet.max_restarts
        self._say = say
        self._lock = threading.RLock()
        self._keys = itertools.count()
        self._members = [_Member(handle) for handle in engines]
        self._unsent: dict[int, InFlight] = {}  # submitted while no engine lives
        self._num_restarts = 0
        self._failure: RunError | None = None
        self._is_closed = False
        self._callers = ThreadPoolExecutor(len(engines), thread_name_prefix="engines")
        for index in range(len(engines)):
            threading.Thread(
                target=self._watch,
                args=(index,),
                name=f"engine-{index}",
                daemon=True,
            ).start()

    def __len__(self) -> int:
        return len(self._members)

    # Completions

    def submit(self, request: GenerationRequest, home: Home | None = None) -> Future[Completion]:
        """Submit a request; returns the future of its completion, which fails with RunError only.

        Cancelling the future gives the request up. Requests with one `home`, the turns of an
        episode, go to one engine, unless that is much busier than another.
        """
        in_flight = InFlight(request, home or Home())
        with self._lock:
            key = next(self._keys)
            if self._failure is not None:
                in_flight.future.set_exception(self._failure)
            else:
                self._send({key: in_flight})
        in_flight.future.add_done_callback(partial(self._forget_cancelled, key))
        return in_flight.future

    # All engines at once

    def call_all(
        self,
        timeout_s: float,
        method: EngineMethod[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Call a method of every engine and return the results, by engine.

        Raises:
            RunError: the first failure of an engine, raised after all calls have ended.
        """
        return self.results(self.start_all(timeout_s, method, *args, **kwargs))

    def start_all(
        self,
        timeout_s: float,
        method: EngineMethod[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[Future[R]]:
        """Have every engine begin a method, with the same arguments."""
        return self.start_on(range(len(self)), timeout_s, method, *args, **kwargs)

    def start_on(
        self,
        indexes: Iterable[int],
        timeout_s: float,
        method: EngineMethod[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[Future[R]]:
        """Have the engines of these indexes begin a method, with the same arguments."""
        calls = [
            partial(self._members[index].handle.ask, timeout_s, method, *args, **kwargs)
            for index in indexes
        ]
        return [self._callers.submit(call) for call in calls]

    def start_each(
        self, timeout_s: float, method: Callable[[Engine, A], R], arguments: Sequence[A]
    ) -> list[Future[R]]:
        """Have every engine begin a method, each with its own argument."""
        return [
            self._callers.submit(member.handle.ask, timeout_s, method, argument)
            for member, argument in zip(self._members, arguments, strict=True)
        ]

    @staticmethod
    def results(calls: Sequence[Future[R]]) -> list[R]:
        """The return values of all engines; raises as `call_all` does, once all have ended."""
        errors = [call.exception() for call in calls]
        for error in errors:
            if error is not None:
                raise error
        return [call.result() for call in calls]

    def pids(self) -> list[int]:
        """Process ids, by engine; those that do not answer are left out."""
        calls = self.start_all(self._timeout_s, Engine.pid)
        return [call.result() for call in calls if call.exception() is None]

    def find_silent(self) -> set[int]:
        """Find the engines that do not answer, because they died or failed."""
        calls = self.start_all(self._timeout_s, Engine.pid)
        return {index for index, call in enumerate(calls) if call.exception()}

    def paces(self) -> list[float | None]:
        """Each engine's median seconds of decoding per token; all have as many requests at once."""
        with self._lock:
            latest = [list(member.token_s) for member in self._members]
        return [median(each) if len(each) >= PACE_WINDOW // 4 else None for each in latest]

    def fail_waiting(self, failure: RunError) -> None:
        """Fail all requests in flight; later ones are answered as ever."""
        with self._lock:
            open_requests = list(self._unsent.values())
            self._unsent = {}
            for member in self._members:
                if member.is_alive:
                    member.handle.tell(Engine.cancel, list(member.requests))
                open_requests += member.requests.values()
                member.requests = {}
        for each in open_requests:
            set_outcome(each.future, failure)

    def close(self) -> None:
        """End the engines; whoever waits for a completion gets a RunError."""
        with self._lock:
            self._is_closed = True
            self._fail(RunError("the engines were shut down"))
        with ThreadPoolExecutor(len(self._members), thread_name_prefix="ends") as enders:
            for member in self._members:
                enders.submit(_shut_down, member.handle)
        self._callers.shutdown(wait=False, cancel_futures=True)

    # With the lock held

    def _send(self, requests: Mapping[int, InFlight]) -> None:
        for key, each in requests.items():
            num_requests = {
                index: len(member.requests)
                for index, member in enumerate(self._members)
                if member.is_alive
            }
            if not num_requests:
                self._unsent[key] = each
                continue
            idlest = min(num_requests, key=num_requests.__getitem__)
            most_requests = MAX_RATIO * num_requests[idlest] + MAX_EXCESS
            at = each.home.engine
            if at is None or num_requests.get(at, math.inf) > most_requests:
                at = idlest
                each.home.engine = idlest
            member = self._members[at]
            each.sent_s = time.monotonic()
            member.requests[key] = each
            member.handle.tell(Engine.begin, {key: each.request})

    def _fail(self, failure: RunError) -> None:
        self._failure = self._failure or failure
        self.fail_waiting(failure)

    def _forget_cancelled(self, key: int, future: Future[Completion]) -> None:
        if not future.cancelled():
            return
        with self._lock:
            self._unsent.pop(key, None)
            for member in self._members:
                if member.requests.pop(key, None) is not None and member.is_alive:
                    member.handle.tell(Engine.cancel, [key])

    # A thread of each engine's

    def _watch(self, index: int) -> None:
        has_engine = True
        while has_engine and not self._is_closed:
            member = self._members[index]
            try:
                outcomes = member.handle.ask(
                    POLL_WAIT_S + self._timeout_s, Engine.poll, POLL_WAIT_S
                )
                self._deliver(member, outcomes)
            except Exception as error:
                failure = _as_run_error(error, f"engine {index} could not be asked")
                has_engine = self._restart(index, failure)

    def _deliver(self, member: _Member, outcomes: Outcomes) -> None:
        with self._lock:
            finished_requests = [
                (member.requests.pop(key), outcome)
                for key, outcome in outcomes.items()
                if key in member.requests
            ]
            for each, outcome in finished_requests:
                if isinstance(outcome, Completion):
                    elapsed_s = time.monotonic() - each.sent_s
                    member.token_s.append(elapsed_s / max(1, len(outcome.token_ids)))
        # Outside the lock, since a callback of a future may submit again.
        for each, outcome in finished_requests:
            if isinstance(outcome, str):
                reason = f"request {each.request.request_id} cannot be generated: {outcome}"
                set_outcome(each.future, RequestRefused(reason))
            else:
                set_outcome(each.future, outcome)

    def _restart(self, index: int, error: RunError) -> bool:
        """Start an engine again, and send its requests again.

        Returns False once the pool is closed, or has given up.
        """
        with self._lock:
            if self._is_closed:
                return False
            member = self._members[index]
            member.is_alive = False
            open_requests = member.requests
            member.requests = {}
            self._num_restarts += 1
            is_last = self._num_restarts > self._max_restarts
        member.handle.kill()
        if is_last:
            failure = RunError(
                f"{error}. That was one more than --max_restarts {self._max_restarts}; give the "
                "same command again to go on from the last checkpoint"
            )
            with self._lock:
                self._unsent |= open_requests
                self._fail(failure)
            self._on_failure(failure)  # outside the lock, since the callback may hold another lock
            return False
        self._say(
            f"{error}; starting it again ({self._num_restarts} of {self._max_restarts} restarts)"
        )
        with self._lock:
            self._send(open_requests)  # to the others, meanwhile
        try:
            handle = self._make_engine(index)
            with self._lock:
                # Not alive yet: until `on_restart` has returned it holds the start model.
                self._members[index] = member = _Member(handle, is_alive=False)
                if self._is_closed:
                    handle.kill()
                    return False
            self._on_restart(index)
        except Exception as next_error:
            failure = _as_run_error(next_error, f"engine {index} could not be started again")
            return self._restart(index, failure)
        with self._lock:
            member.is_alive = True
            unsent = self._unsent
            self._unsent = {}
            self._send(unsent)
        return True


def set_outcome(future: Future[Any], outcome: Any) -> None:
    """Set a result, or an exception if `outcome` is one; does nothing to a cancelled future."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _shut_down(handle: RayEngine) -> None:
    """Have an engine end vLLM's workers and their shared memory, which outlive it; then kill it."""
    with contextlib.suppress(RunError):
        handle.ask(END_TIMEOUT_S, Engine.shutdown)
    handle.kill()


def _as_run_error(error: Exception, what_failed: str) -> RunError:
    """The error itself, or a RunError for an unexpected one, whose traceback goes to the log."""
    if isinstance(error, RunError):
        return error
    log.exception(what_failed)
    return RunError(f"{what_failed}: {error}")
