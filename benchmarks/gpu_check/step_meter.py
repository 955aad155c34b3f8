"""Steps of a run that are timed, and its end after the last of them."""

import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from olmo_core.train.callbacks import Callback

from gpu_check.compiler import compiled_versions
from gpu_check.devices import wait
from gpu_check.host_waits import counted_host_waits
from open_instruct.training.backend import Backend


class Enough(Exception):
    """The steps that were to be measured are over."""


@dataclass
class StepMeter(Callback):
    """Times the steps, counts the host's waits in one of them, and ends the run after
    `num_steps`.
    """

    num_steps: int
    waits_in_step: int | None
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    most_tokens: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    versions: dict[str, int] = field(default_factory=dict)
    _held: ExitStack = field(default_factory=ExitStack)
    _began_s: float = 0.0

    def pre_load_batch(self) -> None:
        if self.step + 1 == self.waits_in_step:
            self.waits = self._held.enter_context(
                counted_host_waits(on_cuda=self._device.type == "cuda")
            )
        self._began_s = time.perf_counter()

    def pre_step(self, batch: dict[str, Any]) -> None:
        # Not before: only now the metrics of the last one are written.
        if self.step > self.num_steps:
            raise Enough
        self.tokens.append(sum(update.counts["tokens"] for update in batch["updates"]))
        rows = (
            each.packed.input_ids_BT for update in batch["updates"] for each in update.microbatches
        )
        self.most_tokens = max(self.most_tokens, *(row.numel() for row in rows))

    def post_step(self) -> None:
        self._held.close()
        wait(self._device)
        self.seconds.append(time.perf_counter() - self._began_s)
        if self.step == self.num_steps:
            self.versions = compiled_versions(cast(Backend, self.trainer.train_module).model)

    @property
    def _device(self) -> torch.device:
        return self.trainer.device
