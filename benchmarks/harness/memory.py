"""Memory of processes, as Linux counts it."""

import threading
import time
from pathlib import Path

MIB = 2**20
SAMPLE_EVERY_S = 0.003
# glibc keeps freed memory for later. So every allocation from 64 KiB on is a mapping that goes back when it is freed.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
}


def memory_bytes(*names: str, pid: str = "self") -> tuple[int, ...]:
    """Fields of /proc/PID/status: RssAnon (anonymous), VmRSS (mapped pages of files too), VmHWM (the peak of that)."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
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
