"""Small learners for tests: what a process group needs of them, and ways to fail."""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from open_instruct.core.errors import InputError, RunError
from open_instruct.parallel.process import start_process


class Recruit:
    """Joins the process group when it is constructed."""

    def __init__(self) -> None:
        self.seen_gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.process = start_process(timeout_s=600, seed=0)

    def whereabouts(self) -> dict[str, Any]:
        import ray

        return {
            "rank": self.process.rank,
            "node_id": ray.get_runtime_context().get_node_id(),
            "gpus_per_node": self.process.gpus_per_node,
            "local_rank": self.process.local_rank,
            "seen_gpus": self.seen_gpus,
            "own_gpus": ray.get_runtime_context().get_accelerator_ids()["GPU"],
            "environment": {
                name: os.environ.get(name)
                for name in ("NUM_NODES", "MASTER_ADDR", "OMP_NUM_THREADS")
            },
        }

    def sum_of_ranks(self) -> int:
        ranks = torch.tensor(self.process.rank)
        dist.all_reduce(ranks)
        return int(ranks)

    def add(self, left: int, right: int) -> int:
        return left + right

    def double(self, number: int) -> int:
        return 2 * number

    def meet(self, late_rank: int, seconds: float) -> None:
        """All meet in a collective, for which one rank is late."""
        if self.process.rank == late_rank:
            time.sleep(seconds)
        dist.barrier()

    def fail(self, kind: str, rank: int) -> None:
        """One rank fails; where it fails by "run" or "freeze", the others wait for it."""
        if self.process.rank == rank:
            if kind == "input":
                raise InputError("row 7 has no prompt")
            if kind == "run":
                raise RunError("the disk is full")
            if kind == "bug":
                raise KeyError("no such key")
            if kind == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
        if kind in ("run", "freeze"):
            dist.barrier()

    def catch_up(self, kind: str, rank: int) -> None:
        """The rank that failed meets those that wait for it."""
        if kind == "run" and self.process.rank == rank:
            dist.barrier()
