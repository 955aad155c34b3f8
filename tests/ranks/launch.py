"""Runs a function on several ranks at once, each a process of its own that talks to the others over
gloo.

In a test, use the `run_ranks` fixture::

    def test_sum(run_ranks):
        assert run_ranks(2, "tests.ranks.jobs.sums:all_reduced", scale=3) == [9, 9]

A job lives in tests/ranks/jobs/. It is a plain function, that starts the process group itself (so
that its start can be tested too) and returns something JSON can say::

    def all_reduced(scale: int) -> int:
        torch.distributed.init_process_group("gloo")
        number = torch.tensor(scale * (torch.distributed.get_rank() + 1))
        torch.distributed.all_reduce(number)
        return int(number)

All ranks are killed at the first failure or at the timeout, and the failing rank's stderr (at the
timeout: every rank's, with the line it hangs in) is shown.
"""

import faulthandler
import importlib
import json
import signal
import socket
import tempfile
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.ranks.fork_server import REPOSITORY, Forked, exit_after

__all__ = ["REPOSITORY", "RanksFailed", "run_ranks"]

SHOWN_CHARACTERS = 6000
HANGS_AFTER_S = 600.0  # far above what a busy machine needs: it is no test of speed
SHOWS_ITS_LINE = signal.SIGUSR1
TIME_TO_SHOW_S = 2.0


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
    """Call `target` ("package.module:function") with `arguments` on every rank; return the results
    in rank order.

    Each rank sees what torchrun would set: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    NUM_NODES, FS_LOCAL_RANK, MASTER_ADDR, MASTER_PORT, and OMP_NUM_THREADS=1. `num_nodes` splits
    the ranks evenly into pretended nodes; `environment` is added before the job's module is
    imported. Arguments and results pass through JSON.

    Raises:
        RanksFailed: a rank raised or died (its stderr is in the message), or `timeout_s` passed.
    """
    assert num_ranks % num_nodes == 0, "ranks must split evenly over nodes"
    per_node = num_ranks // num_nodes
    port = _free_port()
    ranks: list[Forked] = []
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        try:
            for rank in range(num_ranks):
                place = {
                    "RANK": rank,
                    "WORLD_SIZE": num_ranks,
                    "LOCAL_RANK": rank % per_node,
                    "LOCAL_WORLD_SIZE": per_node,
                    "NUM_NODES": num_nodes,
                    "FS_LOCAL_RANK": rank,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
                theirs = {
                    **(environment or {}),
                    **{name: str(value) for name, value in place.items()},
                }
                job = (target, json.dumps(arguments), f"{folder}/{rank}")
                ranks.append(Forked(_run_rank, *job, environment=theirs))
            _wait_for_all(ranks, target, timeout_s)
        finally:
            for each in ranks:
                each.end()
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(num_ranks)]


def _wait_for_all(ranks: list[Forked], target: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        ended = connection.wait(list(running), deadline_s - time.monotonic())
        if not ended:
            for each in ranks:
                each.send_signal(SHOWS_ITS_LINE)
            time.sleep(TIME_TO_SHOW_S)
            logs = "\n".join(_log(ranks, rank) for rank in range(len(ranks)))
            raise RanksFailed(
                f"{target} on {len(ranks)} ranks did not finish in {timeout_s:g} s\n{logs}"
            )
        for sentinel in ended:
            rank = running.pop(sentinel)  # type: ignore[call-overload]
            if code := ranks[rank].wait():
                log = _log(ranks, rank)
                raise RanksFailed(
                    f"{target} on {len(ranks)} ranks failed\n{log}\nended with exit code {code}"
                )


def _log(ranks: list[Forked], rank: int) -> str:
    return f"--- rank {rank} ---\n{ranks[rank].said()[-SHOWN_CHARACTERS:]}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _run_rank(target: str, arguments: str, result: str) -> int:
    """In a forked rank: call, and write the result."""
    faulthandler.enable()
    faulthandler.register(SHOWS_ITS_LINE)

    def call() -> None:
        module, _, name = target.partition(":")
        function = getattr(importlib.import_module(module), name)
        Path(result).write_text(json.dumps(function(**json.loads(arguments))))

    exit_after(call)
