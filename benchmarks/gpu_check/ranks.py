"""Programs on several ranks under torchrun, each run on devices of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

# cuBLAS gives the same numbers again only where its workspace is fixed.
SAME_NUMBERS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`python -m MODULE WORDS` on ranks that have the devices from `first_device` on.

    Example: `Run(name="FSDP 8", module="gpu_check.deterministic_dpo", words=("--seed", "1"),
    num_ranks=8)`.
    """

    name: str
    module: str
    words: tuple[str, ...]
    num_ranks: int
    first_device: int = 0

    def start(self, *, rehearse: bool) -> subprocess.Popen[bytes]:
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(self.num_ranks),
        ]
        environment = os.environ | SAME_NUMBERS
        if not rehearse:
            environment |= devices(self.first_device, self.num_ranks)
        return subprocess.Popen(
            [sys.executable, *launcher, "-m", self.module, *self.words], env=environment
        )


def devices(first: int, count: int) -> dict[str, str]:
    """What a process is given to see `count` devices."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(index) for index in range(first + count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + count])}


def codes_of(runs: Sequence[Run], *, rehearse: bool) -> dict[str, int]:
    """The exit code of each, all at the same time; in a rehearsal they take turns on a few
    cores.
    """
    if rehearse:
        return {run.name: run.start(rehearse=True).wait() for run in runs}
    running = {run.name: run.start(rehearse=False) for run in runs}
    return {name: process.wait() for name, process in running.items()}
