"""The Ray of one run, started by a small process in a session of its own.

Ray starts its servers as children of whoever calls `ray.init`, in that process's group, and has no
public way to say otherwise. A signal to the group of a run (Ctrl-C, `timeout`, systemd, a job
scheduler) would end them together with the driver, which still has a checkpoint to write through
them. So another process calls it, and the driver joins.

The file is also run by its path, and imports the standard library and Ray only.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Begins the line that tells the driver where to join.
ADDRESS = "address: "
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class OwnRay:
    """The driver's handle on the process that starts Ray."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Begin to start Ray, with `options` of `ray.init`."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(options)],
            stdin=subprocess.PIPE,  # its other end closes with the driver
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin = self._process.stdin
        self._output = self._process.stdout

    def address(self) -> str:
        """Wait until Ray has started; returns the address to join.

        Raises:
            RuntimeError: it did not start; the message is the last line of its output.
        """
        last = "it said nothing"
        for line in self._output:
            if line.startswith(ADDRESS):
                return line.removeprefix(ADDRESS).strip()
            last = line.strip() or last
        raise RuntimeError(last)

    def watch(self, on_end: Callable[[], Any]) -> None:
        """Call `on_end` from a thread if Ray ends before `finish` is called."""

        def wait() -> None:
            self._output.read()
            self._process.wait()
            if not self._stdin.closed:
                on_end()

        threading.Thread(target=wait, daemon=True, name="own Ray").start()

    def finish(self) -> None:
        """End Ray. The watchdog kills processes that stay."""
        self._stdin.close()


def main(options: str) -> None:
    """Start Ray, print its address, and wait until stdin or one of Ray's servers ends."""
    import ray

    # Some (systemd, a job scheduler) signal every process of a run, in whichever session; Ray's
    # servers and workers inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    context: Any = ray.init(
        address="local",
        log_to_driver=False,
        configure_logging=False,
        **json.loads(options),
    )
    print(f"{ADDRESS}{context.address_info['address']}", flush=True)
    # None where there is no /proc: there Ray itself looks for a lost server for a minute, and ends
    # the driver.
    children = " ".join(
        path.read_text() for path in Path("/proc/self/task").glob("*/children")
    ).split()
    servers = [
        pid
        for pid in children
        if Path(f"/proc/{pid}/comm").read_text().strip() in ("gcs_server", "raylet")
    ]
    select.select([sys.stdin, *(os.pidfd_open(int(pid)) for pid in servers)], [], [])
    os._exit(0)  # the kernel ends Ray's servers with this process


if __name__ == "__main__":
    del sys.path[0]  # our own folder: a file of ours would shadow a library of the same name
    main(sys.argv[1])
