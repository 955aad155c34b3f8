"""Processes that can be ended at any time with all that they have started, such as interpreters.

A `ForkServer` forks them; those of a `Sandbox` run programs of the policy behind walls.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, Literal, get_args

from open_instruct.core.errors import RunError

PACKAGE = str(Path(__file__).resolve().parents[2] / "__init__.py")
# The package without its parent on the path of imports: what else lies there would be imported in
# place of libraries.
START = """
import socket, sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("open_instruct", sys.argv[1])
sys.modules["open_instruct"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["open_instruct"])
from open_instruct.rewards.sandbox.server import main
main(socket.socket(fileno=0), handler=sys.argv[2], preloaded=sys.argv[3])
"""
START_TIMEOUT_S = 60.0
MAX_OUTPUT_BYTES = 1 << 20
READ_BYTES = 1 << 16
# All that a program sees of an environment, but for LD_LIBRARY_PATH and a variable of the package:
# libraries of numbers are to start no threads.
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

Status = Literal["done", "exit", "error", "late", "died"]
STATUSES = get_args(Status)
RESULT_FIELDS = {"status", "value", "problem"}  # of `RunResult`, by the process


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came of a piece of code.

    Example: `RunResult(status="done", output="hello\\n", value="3")`.
    """

    status: Status
    """`exit` is `sys.exit()` without a failure.

    After `late` and `died`, which too much output is too, the interpreter is of no more use.
    """
    output: str
    value: str = ""
    """The repr of its last line if that is an expression, or of None."""
    problem: str = ""
    """The traceback."""


def _parse_answer(answer: bytes | bytearray, *, output: str) -> RunResult:
    """What a process has answered, which a program may have forged.

    Raises:
        ValueError: it is no object of texts with a status that there is.
    """
    try:
        fields = json.loads(answer)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    is_flat = isinstance(fields, dict) and all(isinstance(value, str) for value in fields.values())
    if not is_flat or fields.get("status") not in STATUSES or not fields.keys() <= RESULT_FIELDS:
        raise ValueError("it is no answer")
    return RunResult(output=output, **fields)


class Child:
    """A process that answers one request after another. `close` ends it at any time.

    Raises:
        RunError: the process that forks it did not start.
    """

    def __init__(self, server: "ForkServer", **settings: Any) -> None:
        self._connection, self._life, self._server = server.fork()
        self._unsent = json.dumps(settings).encode() + b"\n"
        self._has_begun = False
        self._is_closed = False

    def ask(
        self, request: Mapping[str, Any], *, timeout_s: float, max_bytes: int = sys.maxsize
    ) -> RunResult:
        """What came of a request.

        What else the process has written to its socket is `output`, and no answer.
        """
        deadline_s = time.monotonic() + timeout_s
        mark = secrets.token_hex(16)
        message = json.dumps({"request": request, "mark": mark}).encode() + b"\n"
        data = bytearray()
        try:
            self._connection.settimeout(max(timeout_s, 1e-3))  # 0 would be no time-out
            self._connection.sendall(self._unsent + message)
            self._unsent = b""
            self._has_begun = self._has_begun or self._connection.recv(1) == b"+"
            while len(data) <= max_bytes:
                if data.endswith(b"\n") and mark.encode() in data:
                    break
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    # Also if it writes without an end, and there is always something to read.
                    raise TimeoutError
                self._connection.settimeout(left_s)
                part = self._connection.recv(READ_BYTES)
                if not part:
                    break
                data += part
            output, _, answer = data.partition(mark.encode())
            return _parse_answer(answer, output=output.decode(errors="replace").removesuffix("\n"))
        except TimeoutError:
            return RunResult(status="late", output=data.decode(errors="replace"))
        except (OSError, ValueError):  # it has been closed, or has given no answer
            return RunResult(status="died", output=data.decode(errors="replace"))

    def close(self) -> None:
        self._is_closed = True
        for each in (self._connection, self._life):
            with suppress(OSError), each:
                # Which wakes a thread that reads, as closing does not.
                each.shutdown(socket.SHUT_RDWR)


class Interpreter(Child):
    """A process behind the walls, whose names stay from one piece of code to the next."""

    def run(
        self,
        code: str,
        *,
        timeout_s: float,
        is_plain: bool = False,
        max_bytes: int = MAX_OUTPUT_BYTES,
    ) -> RunResult:
        """Run a piece of code.

        Args:
            code: Python.
            timeout_s: of the wall clock.
            is_plain: whether its value is shown as the literal that it equals, if there is one.
            max_bytes: of output.

        Raises:
            RunError: the sandbox is at fault, and not the program: it could not fork or put up its
                walls, or has died.
        """
        request = {"code": code, "is_plain": is_plain}
        result = self.ask(request, timeout_s=timeout_s, max_bytes=max_bytes)
        has_failed = not self._has_begun or self._server.poll() is not None
        if result.status == "died" and has_failed and not self._is_closed:
            raise RunError(
                "the sandbox ran no program: it could not fork, could not put up a wall, or was "
                "killed"
            )
        return result


class ForkServer:
    """A warm process that forks others; it starts with the first of them.

    Callable from many threads.

    Args:
        handler: a module's function, which answers requests in the forked processes; None for
            interpreters behind walls.
        environment: the variables of the processes.
        preloaded: a function of the user's, `FILE.py:NAME`, whose module is imported once, for all
            processes.
    """

    def __init__(
        self,
        *,
        handler: Callable[..., dict[str, str]] | None,
        environment: Mapping[str, str],
        preloaded: str = "",
    ) -> None:
        self._preloaded = preloaded
        self._handler = ""
        if handler is not None:
            self._handler = f"{handler.__module__}:{handler.__name__}"
        self._environment = environment
        self._lock = threading.Lock()
        self._server: Popen[bytes] | None = None

    def fork(self) -> "tuple[socket.socket, socket.socket, Popen[bytes]]":
        """Fork a child.

        Returns its data socket, a socket whose end ends it, and the process that has forked it.
        """
        connection, work = socket.socketpair()
        life, end = socket.socketpair()
        with self._lock, work, end:
            if self._server is None or self._server.poll() is not None:
                self._server = self._start()
            socket.send_fds(self._control, [b"+"], [work.fileno(), end.fileno()])
            return connection, life, self._server

    def _start(self) -> "Popen[bytes]":
        self._control, theirs = socket.socketpair()
        # Neither imports anything from the working folder, and a program nothing from PYTHONPATH
        # either.
        isolation = "-P" if self._handler else "-I"
        command = [sys.executable, isolation, *("-X", "utf8"), "-c", START, PACKAGE]
        command += [self._handler, self._preloaded]
        with theirs:
            server = Popen(
                command,
                stdin=theirs.fileno(),
                stdout=DEVNULL,
                stderr=DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
        self._control.settimeout(START_TIMEOUT_S)
        with suppress(TimeoutError):
            if self._control.recv(1) == b"+":
                return server
        server.kill()
        server.wait()
        raise RunError(
            "what programs and verifiers run in did not start; docs/security.md says what it needs"
        )

    def close(self) -> None:
        """End it, and all others."""
        if self._server is not None:
            with suppress(OSError), self._control:
                # A forked child of this process may hold it, too.
                self._control.shutdown(socket.SHUT_RDWR)
            self._server.wait(START_TIMEOUT_S)


class Sandbox(ForkServer):
    """A server whose children are sandboxed interpreters."""

    def __init__(self) -> None:
        libraries = {name: os.environ[name] for name in os.environ if name == "LD_LIBRARY_PATH"}
        super().__init__(handler=None, environment=ENVIRONMENT | libraries)

    def interpreter(
        self,
        *,
        cpu_s: int,
        name: str = "__main__",
        stdin: str = "",
        stderr: bool = False,
    ) -> Interpreter:
        """Start an interpreter.

        Args:
            cpu_s: its CPU time.
            name: the `__name__` of programs.
            stdin: what programs read.
            stderr: whether what they write to stderr is among their output.

        Raises:
            RunError: the sandbox did not start.
        """
        return Interpreter(
            self,
            cpu_s=cpu_s,
            name=name,
            stdin=stdin,
            stderr=stderr,
        )


SANDBOX = Sandbox()  # of this process, with which it ends
