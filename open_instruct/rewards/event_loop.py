"""One event loop, in a thread of its own, for all that verifiers wait for."""

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from contextlib import suppress
from functools import cache
from typing import Any

_STARTING = threading.Lock()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine.

    All run in one loop, so that clients of servers keep their connections.
    """
    with _STARTING:
        loop = lasting_loop("verifiers")
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


def awaited(given: Any) -> list[Any]:
    """The entries of a list, where the list or its entries may be awaitable.

    Entries are awaited all at once; where one raises, its error is the entry.
    """
    if inspect.iscoroutine(given):
        given = run(given)
    entries = list(given)
    return run(_together(entries)) if any(map(inspect.isawaitable, entries)) else entries


@cache
def lasting_loop(name: str) -> asyncio.AbstractEventLoop:
    """The loop of that name, in a thread of its own: whatever its coroutines raise, it runs on for
    all others.
    """
    loop = asyncio.new_event_loop()

    def keep_running() -> None:
        while True:
            # Exit() in a verifier must not end the loop for all others.
            with suppress(BaseException):
                loop.run_forever()

    threading.Thread(target=keep_running, name=name, daemon=True).start()
    return loop


async def _together(entries: list[Any]) -> list[Any]:
    async def finished(entry: Any) -> Any:
        return await entry if inspect.isawaitable(entry) else entry

    return await asyncio.gather(*map(finished, entries), return_exceptions=True)
