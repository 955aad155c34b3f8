"""A terminal for pages: bash, whose `open-instruct`, `torchrun` and `python` have imported
everything already.

On the PATH of that bash lie small programs. Each hands its words, its folder and its three streams
to a server, which forks the process that becomes the command, and ends as that one does. What needs
another machine is left out there.
"""

import json
import os
import runpy
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from huggingface_hub import constants
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)

from open_instruct.cli import main
from tests.docs.samples import change_words, find_reason_to_leave_out
from tests.ranks import programs
from tests.ranks.fork_server import Forked, exit_after
from tests.waiting import eventually

PROGRAMS = ("open-instruct", "torchrun", "python")
# Those that are only said to be left out: `samples.LEFT_OUT`.
OTHER_PROGRAMS = (
    "python3",
    "make",
    "pip",
    "curl",
    "hf",
    "lm_eval",
    "sbatch",
    "launch_multi_node.sh",
)
SOCKET_VARIABLE = "TERMINAL_OF_PAGES"
PROXY = f"""\
#!{sys.executable} -ISs
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.environ["{SOCKET_VARIABLE}"])
    message = json.dumps([os.getcwd(), [os.path.basename(sys.argv[0]), *sys.argv[1:]]])
    socket.send_fds(server, [message.encode()], [0, 1, 2])
    code = server.recv(4)
sys.exit(int(code or 1))
"""
TIMEOUT_S = 600


class Terminal:
    """The server and its programs, in `folder`;

    `hub` is the address of what is taken for the hub.
    """

    def __init__(self, folder: Path, hub: str) -> None:
        self._bin = folder / "bin"
        self._bin.mkdir(parents=True)
        for name in (*PROGRAMS, *OTHER_PROGRAMS):
            (self._bin / name).write_text(PROXY)
            (self._bin / name).chmod(0o755)
        self._socket = folder / "socket"
        self._cache = str(folder / "cache")
        environment = {
            "HF_TOKEN": "hf_of_a_test",
            "OPEN_INSTRUCT_CACHE": self._cache,
            "COLUMNS": "100",
        }
        self._server = Forked(serve, str(self._socket), hub, environment=environment, cwd=folder)
        eventually(self._socket.exists, what="the server of the terminal did not start")

    def paste(self, script: str, folder: Path) -> str:
        """Run `script` in `folder`, until a command of it fails; returns what was said.

        Raises:
            AssertionError: one did; with all that was said.
        """
        (folder / ".venv").mkdir(exist_ok=True)
        (folder / ".venv" / "bin").symlink_to(self._bin)
        (folder / "scripts").mkdir(exist_ok=True)
        (folder / "scripts" / "launch_multi_node.sh").symlink_to(self._bin / "launch_multi_node.sh")
        (self._bin / "activate").touch()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env={
                "PATH": f"{self._bin}:/usr/bin:/bin",
                "HOME": str(folder),
                SOCKET_VARIABLE: str(self._socket),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{self._server.said()}"
        return done.stdout

    def close(self) -> None:
        self._server.end()


def serve(address: str, hub: str) -> int:
    """Fork a process for each command that comes in at `address`."""
    SubprocessHandler._popen = programs._fork_rank  # type: ignore[method-assign]
    constants.ENDPOINT, constants.HF_HUB_DISABLE_XET = hub, True
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                message, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
                if os.fork() == 0:
                    listener.close()
                    _answer(connection, streams, *json.loads(message))
            for stream in streams:
                os.close(stream)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _answer(connection: socket.socket, streams: list[int], folder: str, words: list[str]) -> None:
    """Fork the command, which may end as it likes, and say its exit code."""
    if (pid := os.fork()) == 0:
        exit_after(partial(_become_command, streams, folder, words))
    _, status = os.waitpid(pid, 0)
    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become_command(streams: list[int], folder: str, words: list[str]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # Those that are there know whether the server's own streams were files.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.chdir(folder)
    raise SystemExit(run_command(words))


def run_command(words: list[str]) -> int:
    """Run what the words say, on tiny models and for a few steps, or say why not; returns the exit
    code.
    """
    typed = " ".join(words)
    if reason := find_reason_to_leave_out(typed):
        print(f"$ {typed}\nleft out: {reason}", file=sys.stderr)
        return 0
    program, *arguments = change_words(words)
    print("$", program, *arguments, file=sys.stderr)
    sys.argv = [program, *arguments]
    if program == "open-instruct":
        return main(arguments)
    if program == "torchrun":
        return programs.torchrun(arguments)
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")
    return 0
