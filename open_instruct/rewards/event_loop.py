"""One event loop, in a thread of its own, for all that verifiers wait for."""

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from contextlib import suppress
from functools import cache
from typing import Any

_STARTING = threading.Lock()


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine.

    All run in one loop, so that clients of servers keep their connections.
    """
    with _STARTING:
        loop = start_loop("verifiers")
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


def await_entries(entries: Any) -> list[Any]:
    """The entries of a list, once the list and each of its entries have been awaited.

    Entries are awaited all at once; where one raises, its error is the entry.
    """
    if inspect.iscoroutine(entries):
        entries = run_coroutine(entries)
    entries = list(entries)
    if any(map(inspect.isawaitable, entries)):
        return list(run_coroutine(_gather(entries)))
    return entries


@cache
def start_loop(name: str) -> asyncio.AbstractEventLoop:
    """The loop of that name, in a thread of its own; started once.

    Whatever its coroutines raise, it runs on for all others.
    """
    loop = asyncio.new_event_loop()

    def keep_running() -> None:
        while True:
            # Exit() in a verifier must not end the loop for all others.
            with suppress(BaseException):
                loop.run_forever()

    threading.Thread(target=keep_running, name=name, daemon=True).start()
    return loop


async def _gather(entries: list[Any]) -> list[Any]:
    return await asyncio.gather(*map(_await_entry, entries), return_exceptions=True)


async def _await_entry(entry: Any) -> Any:
    if inspect.isawaitable(entry):
        return await entry
    return entry
