"""Facts about other processes: whether one exists or is frozen, and what machine this one is on."""

import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil


@cache
def machine_id() -> str:
    """A key that two processes share if they see each other: one boot, one pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def find_cpu_host(device_type: str) -> str | None:
    """The host whose CPU cores this process computes on; None where it has a device of its own."""
    return machine_id().split()[0] if device_type == "cpu" else None


def is_stopped(pid: int) -> bool:
    """Whether the process is frozen by a signal (SIGSTOP) or a debugger."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def has_ended(pid: int) -> bool:
    """Whether the process is gone or waits to be reaped."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return True


def list_children(pid: int) -> list[int]:
    """The ids of a process's children."""
    return [child.pid for child in psutil.Process(pid).children()]
