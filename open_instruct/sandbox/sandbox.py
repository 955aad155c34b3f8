"""Interpreters behind walls, for programs that the policy writes."""

import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, Literal

from open_instruct.errors import RunError

PACKAGE = str(Path(__file__).resolve().parents[1])
# The package without its parent on the path of imports: what else lies there would be imported in place of libraries.
START = """
import socket, sys, types
sys.modules["open_instruct"] = types.ModuleType("open_instruct")
sys.modules["open_instruct"].__path__ = [sys.argv[1]]
from open_instruct.sandbox.server import main
main(socket.socket(fileno=0))
"""
START_TIMEOUT_S = 60.0
MAX_OUTPUT_BYTES = 1 << 20
PIECE_BYTES = 1 << 16
# All that a program sees of an environment, but for LD_LIBRARY_PATH: libraries of numbers are to start no threads.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of a piece of code. Example: `Ran(status="done", output="hello\\n", value="3")`.

    `exit` is `sys.exit()` without a failure. After `late` and `died`, which too much output is too, the interpreter is
    of no more use.
    """

    status: Literal["done", "exit", "error", "late", "died"]
    output: str
    value: str = ""  # the repr of its last line if that is an expression, or of None
    problem: str = ""  # the traceback


class Interpreter:
    """A process behind the walls, whose names stay from one piece of code to the next. `close` ends it at any time."""

    def __init__(
        self, connection: socket.socket, life: socket.socket, server: "Popen[bytes]", settings: dict[str, Any]
    ) -> None:
        self._connection = connection
        self._life = life
        self._server = server
        self._unsent = json.dumps(settings).encode() + b"\n"
        self._has_begun = False
        self._is_closed = False

    def run(self, code: str, *, timeout_s: float, is_plain: bool = False, max_bytes: int = MAX_OUTPUT_BYTES) -> Ran:
        """Run a piece of code; with `is_plain`, its value is shown as the literal that it equals, if there is one.

        Raises:
            RunError: the sandbox is at fault, and not the program: it could not fork or put up its walls, or has died.
        """
        deadline_s = time.monotonic() + timeout_s
        mark = secrets.token_hex(16)
        request = json.dumps({"code": code, "mark": mark, "is_plain": is_plain})
        told = b""
        try:
            self._connection.settimeout(max(timeout_s, 1e-3))  # 0 would be no time-out
            self._connection.sendall(self._unsent + request.encode() + b"\n")
            self._unsent = b""
            self._has_begun = self._has_begun or self._connection.recv(1) == b"+"
            while not (mark.encode() in told and told.endswith(b"\n")) and len(told) <= max_bytes:
                self._connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
                if not (piece := self._connection.recv(PIECE_BYTES)):
                    break
                told += piece
            output, _, answer = told.partition(mark.encode())
            return Ran(output=output.decode(errors="replace").removesuffix("\n"), **json.loads(answer))
        except TimeoutError:
            return Ran(status="late", output=told.decode(errors="replace"))
        except (OSError, ValueError, TypeError) as error:  # it has been closed, or has given no answer
            if not self._is_closed and (not self._has_begun or self._server.poll() is not None):
                raise RunError(
                    "the sandbox ran no program: it could not fork, could not put up a wall, or was killed"
                ) from error
            return Ran(status="died", output=told.decode(errors="replace"))

    def close(self) -> None:
        self._is_closed = True
        for each in (self._connection, self._life):
            with suppress(OSError), each:
                each.shutdown(socket.SHUT_RDWR)  # which wakes a thread that reads, as closing does not


class Sandbox:
    """A warm process that forks interpreters, started when the first is asked for. Callable from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: Popen[bytes] | None = None

    def interpreter(self, *, cpu_s: int, name: str = "__main__", stdin: str = "", stderr: bool = False) -> Interpreter:
        """A new one, with `cpu_s` of CPU time. `stdin` is what programs read, `name` their `__name__`.

        What they write to stderr is among their output with `stderr`, and nowhere without.

        Raises:
            RunError: the sandbox did not start.
        """
        connection, work = socket.socketpair()
        life, end = socket.socketpair()
        with self._lock, work, end:
            if self._server is None or self._server.poll() is not None:
                self._start()
            server = self._server
            assert server is not None
            socket.send_fds(self._control, [b"+"], [work.fileno(), end.fileno()])
        settings = {"cpu_s": cpu_s, "name": name, "stdin": stdin, "stderr": stderr}
        return Interpreter(connection, life, server, settings)

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-X", "utf8", "-c", START, PACKAGE]
        environment = ENVIRONMENT | {name: os.environ[name] for name in os.environ if name == "LD_LIBRARY_PATH"}
        with theirs:
            self._server = Popen(
                command, stdin=theirs.fileno(), stdout=DEVNULL, stderr=DEVNULL, env=environment, start_new_session=True
            )
        self._control.settimeout(START_TIMEOUT_S)
        if self._control.recv(1) != b"+":
            raise RunError("the sandbox for programs did not start; docs/security.md says what it needs")

    def close(self) -> None:
        """End it, and all of its interpreters."""
        if self._server is not None:
            self._control.close()
            self._server.wait(START_TIMEOUT_S)


SANDBOX = Sandbox()  # of this process, with which it ends
