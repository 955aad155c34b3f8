"""One run a folder: who is refused, who is not, and what is left behind."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from filelock import SoftFileLease

from open_instruct.run import run_lock
from open_instruct.run.run_lock import lock_folder
from tests.refusals import refused

HOLD = """
import ctypes, os, platform, sys, threading, time
from pathlib import Path
from open_instruct.run import run_lock
run_lock.BEAT_S = 0.1
with run_lock.lock_folder(Path(sys.argv[1]), say=print):
    if "fork" in sys.argv and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    if "ends" in sys.argv:  # its main thread at once, all of it a second later
        def end():
            time.sleep(0.3)
            print("held", flush=True)
            time.sleep(1)
            os._exit(0)
        threading.Thread(target=end).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder; with "fork" a child of it lives too."""
    command = [sys.executable, "-c", HOLD, str(folder), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_S", 0.1)
    monkeypatch.setattr(run_lock, "WATCH_S", 1.0)
    monkeypatch.setattr(run_lock, "ACQUIRE_TIMEOUT_S", 1.0)


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)


def record(
    folder: Path,
    text: str = "filelock/2\npid=4711\nhost=node7\nmode=lease\ntoken=t\nduration=1e9\n",
) -> None:
    """As a process of another machine writes it."""
    (folder / "new").write_text(text)
    (folder / "new").replace(folder / "run.lease")


def held_by(folder: Path) -> int | None:
    return SoftFileLease(folder / "run.lease").pid


@pytest.mark.parametrize("has_locks", [True, False])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_second_run_is_told_who_holds_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool, has_locks: bool
) -> None:
    if not has_locks:
        no_locks(monkeypatch)
    with holder(tmp_path) as process:
        if is_stopped:  # it lives, and cannot renew its lease
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.5)
        with refused("other_run", "output_dir", f"{process.pid}"):
            lock_folder(tmp_path, say=print).__enter__()
        assert held_by(tmp_path) == process.pid


@pytest.mark.parametrize("words", [(), ("fork",)])
def test_killed_holder_blocks_nobody(tmp_path: Path, words: tuple[str, ...]) -> None:
    said: list[str] = []
    with holder(tmp_path, *words) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with lock_folder(tmp_path, say=said.append):
            assert held_by(tmp_path) == os.getpid()
    assert said == []  # and nobody had to wait


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux, how a process ends")
def test_process_that_is_ending_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its main thread has ended, the others not, and its lock is still there."""
    monkeypatch.setattr(run_lock, "SAID_AFTER_S", 0.1)
    said: list[str] = []
    with holder(tmp_path, "ends") as process, lock_folder(tmp_path, say=said.append):
        assert held_by(tmp_path) == os.getpid()
    (line,) = said
    assert f"process {process.pid}" in line and "has not ended yet" in line


def test_killed_holder_that_nobody_has_waited_for_blocks_nobody(tmp_path: Path) -> None:
    """As in a container whose first process reaps none."""
    with holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        with lock_folder(tmp_path, say=print):
            assert held_by(tmp_path) == os.getpid()


def test_released_folder_is_free(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_folder(tmp_path, say=print):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]
    with pytest.raises(KeyError), lock_folder(tmp_path, say=print):
        raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("filelock")]


@pytest.mark.parametrize("hours_ahead", [-9, 9])
def test_dead_holder_on_another_machine_is_watched_and_followed(
    tmp_path: Path, hours_ahead: int
) -> None:
    said: list[str] = []
    record(tmp_path)
    its_time_s = time.time() + 3600 * hours_ahead
    os.utime(tmp_path / "run.lease", (its_time_s, its_time_s))
    with lock_folder(tmp_path, say=said.append):
        pass
    assert len(said) == 1
    assert "last held by process 4711 on node7" in said[0]


@pytest.mark.parametrize("hours_ahead", [-9, 0, 9])
@pytest.mark.parametrize("has_locks", [True, False])
def test_living_holder_on_another_machine_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool, hours_ahead: int
) -> None:
    if not has_locks:
        no_locks(monkeypatch)
    record(tmp_path)
    has_ended = threading.Event()

    def renew() -> None:
        while not has_ended.wait(0.1):
            its_time_s = time.time() + 3600 * hours_ahead
            os.utime(tmp_path / "run.lease", (its_time_s, its_time_s))

    there = threading.Thread(target=renew)
    there.start()
    with refused("other_run", "output_dir", "4711"):
        lock_folder(tmp_path, say=print).__enter__()
    has_ended.set()
    there.join()


def test_lease_decides_without_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_locks(monkeypatch)
    with holder(tmp_path) as process, refused("other_run", "output_dir", f"{process.pid}"):
        lock_folder(tmp_path, say=print).__enter__()
    said: list[str] = []
    with lock_folder(tmp_path, say=said.append):
        assert said == []


@pytest.mark.parametrize(
    "content", ["", "{", "filelock/2", "filelock/2\npid=x\nhost=node7\nmode=lease"]
)
def test_damaged_record_blocks_nobody(tmp_path: Path, content: str) -> None:
    record(tmp_path, content)
    os.utime(tmp_path / "run.lease", (0, 0))
    with lock_folder(tmp_path, say=print):
        pass


def test_run_whose_folder_was_taken_over_ends(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        record(tmp_path)
        assert process.wait(timeout=30) == 1


def test_lease_that_cannot_be_renewed_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def full(*arguments: Any, **named: Any) -> None:
        tried.set()
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with lock_folder(tmp_path, say=print):
        monkeypatch.setattr(os, "utime", full)
        assert tried.wait(30)
        time.sleep(1.5)
        assert held_by(tmp_path) == os.getpid()
        monkeypatch.undo()
        _wait_until_renewed(tmp_path)


def test_lease_that_somebody_removed_is_written_again(tmp_path: Path) -> None:
    with lock_folder(tmp_path, say=print):
        (tmp_path / "run.lease").unlink()
        _wait_until_renewed(tmp_path)
        assert held_by(tmp_path) == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def _wait_until_renewed(folder: Path) -> None:
    began_ns = time.time_ns()
    lease = folder / "run.lease"
    # A lease that is made anew is an empty file before it names its holder.
    while not lease.exists() or lease.stat().st_mtime_ns < began_ns or held_by(folder) is None:
        assert time.time_ns() < began_ns + 30e9, "nobody renews it"
        time.sleep(0.05)


def test_windows_is_refused_in_one_line() -> None:
    program = "import sys; sys.modules['fcntl'] = None; import open_instruct.commands.process"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "open_instruct runs on Linux and macOS; on Windows, use it in WSL.\n"
