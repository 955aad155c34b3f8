"""One run a folder: a lock that dies with its process, and a beat for file systems whose locks end at the host.

`run.lock` is locked and never read: closing any descriptor of a file gives up the process's POSIX locks on it. POSIX,
because a forked child keeps BSD's alive after `kill -9`. `run.lock.json` names the holder and changes every `BEAT_S`.
Whoever finds the record of a process that it cannot look at watches it for a change; no clocks are compared.
"""

import errno
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ModuleNotFoundError:
    raise SystemExit("open_instruct runs on Linux and macOS; on Windows, use it in WSL.") from None

from open_instruct.errors import EXIT_FAILURE, InputError
from open_instruct.parallel.processes import machine, start_time
from open_instruct.whole_file import replace_text

BEAT_S = 5.0
WATCH_S = 2.5 * BEAT_S
# Where there are no locks: time for a second process that started in the same moment to show.
SETTLE_S = 1.0
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
HELD = {errno.EACCES, errno.EAGAIN}

Record = dict[str, Any]


@contextmanager
def locked(folder: Path, *, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder for this process while the block runs.

    Args:
        say: called with a line if it takes a while to see whether another process lives.

    Raises:
        InputError: another process, which it names, holds the folder.
    """
    lock = _Lock(folder, say)
    _held.append(lock)
    try:
        yield
    finally:
        _held.remove(lock)
        lock.release()


def release_all() -> None:
    """Release all locks of this process, for an end that does not leave its `with` blocks."""
    for lock in _held:
        lock.release()


class _Lock:
    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.path = folder / "run.lock.json"
        self.say = say
        self.token = secrets.token_hex(8)
        self.num_beats = 0
        self.released = threading.Event()
        self.descriptor = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._take()
        except BaseException:
            os.close(self.descriptor)
            raise
        self.thread = threading.Thread(target=self._beat, daemon=True, name="run.lock")
        self.thread.start()

    def release(self) -> None:
        self.released.set()
        self.thread.join()
        if self._holder_is_me():
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
        os.close(self.descriptor)

    def _take(self) -> None:
        has_locks = True
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                raise self._refusal(self._read()) from None
            if error.errno not in NO_LOCKS:
                raise
            has_locks = False
        other = self._read()
        # On one machine the lock decides; another machine's file system may have granted the lock as well.
        if other is not None and not (has_locks and other.get("machine") == machine()) and self._lives(other):
            raise self._refusal(other)
        self._write()
        if not has_locks:
            time.sleep(SETTLE_S)
            if not self._holder_is_me():
                raise self._refusal(self._read())

    def _lives(self, other: Record) -> bool:
        if other.get("machine") == machine() and start_time(other["pid"]) == other.get("started"):
            return True
        self.say(f"{self.folder} was last held by {_name(other)}: watching for {WATCH_S:g} s whether that still lives")
        end_s = time.monotonic() + WATCH_S
        while time.monotonic() < end_s:
            time.sleep(0.2)
            now = self._read()
            if now is None:
                return False  # it has ended meanwhile
            if now != other:
                return True
        return False

    def _beat(self) -> None:
        while not self.released.wait(BEAT_S):
            if not self._holder_is_me():
                # Both would write the same files: the one that was silent for so long gives way.
                text = f"{self.folder} was taken over by {_name(self._read())} while this process did not run: it ends"
                print(text, file=sys.stderr, flush=True)
                os._exit(EXIT_FAILURE)
            self.num_beats += 1
            with suppress(OSError):  # a full disk is no reason to end
                self._write()

    def _holder_is_me(self) -> bool:
        record = self._read()
        return record is None or record["token"] == self.token

    def _read(self) -> Record | None:
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            return record if {"host", "pid", "token"} <= record.keys() else None
        except (OSError, ValueError, AttributeError):
            return None

    def _write(self) -> None:
        record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": machine(),
            "started": start_time(os.getpid()),
            "token": self.token,
            "beat": self.num_beats,
        }
        replace_text(self.path, json.dumps(record) + "\n", durable=False)

    def _refusal(self, other: Record | None) -> InputError:
        return InputError(
            f"--output_dir {self.folder} is in use by {_name(other)}: wait until that run has ended, or end it, or "
            "give another --output_dir"
        )


_held: list[_Lock] = []


def _name(other: Record | None) -> str:
    return f"process {other['pid']} on {other['host']}" if other else "another process"
