"""Names the code that blocks an event loop, such as a `time.sleep` in an `async def`."""

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
OWN_LOOP_REMEDY = (
    "let it `await` what it waits for, with `asyncio.to_thread` where that is a plain function"
)


class LoopWatch:
    """A thread that asks an event loop for a sign of life, and names what runs there when none
    comes.

    Args:
        thread_name: of the thread in which the loop runs.
        limit_s: how long the loop may be silent.
        warn: is given a message, once for each function that blocks the loop.
        environment: the name of the one whose loop it is; None where all others share it.
        package: calls the environment's code in this loop, and is not named where that blocks.
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
        self._users = "all environments" if environment is None else environment
        self._remedy = SHARED_LOOP_REMEDY if environment is None else OWN_LOOP_REMEDY
        self._warned: set[str] = set()
        self._is_closed = threading.Event()
        self.blocker = ""
        """What blocks the loop at present, such as `Shop.buy (mine.py:12), for 7 s`; empty where
        nothing does.
        """
        threading.Thread(target=self._watch, name=f"watch-{thread_name}", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    async def probe(self) -> str:
        """Which loop is blocked at this moment, and by what; empty where it answers.

        Call it in another loop.
        """
        answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop))
        await asyncio.wait([answer], timeout=PROBE_S)
        blocker = "" if answer.done() else find_blocker(self._thread_name, self._package)
        return f"the event loop of {self._users} is blocked by {blocker}" if blocker else ""

    def _watch(self) -> None:
        while not self._is_closed.wait(self._interval_s):
            alive = threading.Event()
            asked_s = time.monotonic()
            self._loop.call_soon_threadsafe(alive.set)
            while not alive.wait(self._limit_s) and not self._is_closed.is_set():
                self._name_blocker(time.monotonic() - asked_s)
            self.blocker = ""

    def _name_blocker(self, silent_s: float) -> None:
        place = find_blocker(self._thread_name, self._package)
        if not place:  # the machine is slow
            return
        self.blocker = f"{place}, for {silent_s:.0f} s"
        function = place.partition(" ")[0]
        if function in self._warned:
            return
        self._warned.add(function)
        self._warn(
            f"{place} has blocked the event loop of {self._users} for {silent_s:.0f} s, so that "
            f"other episodes wait and may take too long: {self._remedy}"
        )


def find_blocker(thread_name: str, package: str = "") -> str:
    """The foreign function that runs in the loop of this thread, with its file and line; empty
    where none does.

    Example: `Shop.buy (mine.py:12)`, also where that has called something of a library. A function
    of `package` is named only where that has called nobody else's.
    """
    idents = [each.ident for each in threading.enumerate() if each.name == thread_name]
    frame = sys._current_frames().get(idents[0] or 0) if idents else None
    frames = list(_frames(frame))[::-1]  # from the thread's first function on
    last_of_ours = max((at for at, each in enumerate(frames) if _is_in(each, OURS)), default=-1)
    foreign = [
        each
        for each in frames[last_of_ours + 1 :]
        if not any(_is_in(each, part) for part in LIBRARY)
    ]
    if not foreign:
        return ""
    blocking = next((each for each in foreign if not _is_of_package(each, package)), foreign[0])
    code = blocking.f_code
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{blocking.f_lineno})"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in(frame: FrameType, folder: str) -> bool:
    return frame.f_code.co_filename.startswith(folder)


def _is_of_package(frame: FrameType, package: str) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] == package
