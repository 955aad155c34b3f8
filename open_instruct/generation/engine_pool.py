"""The pool of all engines: requests go to the least busy one, or to the one that holds their
episode, and are asked again when their engine dies.

The pool gives every request a key of its own, since request ids repeat after a restart of the
learners. A completion is handed out once: answers of an engine that was given up are ignored.
"""

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
# An episode leaves the engine that holds its keys and values for one with so many times fewer
# requests, and a few.
BUSIER = 2
FEW = 4
# Completions in the window of an engine's pace; none is reported of fewer than a quarter.
PACE_OF = 64
END_TIMEOUT_S = 10.0


@dataclass(slots=True)
class InFlight:
    """A request in flight, with the one future of its completion.

    The engine's process knows its key only.
    """

    request: GenerationRequest
    home: Home
    future: Future[Completion] = field(default_factory=Future)
    asked_s: float = 0.0  # when its engine was asked last


@dataclass(slots=True)
class _Member:
    """An engine with the requests that are with it. Guarded by the pool's lock."""

    handle: RayEngine
    asked: dict[int, InFlight] = field(default_factory=dict)
    is_alive: bool = True
    token_s: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_OF))


class EnginePool:
    """Engines that are asked together. Thread-safe; usable once constructed, and until `close`.

    Args:
        engines: by index, each constructed.
        make_engine: builds the engine of an index anew; blocks until it is constructed.
        on_restart: brings a new engine to the weights of the others; it gets no request before
            that.
        on_failure: called with the reason once the pool has given up and starts no engine again.
        fleet: says how long an engine may take to answer, and how many restarts there may be in
            all.
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
        self._homeless: dict[int, InFlight] = {}  # asked while no engine lived
        self._num_restarts = 0
        self._failure: RunError | None = None
        self._is_closed = False
        self._callers = ThreadPoolExecutor(len(engines), thread_name_prefix="engines")
        for index in range(len(engines)):
            threading.Thread(
                target=self._watch, args=(index,), name=f"engine-{index}", daemon=True
            ).start()

    def __len__(self) -> int:
        return len(self._members)

    # Completions

    def submit(self, request: GenerationRequest, home: Home | None = None) -> Future[Completion]:
        """Submit a request. Cancelling its future gives it up; the future fails with nothing but a
        RunError.

        Requests with one `home`, the turns of an episode, go to one engine, unless that is much
        busier than another.
        """
        asked = InFlight(request, home or Home())
        with self._lock:
            key = next(self._keys)
            if self._failure is not None:
                asked.future.set_exception(self._failure)
            else:
                self._send({key: asked})
        asked.future.add_done_callback(partial(self._forget_cancelled, key))
        return asked.future

    # All engines at once

    def call_all(
        self, timeout_s: float, method: EngineMethod[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call a method of every engine and return the results, by engine.

        Raises:
            RunError: the first failure of an engine, raised after all calls have ended.
        """
        return self.results(self.start_all(timeout_s, method, *args, **kwargs))

    def start_all(
        self, timeout_s: float, method: EngineMethod[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[R]]:
        """Have every engine begin a method, with the same arguments."""

        asking = [
            partial(member.handle.ask, timeout_s, method, *args, **kwargs)
            for member in self._members
        ]
        return [self._callers.submit(each) for each in asking]

    def start_each(
        self, timeout_s: float, method: Callable[[Engine, A], R], arguments: Sequence[A]
    ) -> list[Future[R]]:
        """Have every engine begin a method, each with its own argument."""
        each = zip(self._members, arguments, strict=True)
        return [
            self._callers.submit(member.handle.ask, timeout_s, method, own) for member, own in each
        ]

    @staticmethod
    def results(calls: Sequence[Future[R]]) -> list[R]:
        """The return values of all engines; raises as `call_all` does, once all have ended."""
        errors = [error for call in calls if (error := call.exception()) is not None]
        if errors:
            raise errors[0]
        return [call.result() for call in calls]

    def pids(self) -> list[int]:
        """Process ids, by engine; those that do not answer are left out."""
        calls = self.start_all(self._timeout_s, Engine.pid)
        return [call.result() for call in calls if call.exception() is None]

    def silent(self) -> set[int]:
        """The engines that do not answer, because they died or failed."""
        return {
            index
            for index, call in enumerate(self.start_all(self._timeout_s, Engine.pid))
            if call.exception()
        }

    def paces(self) -> list[float | None]:
        """Each engine's median seconds of decoding per token; all have as many requests at once."""
        with self._lock:
            latest = [list(member.token_s) for member in self._members]
        return [median(each) if len(each) >= PACE_OF // 4 else None for each in latest]

    def fail_waiting(self, failure: RunError) -> None:
        """Fail all completions that are waited for now; those asked for later come as ever."""
        with self._lock:
            left = list(self._homeless.values())
            self._homeless = {}
            for member in self._members:
                if member.is_alive:
                    member.handle.tell(Engine.cancel, list(member.asked))
                left += member.asked.values()
                member.asked = {}
        for each in left:
            set_outcome(each.future, failure)

    def close(self) -> None:
        """End the engines; whoever waits for a completion gets a RunError."""
        with self._lock:
            self._is_closed = True
            self._fail(RunError("the engines were shut down"))
        with ThreadPoolExecutor(len(self._members), thread_name_prefix="ends") as enders:
            for member in self._members:
                enders.submit(_end, member.handle)
        self._callers.shutdown(wait=False, cancel_futures=True)

    # With the lock held

    def _send(self, asked: Mapping[int, InFlight]) -> None:
        for key, each in asked.items():
            num_asked = {
                at: len(member.asked) for at, member in enumerate(self._members) if member.is_alive
            }
            if not num_asked:
                self._homeless[key] = each
                continue
            idlest = min(num_asked, key=num_asked.__getitem__)
            at = each.home.engine
            if at is None or num_asked.get(at, math.inf) > BUSIER * num_asked[idlest] + FEW:
                at = each.home.engine = idlest
            member = self._members[at]
            each.asked_s = time.monotonic()
            member.asked[key] = each
            member.handle.tell(Engine.begin, {key: each.request})

    def _fail(self, failure: RunError) -> None:
        self._failure = self._failure or failure
        self.fail_waiting(failure)

    def _forget_cancelled(self, key: int, future: Future[Completion]) -> None:
        if not future.cancelled():
            return
        with self._lock:
            self._homeless.pop(key, None)
            for member in self._members:
                if member.asked.pop(key, None) is not None and member.is_alive:
                    member.handle.tell(Engine.cancel, [key])

    # A thread of each engine's

    def _watch(self, index: int) -> None:
        is_there = True
        while is_there and not self._is_closed:
            member = self._members[index]
            try:
                self._take(
                    member,
                    member.handle.ask(POLL_WAIT_S + self._timeout_s, Engine.poll, POLL_WAIT_S),
                )
            except Exception as error:
                is_there = self._restarted(
                    index, _failure(error, f"engine {index} could not be asked")
                )

    def _take(self, member: _Member, outcomes: Outcomes) -> None:
        with self._lock:
            taken = [
                (member.asked.pop(key), outcome)
                for key, outcome in outcomes.items()
                if key in member.asked
            ]
            for each, outcome in taken:
                if isinstance(outcome, Completion):
                    member.token_s.append(
                        (time.monotonic() - each.asked_s) / max(1, len(outcome.token_ids))
                    )
        # Outside the lock, since a callback of a future may submit again.
        for each, outcome in taken:
            if isinstance(outcome, str):
                set_outcome(
                    each.future,
                    RunError(f"request {each.request.request_id} cannot be generated: {outcome}"),
                )
            else:
                set_outcome(each.future, outcome)

    def _restarted(self, index: int, error: RunError) -> bool:
        """Start the engine anew, and ask its requests again.

        Returns whether there is an engine to go on with.
        """
        with self._lock:
            if self._is_closed:
                return False
            member = self._members[index]
            member.is_alive = False
            left = member.asked
            member.asked = {}
            self._num_restarts += 1
            is_last = self._num_restarts > self._max_restarts
        member.handle.kill()
        if is_last:
            failure = RunError(
                f"{error}. That was one more than --max_restarts {self._max_restarts}; give the "
                "same command again to go on from the last checkpoint"
            )
            with self._lock:
                self._homeless |= left
                self._fail(failure)
            self._on_failure(failure)  # outside the lock, since the callback may hold another lock
            return False
        self._say(
            f"{error}; starting it again ({self._num_restarts} of {self._max_restarts} restarts)"
        )
        with self._lock:
            self._send(left)  # the others have room meanwhile
        try:
            handle = self._make_engine(index)
            with self._lock:
                # Not alive yet: it holds the start model until it was brought the weights of the
                # others.
                self._members[index] = member = _Member(handle, is_alive=False)
                if self._is_closed:
                    handle.kill()
                    return False
            self._on_restart(index)
        except Exception as again:
            return self._restarted(
                index, _failure(again, f"engine {index} could not be started again")
            )
        with self._lock:
            member.is_alive = True
            waiting = self._homeless
            self._homeless = {}
            self._send(waiting)
        return True


def set_outcome(future: Future[Any], outcome: Any) -> None:
    """Set a result, or an exception where `outcome` is one; nothing where the future was
    cancelled.
    """
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _end(handle: RayEngine) -> None:
    """Kill an engine after it has ended vLLM's workers and removed their shared memory, which would
    outlive it.
    """
    with contextlib.suppress(RunError):
        handle.ask(END_TIMEOUT_S, Engine.shutdown)
    handle.kill()


def _failure(error: Exception, what_failed: str) -> RunError:
    """The error itself; a RunError in place of an unexpected one, whose traceback goes to the
    log.
    """
    if isinstance(error, RunError):
        return error
    log.exception(what_failed)
    return RunError(f"{what_failed}: {error}")
