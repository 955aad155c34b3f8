"""A local Ray's workers, and its own programs, forked from a process that has imported everything.

That is six seconds less for a worker, ten for an engine, and one for each of the five programs that Ray runs beside
them. Ray starts a worker as `sys.executable default_worker.py ...`. A driver whose `sys.executable` is
`python_that_forks()`, and whose environment has `OF_RAY`, gets a fork of a server instead: with the environment,
folder, files and network that Ray gave it, and in a process group of its own. So does a test that starts an engine of
its own, a file of this folder, and a fork that spawns a process by `multiprocessing`, as vLLM does for an engine of
several devices. All else that is asked of that Python goes to the true one.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import multiprocessing
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any
from unittest.mock import patch

from open_instruct.cluster.ray_cluster import short_folder
from tests.ranks.fork_server import Forked, take_environment

# Read by vLLM when it is imported, and the same in every engine.
OF_ENGINES = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
# The same for Ray. Its agents see by their stdin that it has ended, for their parent is another process.
OF_RAY = {"RAY_enable_pipe_based_agent_to_parent_health_check": "1"}
# The command `ray`, but that its processes are started by another Python, and without a server for Ray's clients.
RAY = """\
import sys; sys.executable = sys.argv.pop(1)
from ray._private.node import Node; Node.start_ray_client_server = lambda node: None
from ray.scripts.scripts import main; main()
"""
OWN_NETWORK = "/proc/self/ns/net"
MAX_FILES = 64  # the network namespace, stdin, stdout, stderr, and what a process is given when it is spawned
ABOVE_FILES = 512
# Which server forks a file: one has imported vLLM and the other Ray, of which a worker takes its job's number when it
# imports it.
FORKED = {
    "/ray/_private/workers/default_worker.py": "workers",
    "/tests/fleet/weight_engine.py": "workers",
    "/tests/fleet/vllm_session.py": "workers",
    "/tests/fleet/openai_server.py": "workers",
    "/tests/fleet/two_hosts.py": "workers",
    "/open_instruct/cluster/own_ray.py": "programs",
    "/ray/_private/log_monitor.py": "programs",
    "/ray/_private/runtime_env/agent/main.py": "programs",
    "/ray/autoscaler/_private/monitor.py": "programs",
    "/ray/dashboard/agent.py": "programs",
    "/ray/dashboard/dashboard.py": "programs",
}
MAX_REQUEST_BYTES = 1 << 20

# Without the site's packages it is there in 20 ms. It keeps the other end of a connection, and so ends, and well, with
# the fork, and the fork with it: Ray knows a worker by the number that it tells itself, and what else it has started by
# that of this process.
PYTHON_THAT_FORKS = """\
#!{python} -IS
import json, os, socket, sys
words = sys.argv[1:]
files = [0, 1, 2]
first = next((word for word in words if word != "-u"), "")
name = next((name for end, name in {forked}.items() if first.endswith(end)), None)
if "--multiprocessing-fork" in words:
    name, first = "workers", "-c"
    files = [int(file) for file in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + file)]
if name is None:
    os.execv("{python}", ["{python}", *words])
server = socket.socket(socket.AF_UNIX)
server.connect("{folder}/" + name)
asked = {{"words": words[words.index(first) :], "environment": dict(os.environ), "folder": os.getcwd()}}
asked |= {{"files": files, "executable": "{folder}/python"}}
socket.send_fds(server, [json.dumps(asked).encode()], [os.open("{network}", os.O_RDONLY), *files])
server.shutdown(socket.SHUT_WR)
server.recv(1)
"""


@cache
def python_that_forks() -> str:
    """Path of an executable; the servers that it asks start now, and end with this process."""
    folder = short_folder()
    executable = folder / "python"
    program = PYTHON_THAT_FORKS.format(python=sys.executable, folder=folder, forked=FORKED, network=OWN_NETWORK)
    executable.write_text(program)
    executable.chmod(0o700)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for address, import_all in ((folder / "workers", _import_vllm), (folder / "programs", _import_ray)):
        server = Forked(_serve, address, import_all, environment=OF_ENGINES | OF_RAY)
        atexit.register(server.end)  # first
        while not address.exists():
            assert server.poll() is None, server.said()
            time.sleep(0.01)
    return str(executable)


def _serve(address: Path, import_all: Callable[[], None]) -> int:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(64)
    gc.disable()
    import_all()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.sentinel not in connection.wait([listener, parent.sentinel]):
        asking, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become(asking)
        asking.close()
    shutil.rmtree(address.parent, ignore_errors=True)  # the parent was killed
    return 0


def _import_vllm() -> None:
    sys.modules["ray"] = None  # type: ignore[assignment]  # vLLM imports it where it is there
    with suppress(ImportError):  # tests that need vLLM say so themselves
        from vllm.config.logging import LoggingConfig
        from vllm.engine import arg_utils  # noqa: F401
        from vllm.logger import configure_logging_if_needed
        from vllm.model_executor.models import registry
        from vllm.platforms import current_platform
        from vllm.v1.engine import llm_engine  # noqa: F401
        from vllm.v1.worker import cpu_worker  # noqa: F401

        # For a look at a kind of model vLLM starts another Python, so that none has begun with CUDA here.
        patch.object(registry, "_run_in_subprocess", lambda function: function()).start()
        # What each engine does at its start, in seconds, for it goes through all loggers and all modules.
        configure_logging_if_needed(LoggingConfig())
        if current_platform.is_cpu():
            current_platform.register_triton_kernel_overrides()
            patch.object(type(current_platform), "register_triton_kernel_overrides", lambda platform: None).start()
        # At its end an engine would look for garbage in all that was imported here, and so copy its pages.
        patch.object(gc, "unfreeze", lambda: None).start()
    del sys.modules["ray"]


def _import_ray() -> None:
    import aiohttp.web  # noqa: F401
    from ray.autoscaler._private import monitor  # noqa: F401
    from ray.dashboard import agent, dashboard  # noqa: F401

    assert threading.active_count() == 1, "threads do not live through a fork"


def _become(asking: socket.socket) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, (network, *files), _, _ = socket.recv_fds(asking, MAX_REQUEST_BYTES, MAX_FILES)
    while more := asking.recv(MAX_REQUEST_BYTES):
        request += more
    asked: dict[str, Any] = json.loads(request)
    _enter(network)
    # Each under the number that it has there; first all go where none is in the way of another.
    asker, *files = (_moved(file) for file in (asking.detach(), *files))
    for number, file in zip(asked["files"], files, strict=True):
        os.dup2(file, number)
        os.close(file)
    threading.Thread(target=_end_with, args=(asker,), daemon=True).start()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (that of the server was another file)
    vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)  # that of the server outlives the worker
    take_environment(asked["environment"])
    if "ray" in sys.modules:
        _have_ray_read_it()
    os.chdir(asked["folder"])
    multiprocessing.set_executable(asked["executable"])
    sys.argv = asked["words"]
    code = 1
    try:
        if sys.argv[0] == "-c":
            exec(sys.argv.pop(1))
        else:
            sys.path[0] = str(Path(sys.argv[0]).parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _moved(file: int) -> int:
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, ABOVE_FILES)
    os.close(file)
    return moved


def _enter(network: int) -> None:
    if os.fstat(network).st_ino != os.stat(OWN_NETWORK).st_ino:  # only root may
        assert ctypes.CDLL(None).setns(network, 0) == 0
    os.close(network)


def _have_ray_read_it() -> None:
    from ray._raylet import Config

    assert OF_RAY.items() <= os.environ.items()
    Config.initialize("")


def _end_with(asker: int) -> None:
    """Be ended as the process is that asks: Ray means this one."""
    closed = select.poll()
    closed.register(asker, 0)  # nothing but that there is nobody at the other end
    closed.poll()
    os.kill(os.getpid(), signal.SIGTERM)
