"""One event loop, in a thread of its own, for all that verifiers wait for."""

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any

_STARTING = threading.Lock()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine. All run in one loop, so that clients of servers keep their connections."""
    with _STARTING:
        loop = _loop()
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


def awaited(given: Any) -> list[Any]:
    """The entries of a list, which may be awaitable, as each of its entries may.

    Those are awaited all at once; where one raises, its error is the entry.
    """
    if not inspect.isawaitable(given):
        given = list(given)
        if not any(map(inspect.isawaitable, given)):
            return given
    return run(_entries(given))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


async def _entries(given: Any) -> list[Any]:
    entries = await _value(given)
    return await asyncio.gather(*map(_value, entries), return_exceptions=True)


async def _value(given: Any) -> Any:
    try:
        return await given if inspect.isawaitable(given) else given
    except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop for all others
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
