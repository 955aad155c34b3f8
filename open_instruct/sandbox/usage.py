"""What programs take that no limit of Linux holds: threads, and memory all together.

A limit of processes counts those of the whole user, and not root's; one of memory is each process's own. So the process
that forks the programs counts, ten times a second, and says which are to be ended. In between they may take more.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from open_instruct.sandbox.walls import TABLES

# Of the fields of /proc/PID/stat, those behind the name of the program, which may have any letters.
THREADS, RESIDENT_PAGES = 17, 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a process has: its threads, and its bytes of memory."""

    threads: int
    num_bytes: int


def read_usage(pid: int) -> Usage:
    """What a process has; nothing where it has ended, or where there is no /proc."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pages = int(fields[RESIDENT_PAGES])
        return Usage(threads=int(fields[THREADS]), num_bytes=pages * os.sysconf("SC_PAGE_SIZE"))
    return Usage(threads=0, num_bytes=0)


class Allowance:
    """How much the programs forked by this process may have.

    Args:
        max_threads: of one program.
        max_bytes: of all together, beside what each shares with this process.
    """

    def __init__(self, *, max_threads: int, max_bytes: int) -> None:
        self._max_threads = max_threads
        self._max_bytes = max_bytes

    @classmethod
    def for_machine(cls) -> "Allowance":
        counted = TABLES["counted"]
        share = int(counted["share_of_memory"] * psutil.virtual_memory().total)
        # A program that is alone may always have what its own limit gives it.
        return cls(max_threads=counted["threads"], max_bytes=max(share, TABLES["limits"]["AS"]))

    def find_excess(self, pids: Iterable[int]) -> list[int]:
        """The programs to end: those with too many threads, and the largest while all have too much memory."""
        usages = {pid: read_usage(pid) for pid in pids}
        excess = [pid for pid, usage in usages.items() if usage.threads > self._max_threads]
        shared = read_usage(os.getpid()).num_bytes
        own_bytes = {pid: max(0, usage.num_bytes - shared) for pid, usage in usages.items() if pid not in excess}
        while sum(own_bytes.values()) > self._max_bytes:
            largest = max(own_bytes, key=own_bytes.__getitem__)
            excess.append(largest)
            del own_bytes[largest]
        return excess
