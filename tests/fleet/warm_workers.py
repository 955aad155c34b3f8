"""Workers of Ray that are forked where torch, transformers and OLMo-core are imported already.

A new Python imports them for six seconds, and a fleet has three such workers or more. Ray lets a
job say what stands for `python` in the commands of its workers (`py_executable`), and asks the
function that RAY_RUNTIME_ENV_HOOK names for it. Here it is ask_for_fork.py, which hands the command
to a process that is itself a fork of the tests' fork server.

Ray and vLLM are imported in each worker anew: both read the environment as they are. What vLLM
imports of others is there. The demos start their workers as users' runs do.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.fleet.ask_for_fork import HOOK, SOCKET
from tests.ranks.fork_server import FINDS_TESTS, Forked, apply_environment, exit_after

PR_SET_PDEATHSIG = 1
IMPORTED_BY_VLLM = ("aiohttp", "fastapi", "openai.types.responses", "xgrammar")


@pytest.fixture(scope="session", autouse=True)
def forked_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers of every Ray that a test of this folder starts are forks."""
    path = tmp_path_factory.mktemp("warm") / "socket"
    # It listens before it is handed over, so that nobody comes too early.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        # Without the third one Ray would start workers of a plain python, too.
        os.environ |= {
            SOCKET: str(path),
            "RAY_RUNTIME_ENV_HOOK": HOOK,
            "RAY_prestart_worker_first_driver": "0",
            **FINDS_TESTS,  # as the hook is one of their modules
        }
        server = Forked(serve, listener)
    yield
    server.end()


def serve(listener: socket.socket) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # with the fork server
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked
    for name in IMPORTED_BY_VLLM:
        with suppress(ImportError):  # where there is no vLLM
            importlib.import_module(name)
    gc.freeze()  # as in tests/ranks/preloaded.py
    while True:
        connection, _ = listener.accept()
        with connection:
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("rb") as rest:
                request = json.load(rest)
            if os.fork() == 0:
                connection.sendall(b"!")
                for closed in (connection, listener):
                    closed.close()
                exit_after(partial(_become, streams, **request))
            for stream in streams:
                os.close(stream)


def _become(
    streams: list[int],
    *,
    words: list[str],
    environment: dict[str, str],
    cwd: str,
    blocked: list[int],
    ignored: list[int],
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in signal.valid_signals() - {signal.SIGINT, signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    apply_environment(environment)
    os.chdir(cwd)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))  # as a new Python would begin
    runpy.run_path(words[0], run_name="__main__")
