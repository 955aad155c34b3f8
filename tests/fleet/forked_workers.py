"""Workers of a local Ray, forked from a process that has imported everything: six seconds less each, an engine ten.

Ray starts a worker as `sys.executable default_worker.py ...`. A driver whose `sys.executable` is
`python_that_forks()` gets a fork of the server instead: with the environment, folder and files that Ray gave it, and
in a process group of its own. All else that is asked of that Python goes to the true one.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import cache
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

from open_instruct.cluster.ray_cluster import short_folder
from tests.ranks.fork_server import Forked, take_environment

# Read by vLLM when it is imported, and the same in every engine.
OF_ENGINES = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
NUM_FILES = 3  # stdin, stdout, stderr
MAX_REQUEST_BYTES = 1 << 20

# Without the site's packages it is there in 20 ms. It ends with the worker, of which it keeps the other end of a
# connection; Ray knows the worker by the number that it tells itself.
PYTHON_THAT_FORKS = """\
#!{python} -IS
import json, os, socket, sys
words = sys.argv[1:]
if not words[0].endswith("/default_worker.py"):
    os.execv("{python}", ["{python}", *words])
server = socket.socket(socket.AF_UNIX)
server.connect("{address}")
asked = {{"words": words, "environment": dict(os.environ), "folder": os.getcwd()}}
socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
server.shutdown(socket.SHUT_WR)
server.recv(1)
"""


@cache
def python_that_forks() -> str:
    """Path of an executable; the server that it asks starts now, and ends with this process."""
    folder = short_folder()
    address, executable = folder / "socket", folder / "python"
    executable.write_text(PYTHON_THAT_FORKS.format(python=sys.executable, address=address))
    executable.chmod(0o700)
    server = Forked(_serve, address, environment=OF_ENGINES)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.end)  # first
    while not address.exists():
        assert server.poll() is None, server.said()
        time.sleep(0.01)
    return str(executable)


def _serve(address: Path) -> int:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(64)
    _import_vllm()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.sentinel not in connection.wait([listener, parent.sentinel]):
        asking, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become_worker(asking)
        asking.close()
    shutil.rmtree(address.parent, ignore_errors=True)  # the parent was killed
    return 0


def _import_vllm() -> None:
    assert "ray" not in sys.modules, "Ray reads a worker's own environment when it is imported"
    sys.modules["ray"] = None  # type: ignore[assignment]  # vLLM imports it where it is there
    with suppress(ImportError):  # tests that need vLLM say so themselves
        from vllm.engine import arg_utils  # noqa: F401
        from vllm.v1.engine import llm_engine  # noqa: F401
    del sys.modules["ray"]


def _become_worker(asking: socket.socket) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, files, _, _ = socket.recv_fds(asking, MAX_REQUEST_BYTES, NUM_FILES)
    while more := asking.recv(MAX_REQUEST_BYTES):
        request += more
    asked: dict[str, Any] = json.loads(request)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)  # that of the server outlives the worker
    take_environment(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv = asked["words"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)
