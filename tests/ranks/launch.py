"""Start a function on several real ranks (processes that can talk over gloo), and collect what they return.

In a test, use the `run_ranks` fixture::

    def test_sum(run_ranks):
        assert run_ranks(2, "tests.ranks.jobs.sums:all_reduced", scale=3) == [9, 9]

and in `tests/ranks/jobs/sums.py` a plain function, that starts the process group itself (so that its
start can be tested too) and returns something JSON can say::

    def all_reduced(scale: int) -> int:
        torch.distributed.init_process_group("gloo")
        number = torch.tensor(scale * (torch.distributed.get_rank() + 1))
        torch.distributed.all_reduce(number)
        return int(number)

The job's module is imported once, in a launcher from the fork server, which forks the ranks: import at
the top of it what every rank needs, but start no thread and no process group there.
All ranks are killed at the first failure or at the timeout, and the failing rank's stderr (at the
timeout: every rank's, with the line it hangs in) is shown.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.ranks.fork_server import REPOSITORY, Forked

__all__ = ["REPOSITORY", "RanksFailed", "run_ranks"]

SHOWN_CHARACTERS = 6000
HANGS_AFTER_S = 600.0  # far above what a busy machine needs: it is no test of speed
DUMP_BEFORE_TIMEOUT_S = 3.0


class RanksFailed(AssertionError):
    """A rank raised, died or did not finish in time; the message holds its stderr."""


def run_ranks(
    num_ranks: int,
    target: str,
    *,
    timeout_s: float = HANGS_AFTER_S,
    num_nodes: int = 1,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Call `target` ("package.module:function") with `arguments` on every rank; return the results in rank order.

    Each rank sees what torchrun would set: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NUM_NODES,
    FS_LOCAL_RANK, MASTER_ADDR, MASTER_PORT, and OMP_NUM_THREADS=1. `num_nodes` splits the ranks evenly
    into pretended nodes; `environment` is added before the job's module is imported. Arguments and results
    pass through JSON.

    Raises:
        RanksFailed: a rank raised or died (its stderr is in the message), or `timeout_s` passed.
    """
    assert num_ranks % num_nodes == 0, "ranks must split evenly over nodes"
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        job = {
            "num_ranks": num_ranks,
            "num_nodes": num_nodes,
            "target": target,
            "arguments": arguments,
            "folder": folder,
            "dump_after_s": max(1.0, timeout_s - DUMP_BEFORE_TIMEOUT_S),
        }
        launcher = Forked(_main, json.dumps(job), environment=environment)
        try:
            output, _ = launcher.communicate(timeout_s)
        except subprocess.TimeoutExpired:
            launcher.end()
            logs = "\n".join(_log_of(folder, rank) for rank in range(num_ranks))
            raise RanksFailed(f"{target} on {num_ranks} ranks did not finish in {timeout_s:g} s\n{logs}") from None
        finally:
            launcher.end()
        if launcher.returncode != 0:
            failed = Path(folder, "failed_rank")
            log = _log_of(folder, int(failed.read_text())) if failed.exists() else output[-SHOWN_CHARACTERS:]
            raise RanksFailed(f"{target} on {num_ranks} ranks failed\n{log}")
        return [json.loads(_result_path(folder, rank).read_text()) for rank in range(num_ranks)]


def _result_path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.json")


def _log_path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.log")


def _log_of(folder: str, rank: int) -> str:
    path = _log_path(folder, rank)
    text = path.read_text(errors="replace")[-SHOWN_CHARACTERS:] if path.exists() else "(did not start)"
    return f"--- rank {rank} ---\n{text}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _run_rank(job: dict[str, Any], function: Any, rank: int, port: int) -> int:
    """In a forked rank: point stdout and stderr at the rank's log, call, write the result; the exit code."""
    log = os.open(_log_path(job["folder"], rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(job["dump_after_s"])
    ranks_per_node = job["num_ranks"] // job["num_nodes"]
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job["num_ranks"]),
        LOCAL_RANK=str(rank % ranks_per_node),
        LOCAL_WORLD_SIZE=str(ranks_per_node),
        NUM_NODES=str(job["num_nodes"]),
        FS_LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        result = json.dumps(function(**job["arguments"]))
        _result_path(job["folder"], rank).write_text(result)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _main(words: str) -> int:
    """The launcher; the exit code."""
    job: dict[str, Any] = json.loads(words)
    module, _, name = job["target"].partition(":")
    function = getattr(importlib.import_module(module), name)
    port = _free_port()
    rank_of_pid: dict[int, int] = {}
    for rank in range(job["num_ranks"]):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = _run_rank(job, function, rank, port)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # neither the launcher's clean-up nor a slow interpreter exit belongs to a rank
        rank_of_pid[pid] = rank
    while rank_of_pid:
        pid, status = os.wait()
        rank = rank_of_pid.pop(pid)
        if status != 0:
            with _log_path(job["folder"], rank).open("a") as log:
                log.write(f"\nended with exit code {os.waitstatus_to_exitcode(status)}\n")
            Path(job["folder"], "failed_rank").write_text(str(rank))
            for other in rank_of_pid:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0
