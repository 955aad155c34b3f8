"""Processes that have imported everything already: forked from one that does nothing else.

A new Python is at work for seven seconds until it has imported torch, OLMo-core and transformers.
The server imports them once a test session (`preloaded`), starts no thread and no process group,
and forks a process for each that is asked for. What a test then has in hand is used like
`subprocess.Popen`.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
# Read by libraries when they are loaded, and so the same for all that is forked.
WHEN_LOADED = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# A server that does not find what it should import says nothing, and each of its forks then imports
# it by itself.
FINDS_TESTS = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
}
PRELOADED = "tests.ranks.preloaded"
# What /proc tells of an environment lies where that of the server did, which therefore is a large
# one.
ROOM = {"ROOM_FOR_ENVIRONMENT": " " * (1 << 15)}

_server = multiprocessing.get_context("forkserver")


class Forked:
    """A process that calls `function(*arguments)`, of the top of a module; what that returns is the
    exit code.

    It leads a session, works in `cwd`, and has the environment of this process and what
    `environment` adds, which counts for modules that are loaded from now on. It ignores the signals
    in `ignored`, as below `nohup`. All that it and its children say is kept for `communicate`.
    """

    def __init__(
        self,
        function: Callable[..., int],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
        ignored: Sequence[int] = (),
    ) -> None:
        self._said = tempfile.NamedTemporaryFile("r", errors="replace")  # noqa: SIM115 (it goes with the object)
        _server.set_forkserver_preload(["tests.ranks.uncollected", PRELOADED])
        ours = dict(os.environ)
        # Of the server, which the first process starts.
        os.environ.update(WHEN_LOADED | ROOM | FINDS_TESTS)
        try:
            theirs = {**ours, **WHEN_LOADED, **(environment or {})}
            its = (function, arguments, theirs, cwd, self._said.name, ignored)
            self._process = _server.Process(target=_become, args=its)
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(ours)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def sentinel(self) -> int:
        """Ready, for `multiprocessing.connection.wait`, once the process has ended."""
        return self._process.sentinel

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for its end; what it said."""
        self.wait(timeout)
        return self.said(), None

    def said(self) -> str:
        """Until now."""
        self._said.seek(0)
        return self._said.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill what is left of it and of its session."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()


def _become(
    function: Callable[..., int],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
    cwd: Path,
    said: str,
    ignored: Sequence[int],
) -> None:
    assert PRELOADED in sys.modules, "the fork server could not import it"
    os.setsid()
    # Whatever the tests themselves have inherited: a suite in the background ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    file = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    # A new Python has none; by that of this one, semaphores would have names that stay where a
    # process is killed.
    multiprocessing.set_start_method(None, force=True)
    apply_environment(environment)
    os.chdir(cwd)
    raise SystemExit(function(*arguments))


def exit_after(function: Callable[[], object]) -> NoReturn:
    """Call it in a process that was forked, and end that as a Python would, without an
    interpreter's slow exit.
    """
    code = 1
    try:
        function()
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        else:
            code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(code)


def apply_environment(environment: Mapping[str, str]) -> None:
    """As the whole environment of this process, forked from the server; in /proc it has no other
    one either. Modules are found as a new Python would find them.
    """
    os.environ.clear()
    os.environ.update(environment)
    added = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [folder for folder in added if folder not in sys.path]
    tempfile.tempdir = None  # the server may have looked it up
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    shown = b"".join(
        f"{name}={value}\0".encode(errors="surrogateescape") for name, value in environment.items()
    )
    assert len(shown) <= end - start, "ROOM is too small"
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
