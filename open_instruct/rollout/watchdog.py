"""A small process that outlives the driver and takes a local Ray down with it, also after `kill -9`.

Ray's servers die with the driver, but what they started may stay: agents for half a minute, a frozen
actor for ever, and the folder of sockets and logs on the disk. Every process of the cluster carries a
mark in its environment, which children inherit. The watchdog waits for the end of the driver, kills
whatever carries the mark, and removes the folder. An orderly end takes the same way.

The file is also run by its path, and imports the standard library only, so a watchdog costs a few megabytes.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Also the prefix under which a process of the fleet may keep files in shared memory.
MARK_VARIABLE = "OPEN_INSTRUCT_FLEET"
SHARED_MEMORY = Path("/dev/shm")
POLL_INTERVAL_S = 0.5
SWEEP_TIMEOUT_S = 20.0


class Watchdog:
    """The driver's end of it."""

    def __init__(self, folder: Path, *, logs_folder: Path | None) -> None:
        """Guard `folder`, which is removed in the end; workers' logs in it are copied to `logs_folder` first."""
        self._mark = f"open_instruct-{os.getpid()}-{os.urandom(4).hex()}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self._mark, str(os.getpid()), str(folder), str(logs_folder or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the terminal is for the driver
        )

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Processes that are started in here, and those that they start, end with the driver."""
        os.environ[MARK_VARIABLE] = self._mark
        try:
            yield
        finally:
            del os.environ[MARK_VARIABLE]

    def finish(self) -> None:
        """Sweep now; returns when nothing is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(mark: str, driver: int, folder: Path, logs_folder: Path | None) -> None:
    """Wait for the driver's end, then sweep."""
    # The pipe tells at once, unless a forked child of the driver holds its other end too.
    while os.getppid() == driver:
        if select.select([sys.stdin], [], [], POLL_INTERVAL_S)[0]:
            break
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    while (pids := _marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    if logs_folder is not None:
        with contextlib.suppress(OSError):
            _keep_logs(folder, logs_folder)
    shutil.rmtree(folder, ignore_errors=True)
    for path in SHARED_MEMORY.glob(f"{mark}*"):
        path.unlink(missing_ok=True)


def _marked(mark: str) -> list[int]:
    """Living processes that were started with the mark in their environment; none where there is no /proc."""
    entry = f"{MARK_VARIABLE}={mark}".encode()
    pids = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if entry in environment.read_bytes().split(b"\0"):
                pids.append(int(environment.parent.name))
    return pids


def _keep_logs(folder: Path, logs_folder: Path) -> None:
    for path in sorted(folder.glob("session_2*/logs/worker-*")):
        lines = path.read_bytes().splitlines()
        if any(not line.startswith(b":") for line in lines):  # Ray's own first lines do
            logs_folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, logs_folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]) if sys.argv[4] else None)
