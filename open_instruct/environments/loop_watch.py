"""A watch finds the code that blocks an event loop, such as a `time.sleep` in an `async def`."""

import asyncio
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

OURS = str(Path(__file__).resolve().parents[1])
LIBRARY = (str(Path(asyncio.__file__).parent), selectors.__file__)
INTERVAL_S = 1.0
LIMIT_S = 5.0
PROBE_S = 0.5
SHARED_LOOP_REMEDY = (
    "let it `await` what it waits for, or make it a plain `def`, which runs in a thread of its own"
)
DEDICATED_LOOP_REMEDY = (
    "let it `await` what it waits for, with `asyncio.to_thread` where that is a plain function"
)


class LoopWatch:
    """A thread that checks whether an event loop answers, and finds what blocks it if not.

    Args:
        thread_name: of the thread in which the loop runs.
        limit_s: how long the loop may be silent.
        warn: called with a message, once for each function that blocks the loop.
        environment: the only one that uses the loop; None for the loop that all others share.
        package: calls the environment's code in this loop, and is not blamed if that blocks.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        thread_name: str,
        warn: Callable[[str], None],
        limit_s: float = LIMIT_S,
        interval_s: float = INTERVAL_S,
        environment: str | None = None,
        package: str = "",
    ) -> None:
        self._loop = loop
        self._thread_name = thread_name
        self._warn = warn
        self._limit_s = limit_s
        self._interval_s = interval_s
        self._package = package
        self._users = "all environments"
        self._remedy = SHARED_LOOP_REMEDY
        if environment is not None:
            self._users = environment
            self._remedy = DEDICATED_LOOP_REMEDY
        self._functions_warned_of: set[str] = set()
        self._is_closed = threading.Event()
        self.blocker = ""
        """What blocks the loop at present: `Shop.buy (mine.py:12), for 7 s`; empty if nothing."""
        threading.Thread(target=self._watch, name=f"watch-{thread_name}", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    async def probe(self) -> str:
        """Say which loop is blocked now, and by what; empty if it answers.

        Call it in another loop.
        """
        answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop))
        await asyncio.wait([answer], timeout=PROBE_S)
        if answer.done():
            return ""
        blocker = find_blocker(self._thread_name, self._package)
        if not blocker:
            return ""
        return f"the event loop of {self._users} is blocked by {blocker}"

    def _watch(self) -> None:
        while not self._is_closed.wait(self._interval_s):
            alive = threading.Event()
            began_s = time.monotonic()
            self._loop.call_soon_threadsafe(alive.set)
            while not alive.wait(self._limit_s) and not self._is_closed.is_set():
                self._name_blocker(time.monotonic() - began_s)
            self.blocker = ""

    def _name_blocker(self, silent_s: float) -> None:
        place = find_blocker(self._thread_name, self._package)
        if not place:  # the machine is slow
            return
        self.blocker = f"{place}, for {silent_s:.0f} s"
        function = place.partition(" ")[0]
        if function in self._functions_warned_of:
            return
        self._functions_warned_of.add(function)
        self._warn(
            f"{place} has blocked the event loop of {self._users} for {silent_s:.0f} s, so that "
            f"other episodes wait and may take too long: {self._remedy}"
        )


def find_blocker(thread_name: str, package: str = "") -> str:
    """Find the foreign function that runs in the loop of this thread; empty if none does.

    Example: `Shop.buy (mine.py:12)`, also if that function has called a library. A function of
    `package` is named only if it has called no other package's.
    """
    idents = [each.ident for each in threading.enumerate() if each.name == thread_name]
    frame = sys._current_frames().get(idents[0] or 0) if idents else None
    foreign: list[FrameType] = []  # the caller before what it calls
    for each in list(_walk_frames(frame))[::-1]:
        if _is_in(each, OURS):
            foreign = []  # only what the last function of ours calls
        elif not any(_is_in(each, part) for part in LIBRARY):
            foreign.append(each)
    if not foreign:
        return ""
    others = [each for each in foreign if not _is_of_package(each, package)]
    blocking = [*others, *foreign][0]
    code = blocking.f_code
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{blocking.f_lineno})"


def _walk_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in(frame: FrameType, folder: str) -> bool:
    return frame.f_code.co_filename.startswith(folder)


def _is_of_package(frame: FrameType, package: str) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] == package
