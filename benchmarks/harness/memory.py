"""Memory of processes, as Linux counts it."""

import threading
import time
from pathlib import Path

import psutil

MIB = 2**20
SAMPLE_EVERY_S, SAMPLE_CHILDREN_EVERY_S = 0.003, 0.2
# glibc keeps freed memory for later. So every allocation from 64 KiB on is a mapping that goes back
# when it is freed.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
}


def memory_bytes(*names: str, pid: str = "self") -> tuple[int, ...]:
    """Fields of /proc/PID/status:

    RssAnon (anonymous), VmRSS (mapped pages of files too), VmHWM (the peak of that).
    """
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return tuple(int(fields[name].split()[0]) * 1024 for name in names)


def forget_peak() -> None:
    """VmHWM starts anew, from what is held now."""
    Path("/proc/self/clear_refs").write_text("5")


class PeakMemory(threading.Thread):
    """Samples this process's memory until stopped; peaks in bytes above the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._running = True
        self._anonymous_start, self._resident_start = memory_bytes("RssAnon", "VmRSS")
        self.anonymous_bytes = self.resident_bytes = 0

    def run(self) -> None:
        while self._running:
            anonymous, resident = memory_bytes("RssAnon", "VmRSS")
            self.anonymous_bytes = max(self.anonymous_bytes, anonymous - self._anonymous_start)
            self.resident_bytes = max(self.resident_bytes, resident - self._resident_start)
            time.sleep(SAMPLE_EVERY_S)

    def stop(self) -> None:
        self._running = False
        self.join()


class PeakOfChildren(threading.Thread):
    """Samples the memory of all processes that this one has started, and that they have, until
    stopped.

    It is what no file backs, anonymous and shared memory, each page counted once; libraries would
    be counted with all others that have loaded them. `most_bytes` is the most of the sum, of which
    `parts` are the processes by name.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self.most_bytes = 0
        self.parts: list[tuple[str, int]] = []

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_CHILDREN_EVERY_S):
            parts = [own_bytes(process) for process in psutil.Process().children(recursive=True)]
            if (total := sum(size for _, size in parts)) > self.most_bytes:
                self.most_bytes, self.parts = total, parts

    def stop(self) -> None:
        self._ended.set()
        self.join()


def own_bytes(process: psutil.Process) -> tuple[str, int]:
    """Its name, and its proportional share of memory that no file backs: none if it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        sizes = [
            int(line.split()[1]) * 1024
            for line in lines
            if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
        ]
        return (process.cmdline() or [process.name()])[0], sum(sizes)
    except (OSError, psutil.Error):
        return "", 0
