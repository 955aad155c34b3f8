"""One run a folder: a lock that dies with its process, and a lease for shared file systems.

`run.lock` is locked and never read: closing any descriptor of a file gives up the process's POSIX
locks on it. POSIX, because a forked child keeps BSD's alive after `kill -9`. `run.lease` names the
holder, whose lease is renewed every `BEAT_S`; that of a process that has ended on this host is free
at once, another host's after `WATCH_S` of silence.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import fcntl
except ModuleNotFoundError:
    raise SystemExit("open_instruct runs on Linux and macOS; on Windows, use it in WSL.") from None

from open_instruct.core.errors import EXIT_FAILURE, InputError

if TYPE_CHECKING:
    from filelock import LeaseCompromise, SoftFileLease

BEAT_S = 5.0
WATCH_S = 2.5 * BEAT_S
# A lease that is free is cleared away by a first look, and taken by a next one.
ACQUIRE_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.05
# To free the memory of a killed process takes a loaded machine seconds.
MAX_ENDING_S = 60.0
SAID_AFTER_S = 2.0
# Of what _read_stat returns; the bit is of linux/sched.h.
ZOMBIE = "Z"
PLACE_OF_FLAGS = 6
PF_EXITING = 0x4

_leases: list[SoftFileLease] = []


@contextmanager
def lock_folder(folder: Path, *, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder for this process while the block runs.

    Args:
        say: called with a line if it takes a while to see whether another process lives.

    Raises:
        InputError: another process, which it names, holds the folder.
    """
    from filelock import SoftFileLease

    def handle_loss(loss: LeaseCompromise) -> None:
        if loss.reason == "marker-missing":
            # Somebody removed the file: it is written again, or a run on another host would find
            # none.
            with suppress(OSError):
                lease.release()
                lease.acquire()
            if lease.is_locked or lease.owner is None:
                return
        # Both would write the same files: the one that was silent for so long gives way.
        holder = _describe_holder(lease)
        text = f"{folder} was taken over by {holder} while this process did not run: it ends"
        print(text, file=sys.stderr, flush=True)
        os._exit(EXIT_FAILURE)

    lease = SoftFileLease(
        folder / "run.lease",
        lease_duration=1e9,  # never: filelock would tell its age by the clocks of two hosts
        heartbeat_interval=BEAT_S,
        on_compromise=handle_loss,
        timeout=ACQUIRE_TIMEOUT_S,
        poll_interval=POLL_INTERVAL_S,
        thread_local=False,
    )
    descriptor = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _leases.append(lease)
    try:
        _take(lease, descriptor, folder, say)
        yield
    finally:
        _leases.remove(lease)
        lease.release()
        os.close(descriptor)


def refuse_folder_in_use(folder: Path) -> None:
    """Refuse a folder that a process of this host holds; nothing is written there.

    Raises:
        InputError: names the process.
    """
    from filelock import SoftFileLease

    try:
        descriptor = os.open(folder / "run.lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    lease = SoftFileLease(folder / "run.lease", lease_duration=1e9)
    try:
        if _is_held(descriptor, fcntl.LOCK_SH, lease, lambda line: None):
            raise _refusal(lease, folder)
    finally:
        os.close(descriptor)


def release_all() -> None:
    """Release the leases of this process, for an end that does not leave its `with` blocks."""
    for lease in _leases:
        lease.release()


def _take(
    lease: SoftFileLease,
    descriptor: int,
    folder: Path,
    say: Callable[[str], None],
) -> None:
    if _is_held(descriptor, fcntl.LOCK_EX, lease, say):
        raise _refusal(lease, folder)
    # Another host's file system may have granted the lock as well.
    owner = lease.owner
    if owner and owner.hostname != socket.gethostname():
        holder = _describe_holder(lease)
        say(
            f"{folder} was last held by {holder}: watching for {WATCH_S:g} s whether that still "
            "lives"
        )
        if _is_renewed(folder / "run.lease"):
            raise _refusal(lease, folder)
        lease.break_lock()
    elif owner and _read_stat(owner.pid)[:1] == [ZOMBIE]:
        lease.break_lock()  # for filelock it lives, until its parent asks how it ended
    try:
        lease.acquire()
    except TimeoutError:
        raise _refusal(lease, folder) from None


def _is_held(descriptor: int, kind: int, lease: SoftFileLease, say: Callable[[str], None]) -> bool:
    """Whether another process has the lock, which otherwise is taken.

    A killed process keeps it until the kernel has freed its memory, and is waited for: a run that
    is started again right after `kill -9` goes on.
    """
    start_s = time.monotonic()
    is_said = False
    while not _lock(descriptor, kind):
        waited_s = time.monotonic() - start_s
        if not _is_ending(lease) or waited_s > MAX_ENDING_S:
            return not _lock(descriptor, kind)  # it may have ended since
        if waited_s > SAID_AFTER_S and not is_said:
            is_said = True
            say(
                f"{_describe_holder(lease)} was killed and has not ended yet: waiting for it, for "
                f"{MAX_ENDING_S:g} s at most"
            )
        time.sleep(POLL_INTERVAL_S)
    return False


def _lock(descriptor: int, kind: int) -> bool:
    """Take the lock if nobody has it, or the file system has no locks: then the lease alone
    decides.
    """
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _is_ending(lease: SoftFileLease) -> bool:
    """Whether the holder, a process of this host, has been killed and is still there (Linux)."""
    owner = lease.owner
    if not owner or owner.hostname != socket.gethostname():
        return False
    stat = _read_stat(owner.pid)
    if not stat:
        return False
    try:
        status = Path(f"/proc/{owner.pid}/status").read_text()
    except OSError:
        return False
    pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)", status, re.MULTILINE)
    is_killed = any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending)
    return is_killed or bool(int(stat[PLACE_OF_FLAGS]) & PF_EXITING)


def _read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the program's name (proc(5)), its state first;

    none if the process has ended, or this system has no /proc.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_renewed(path: Path) -> bool:
    """Whether a lease is renewed within `WATCH_S`, by its own clock; a removed one is not."""
    renewals: set[int] = set()
    end_s = time.monotonic() + WATCH_S
    with suppress(FileNotFoundError):
        while len(renewals) < 2 and time.monotonic() < end_s:
            # NFS may remember for a while when a file that nobody opens was changed.
            with path.open("rb") as file:
                renewals.add(os.fstat(file.fileno()).st_mtime_ns)
            time.sleep(POLL_INTERVAL_S)
    return len(renewals) > 1


def _refusal(lease: SoftFileLease, folder: Path) -> InputError:
    return InputError(
        f"--output_dir {folder} is in use by {_describe_holder(lease)}: wait until that run has "
        "ended, or end it, or give another --output_dir",
        kind="other_run",
    )


def _describe_holder(lease: SoftFileLease) -> str:
    owner = lease.owner
    if not owner:
        return "another process"
    return f"process {owner.pid} on {owner.hostname}"
