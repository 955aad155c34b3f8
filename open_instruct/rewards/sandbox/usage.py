"""Count what no limit of Linux bounds: the threads of programs, and their memory together.

A limit of processes counts those of the whole user, and not root's; one of memory is each process's
own. So the process that forks the programs of a sandbox counts, ten times a second, and says which
are to be ended. In between they may take more. A run has several sandboxes, one in each process of
verifiers, so memory is counted over all of this user's.
"""

import os
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from open_instruct.rewards.sandbox.walls import TABLES

# Of the fields of /proc/PID/stat, those behind the name of the program, which may have any letters.
THREADS = 17
RESIDENT_PAGES = 21
SERVER = b"open_instruct.rewards.sandbox.server"  # in the command of a process that forks
SEARCH_INTERVAL_S = 1.0
MANY_SANDBOXES = 64  # less than the part of one of so many is nothing to search for the others for


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The threads and the bytes of memory of a process."""

    threads: int
    num_bytes: int


def read_usage(pid: int) -> Usage:
    """The usage of a process; 0 if it has ended, or if there is no /proc."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pages = int(fields[RESIDENT_PAGES])
        return Usage(threads=int(fields[THREADS]), num_bytes=pages * os.sysconf("SC_PAGE_SIZE"))
    return Usage(threads=0, num_bytes=0)


def find_sandboxes() -> list[int]:
    """The processes of this user that fork programs."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            # Of its words, the name of what answers is empty.
            forks_programs = command.endswith(b"\0\0")
            if SERVER in command and forks_programs and folder.stat().st_uid == os.getuid():
                pids.append(int(folder.name))
    return pids


def find_children(pid: int) -> list[int]:
    """The processes that another has forked.

    By the parent that each process names: not every kernel is built with
    /proc/PID/task/PID/children.
    """
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def read_private_bytes(server: int, pids: Iterable[int]) -> dict[int, int]:
    """The memory of each program, without what it shares with the process that has forked it."""
    shared_bytes = read_usage(server).num_bytes
    return {pid: max(0, read_usage(pid).num_bytes - shared_bytes) for pid in pids}


class Allowance:
    """How much the programs forked by this process may have.

    Args:
        max_threads: of one program.
        max_bytes: of the programs of all sandboxes together.
    """

    def __init__(self, *, max_threads: int, max_bytes: int) -> None:
        self._max_threads = max_threads
        self._max_bytes = max_bytes
        self._sandboxes: list[int] = []
        self._next_search_s = 0.0

    @classmethod
    def for_machine(cls) -> "Allowance":
        counted = TABLES["counted"]
        share = int(counted["share_of_memory"] * psutil.virtual_memory().total)
        # A program that is alone may always have what its own limit gives it.
        return cls(max_threads=counted["threads"], max_bytes=max(share, TABLES["limits"]["AS"]))

    def find_excess(self, pids: Collection[int]) -> list[int]:
        """The programs to end: with too many threads, or the largest if all have too much memory.

        Every sandbox counts for itself, at the same time as the others. So each ranks the programs
        of all, and ends those of its own that the ranking begins with: they agree on which is the
        largest.
        """
        excess = [pid for pid in pids if read_usage(pid).threads > self._max_threads]
        own_bytes = read_private_bytes(os.getpid(), {*pids} - {*excess})
        sandboxes = [own_bytes, *self._read_bytes_of_others(sum(own_bytes.values()))]
        total = sum(sum(programs.values()) for programs in sandboxes)
        programs_by_size: list[tuple[int, int]] = []
        for programs in sandboxes:
            # One within its part is left alone: it does not count, and so would not end its own.
            if sum(programs.values()) * len(sandboxes) > self._max_bytes:
                programs_by_size += [(num_bytes, pid) for pid, num_bytes in programs.items()]
        programs_by_size.sort()
        while programs_by_size and total > self._max_bytes:
            num_bytes, pid = programs_by_size.pop()
            total -= num_bytes
            if pid in own_bytes:
                excess.append(pid)
        return excess

    def _read_bytes_of_others(self, num_bytes: int) -> list[dict[int, int]]:
        """The memory of each other sandbox's programs.

        None are read if `num_bytes`, which is ours, is within our part.
        """
        if num_bytes * MANY_SANDBOXES <= self._max_bytes:
            return []
        if time.monotonic() > self._next_search_s:
            self._sandboxes = [pid for pid in find_sandboxes() if pid != os.getpid()]
            self._next_search_s = time.monotonic() + SEARCH_INTERVAL_S
        if num_bytes * (len(self._sandboxes) + 1) <= self._max_bytes:
            return []
        return [read_private_bytes(server, find_children(server)) for server in self._sandboxes]
