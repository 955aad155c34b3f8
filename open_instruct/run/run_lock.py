"""One run a folder: a lock that dies with its process, and a lease for file systems whose locks end at the host.

`run.lock` is locked and never read: closing any descriptor of a file gives up the process's POSIX locks on it. POSIX,
because a forked child keeps BSD's alive after `kill -9`. `run.lease` names the holder, whose lease is renewed every
`BEAT_S`; that of a process that has ended on this host is free at once, another host's after `LEASE_S` of silence.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import fcntl
except ModuleNotFoundError:
    raise SystemExit("open_instruct runs on Linux and macOS; on Windows, use it in WSL.") from None

from open_instruct.errors import EXIT_FAILURE, InputError

if TYPE_CHECKING:
    from filelock import LeaseCompromise, SoftFileLease

BEAT_S = 5.0
LEASE_S = 30.0
# More than one look: a lease that is free is cleared away by the first, and taken by the next.
LOOKS_S = 0.2
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
HELD = {errno.EACCES, errno.EAGAIN}

_held: list[SoftFileLease] = []


@contextmanager
def locked(folder: Path, *, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder for this process while the block runs.

    Args:
        say: called with a line if it takes a while to see whether another process lives.

    Raises:
        InputError: another process, which it names, holds the folder.
    """
    from filelock import SoftFileLease

    def lost(loss: LeaseCompromise) -> None:
        if loss.reason == "owner-changed":
            # Both would write the same files: the one that was silent for so long gives way.
            text = f"{folder} was taken over by {_holder(lease)} while this process did not run: it ends"
            print(text, file=sys.stderr, flush=True)
            os._exit(EXIT_FAILURE)

    lease = SoftFileLease(
        folder / "run.lease",
        lease_duration=LEASE_S,
        heartbeat_interval=BEAT_S,
        on_compromise=lost,
        poll_interval=LOOKS_S / 4,
        thread_local=False,
    )
    descriptor = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _held.append(lease)
    try:
        _take(lease, descriptor, folder, say)
        yield
    finally:
        _held.remove(lease)
        lease.release()
        os.close(descriptor)


def release_all() -> None:
    """Release the leases of this process, for an end that does not leave its `with` blocks."""
    for lease in _held:
        lease.release()


def _take(lease: SoftFileLease, descriptor: int, folder: Path, say: Callable[[str], None]) -> None:
    from filelock import Timeout

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            raise _refusal(lease, folder) from None
        if error.errno not in NO_LOCKS:
            raise
    with suppress(Timeout):
        lease.acquire(timeout=LOOKS_S)
        return
    # Another machine's file system may have granted the lock as well.
    say(f"{folder} was last held by {_holder(lease)}: watching for up to {LEASE_S:g} s whether that still lives")
    try:
        lease.acquire(timeout=LEASE_S + BEAT_S)
    except Timeout:
        raise _refusal(lease, folder) from None


def _refusal(lease: SoftFileLease, folder: Path) -> InputError:
    return InputError(
        f"--output_dir {folder} is in use by {_holder(lease)}: wait until that run has ended, or end it, or give "
        "another --output_dir"
    )


def _holder(lease: SoftFileLease) -> str:
    owner = lease.owner
    return f"process {owner.pid} on {owner.hostname}" if owner else "another process"
