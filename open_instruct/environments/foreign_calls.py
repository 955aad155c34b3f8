"""Calls of code that others wrote: an environment's methods, and its tools.

A plain function runs in a thread of its own. A coroutine runs in an event loop that all
environments share, and that is not the loop of the episodes: code that blocks it delays other
environments, which then take too long, but no episode misses its timeout. Whatever is raised costs
the caller alone.
"""

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from open_instruct.rewards.event_loop import start_loop

FOREIGN_LOOP = "environments"
MAX_ERROR_CHARACTERS = 2000
# They steer an interpreter or a loop, and say nothing of a call's arguments.
CONTROL_FLOW = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)


class EnvironmentFault(Exception):
    """Raised by a tool if the policy is not at fault; it ends the episode as `env_error`.

    Example: `raise EnvironmentFault("the search server answers 503")`.
    """


def foreign_loop() -> asyncio.AbstractEventLoop:
    """The event loop in which all coroutines of environments run."""
    return start_loop(FOREIGN_LOOP)


async def call_foreign(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in a thread, or await it if it is a coroutine; returns its result.

    The thread is a new one each time, and nothing waits for its end: a function that hangs holds up
    only its episode.

    Raises:
        EnvironmentFault: in place of what is no ordinary error: SystemExit, KeyboardInterrupt,
            GeneratorExit, StopIteration, or a CancelledError that is not our own cancellation.
    """
    if inspect.iscoroutinefunction(function):
        return await _run_in_foreign_loop(function, args, kwargs)
    result = await _run_in_thread(function, args, kwargs)
    if inspect.iscoroutine(result):  # of a callable object, or a function that returns one
        return await _run_in_foreign_loop(lambda: result, (), {})
    return result


def describe_error(error: BaseException) -> str:
    """An error's type and text, cut if it is long; making the text may itself raise."""
    name = type(error).__name__
    try:
        text = f"{name}: {error}"
    except Exception:
        return name
    if len(text) <= MAX_ERROR_CHARACTERS:
        return text
    return f"{text[:MAX_ERROR_CHARACTERS]}… ({len(text):,} characters)"


async def _run_in_foreign_loop(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    async def run() -> tuple[Any, BaseException | None]:
        try:
            return await function(*args, **kwargs), None
        except BaseException as error:  # exit() and the like would end the loop for all others
            return None, error

    work = asyncio.run_coroutine_threadsafe(run(), foreign_loop())
    try:
        result, error = await asyncio.wrap_future(work)
    except asyncio.CancelledError as cancelled:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        result = None
        error = cancelled  # foreign code has cancelled it
    if error is not None:
        raise _as_ordinary_error(error)
    return result


async def _run_in_thread(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    future: Future[Any] = Future()

    def run() -> None:
        with suppress(InvalidStateError):  # the episode has given up
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:  # exit() must not leave the episode waiting
                future.set_exception(_as_ordinary_error(error))

    name = f"environment-{getattr(function, '__name__', 'call')}"
    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)


def _as_ordinary_error(error: BaseException) -> Exception:
    """The error itself, or an `EnvironmentFault` for one that no future or task may hold."""
    cause = error.__cause__
    if isinstance(error, RuntimeError) and isinstance(cause, StopIteration | StopAsyncIteration):
        error = cause  # Python makes a RuntimeError of one that leaves a coroutine
    if isinstance(error, Exception) and not isinstance(error, CONTROL_FLOW):
        return error
    fault = EnvironmentFault(describe_error(error))
    fault.__cause__ = error
    return fault
