"""Stands for `python` in the commands of Ray's workers: `ask_for_fork.py SOCKET FILE ...`.

It asks the process behind the socket to fork one that runs FILE as the main program, with what this
process was given: environment, folder, standard streams and signals. See warm_workers.py.

Ray learns of it by `name_python`, and may call that in any process of a run: so this imports little.
"""

import json
import os
import signal
import socket
import sys
from typing import Any

HOOK = "tests.fleet.ask_for_fork.name_python"
SOCKET = "TESTS_FORK_RAY_WORKERS_AT"


def name_python(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """What Ray calls with the `runtime_env` of a job, where RAY_RUNTIME_ENV_HOOK is `HOOK`."""
    python = f"{sys.executable} -I -S {__file__} {os.environ[SOCKET]}"
    return {**(runtime_env or {}), "py_executable": python}


def main(path: str, words: list[str]) -> None:
    request = {
        "words": words,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "ignored": [
            int(number)
            for number in signal.valid_signals()
            if signal.getsignal(number) is signal.SIG_IGN
        ],
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [b" "], [0, 1, 2])
        server.sendall(json.dumps(request).encode())
        server.shutdown(socket.SHUT_WR)
        assert server.recv(1), "nothing was forked"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
