"""One run a folder: who is refused, who is not, and what is left behind."""

import errno
import fcntl
import json
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

from open_instruct.errors import InputError
from open_instruct.run import run_lock
from open_instruct.run.run_lock import locked

HOLD = """
import os, sys, time
from pathlib import Path
from open_instruct.run import run_lock
run_lock.BEAT_S = 0.1
with run_lock.locked(Path(sys.argv[1]), say=print):
    if "fork" in sys.argv and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
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
    monkeypatch.setattr(run_lock, "SETTLE_S", 0.0)


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)


def record(folder: Path, **changes: Any) -> None:
    """As a process of another machine writes it."""
    there = {"host": "node7", "pid": 4711, "machine": "another", "started": "1", "token": "t", "beat": 3}
    (folder / "run.lock.json").write_text(json.dumps(there | changes))


def test_a_second_run_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(InputError, match=rf"in use by process {process.pid} on .*another --output_dir"):
            locked(tmp_path, say=print).__enter__()
        assert json.loads((tmp_path / "run.lock.json").read_text())["pid"] == process.pid


@pytest.mark.parametrize("words", [(), ("fork",)])
def test_a_killed_holder_blocks_nobody(tmp_path: Path, words: tuple[str, ...]) -> None:
    said: list[str] = []
    with holder(tmp_path, *words) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with locked(tmp_path, say=said.append):
            assert json.loads((tmp_path / "run.lock.json").read_text())["pid"] == os.getpid()
    assert said == []  # and nobody had to wait


def test_a_released_folder_is_free(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path, say=print):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]
    with pytest.raises(KeyError), locked(tmp_path, say=print):
        raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name == "run.lock"]


def test_a_dead_holder_on_another_machine_is_watched_and_followed(tmp_path: Path) -> None:
    said: list[str] = []
    record(tmp_path)
    with locked(tmp_path, say=said.append):
        pass
    assert len(said) == 1
    assert "last held by process 4711 on node7" in said[0]


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_living_holder_on_another_machine_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    if not has_locks:
        no_locks(monkeypatch)
    record(tmp_path)
    beat = threading.Timer(0.3, record, args=(tmp_path,), kwargs={"beat": 4})
    beat.start()
    with pytest.raises(InputError, match="process 4711 on node7"):
        locked(tmp_path, say=print).__enter__()
    beat.join()


def test_without_locks_the_process_itself_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_locks(monkeypatch)
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)  # it lives, and cannot beat
        with pytest.raises(InputError, match=f"process {process.pid}"):
            locked(tmp_path, say=print).__enter__()
    with locked(tmp_path, say=print):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"', '{"host": "node7"}'])
def test_a_damaged_record_blocks_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.lock.json").write_text(content)
    with locked(tmp_path, say=print):
        pass


def test_the_one_whose_folder_was_taken_over_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holder(tmp_path) as process:
        record(tmp_path)
        assert process.wait(timeout=30) == 1


def test_a_full_disk_under_the_beat_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()
    with locked(tmp_path, say=print):

        def full(*arguments: Any, **named: Any) -> None:
            tried.set()
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(run_lock, "replace_text", full)
        assert tried.wait(30)
        time.sleep(0.3)
        assert json.loads((tmp_path / "run.lock.json").read_text())["pid"] == os.getpid()


def test_on_windows_one_line_says_what_to_use() -> None:
    program = "import sys; sys.modules['fcntl'] = None; import open_instruct.entry"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "open_instruct runs on Linux and macOS; on Windows, use it in WSL.\n"
