"""The state of a process from /proc: whether it exists, is frozen, and is still the same one."""

import os
import socket
from functools import cache
from pathlib import Path

PROC = Path("/proc")


@cache
def machine() -> str:
    """A key that two processes share if they see each other in /proc: the same boot and the same pid namespace."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def host_of_cores(device_type: str) -> str | None:
    """The host whose CPU cores this process computes on; None where it has a device of its own."""
    return machine().split()[0] if device_type == "cpu" else None


def state(pid: int) -> str | None:
    """The letter of `ps`: "T" and "t" are frozen, "Z" has ended. None where there is no such process, or no /proc."""
    fields = _fields(pid)
    return fields[0] if fields else None


def is_stopped(pid: int) -> bool:
    """Whether the process is frozen by a signal (SIGSTOP) or a debugger; False where there is no /proc."""
    return (state(pid) or "") in ("T", "t")


def has_ended(pid: int) -> bool:
    """Whether the process is gone or waits to be reaped; False where there is no /proc."""
    return state(os.getpid()) is not None and state(pid) in (None, "Z", "X")


def parent(pid: int) -> int | None:
    """The id of the parent process; None where there is no such process, or no /proc."""
    fields = _fields(pid)
    return int(fields[1]) if fields else None


def children(pid: int) -> list[int]:
    """The ids of a process's children; none where there is no /proc."""
    pids = map(int, filter(str.isdecimal, os.listdir(PROC))) if os.path.isdir(PROC) else ()
    return [child for child in pids if parent(child) == pid]


def start_time(pid: int) -> str | None:
    """The start time, which differs between a process and a later one with the same id."""
    fields = _fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None


def _fields(pid: int) -> list[str]:
    # The fields after the name in parentheses, which may hold any characters.
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
