"""What takes the host's time, done while the device is busy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
V = TypeVar("V")


def built_ahead(build: Callable[[T], V], items: Iterable[T]) -> Iterator[V]:
    """`build` of each of `items`, in order; while the caller is busy with one, a thread builds the next, and no more.

    An error is raised where what it is of is asked for. Closed before its end, it waits for what is being built.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="built-ahead") as thread:
        wanted: Future[V] | None = None
        for item in items:
            following = thread.submit(build, item)
            if wanted is not None:
                yield wanted.result()
            wanted = following
        if wanted is not None:
            yield wanted.result()
