"""The host builds the next batch in a thread while the device is busy."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
V = TypeVar("V")


def built_ahead(build: Callable[[T], V], items: Iterable[T]) -> Iterator[V]:
    """`build` of each of `items`, in order; while the caller is busy with one, a thread builds the next, and no more.

    An error of `build` is raised when its result is asked for. Closing the iterator early waits for the thread.
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
