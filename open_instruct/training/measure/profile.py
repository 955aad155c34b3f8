"""Profiles of some steps of a run, by OLMo-core's callbacks.

They use torch's profiler, and record the memory history of a GPU.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from olmo_core.train.callbacks import Callback, ProfilerCallback
from olmo_core.train.callbacks.profiler import TorchMemoryHistoryCallback

from open_instruct.core.errors import InputError
from open_instruct.core.text import spell_count

log = logging.getLogger(__name__)

FOLDER = "profiler"  # OLMo-core's profiler writes there


def build_profilers(
    steps: Sequence[int], *, num_steps: int, run_folder: Path
) -> dict[str, Callback]:
    """Callbacks, by name, that profile rank 0 from the first to the last of `steps`.

    There are none where `steps` is empty.

    :raises InputError: the run has no such steps.
    """
    if not steps:
        return {}
    first, last = steps
    if last > num_steps:
        raise InputError(
            f"--profile_steps {first} {last}: the run has {spell_count(num_steps, 'step')}; name "
            "some of them",
            kind="out_of_range",
        )
    callbacks: dict[str, Callback] = {
        "step_profiler": StepProfiler(first=first, active=last - first + 1, wait=0)
    }
    if torch.cuda.is_available():
        folder = str(run_folder / FOLDER)
        callbacks["memory_history"] = TorchMemoryHistoryCallback(
            start=first, end=last, output_dir=folder
        )
    return callbacks


@dataclass
class StepProfiler(ProfilerCallback):
    """OLMo-core's profiler, set to begin at the run's step `first`.

    By itself it counts the steps from a process's start.
    """

    first: int = 1

    def pre_train(self) -> None:
        num_before = self.first - 1 - self.step
        if num_before < 0:
            log.warning(
                "--profile_steps: step %d was taken before this start, so there is no profile",
                self.first,
            )
            self.enabled = False
        self.warmup = min(1, num_before)
        self.skip_first = num_before - self.warmup
        super().pre_train()
