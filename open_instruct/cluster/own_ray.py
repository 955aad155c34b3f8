"""The Ray of one run, started by a small process in a session of its own.

Ray starts its servers as children of whoever calls `ray.init`, in that process's group, and has no public way to say
otherwise. A signal to the group of a run (Ctrl-C, `timeout`, systemd, a job scheduler) would end them together with
the driver, which still has a checkpoint to write through them. So another process calls it, and the driver joins.

The file is also run by its path, and imports the standard library and Ray only.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Begins the line that tells the driver where to join.
ADDRESS = "address: "
SERVERS = ("gcs_server", "raylet")


class OwnRay:
    """The driver's end of it."""

    def __init__(self, options: Mapping[str, Any], *, log: Path) -> None:
        """Begin to start Ray, with `options` of `ray.init`; what it says on stderr goes to `log`."""
        self._log = log
        self._is_ending = False
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(options)],
                stdin=subprocess.PIPE,  # its other end closes with the driver
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._told = process, process.stdin, process.stdout

    def address(self) -> str:
        """Wait until it has started.

        Raises:
            RuntimeError: it did not; the last line that it said.
        """
        for line in self._told:
            if line.startswith(ADDRESS):
                return line.removeprefix(ADDRESS).strip()
        said = self._log.read_text(errors="replace").split("\n")
        raise RuntimeError(next((line for line in reversed(said) if line.strip()), "it said nothing"))

    def watch(self, on_end: Callable[[], Any]) -> None:
        """Call `on_end`, from a thread, should it end before `finish`."""

        def wait() -> None:
            for _ in self._told:
                pass
            self._process.wait()
            if not self._is_ending:
                on_end()

        threading.Thread(target=wait, daemon=True, name="own Ray").start()

    def finish(self) -> None:
        """Have it end; the watchdog sees to what does not."""
        self._is_ending = True
        self._stdin.close()


def main(options: str) -> None:
    """Start Ray, tell its address, and keep it until stdin ends, or one of its servers does."""
    import ray

    address = ray.init(address="local", log_to_driver=False, configure_logging=False, **json.loads(options)).address_info
    ends = [os.pidfd_open(pid) for pid in _servers()] if hasattr(os, "pidfd_open") else []
    print(f"{ADDRESS}{address['address']}", flush=True)
    select.select([sys.stdin, *ends], [], [])
    os._exit(0)  # Ray's servers end with this process; it itself would look for a lost one for a minute


def _servers() -> list[int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() in SERVERS]


if __name__ == "__main__":
    del sys.path[0]  # our own folder: a file of ours would shadow a library of the same name
    main(sys.argv[1])
