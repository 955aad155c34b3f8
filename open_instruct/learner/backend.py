"""What holds the shards of a policy and steps its optimizer, whatever it is built on.

A learner knows no algorithm: it is given an objective's loss. Every method is collective: all ranks call it together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from olmo_core.nn.transformer import Transformer
from olmo_core.train.train_module import TrainModule

from open_instruct.errors import InputError
from open_instruct.objectives.objective import BoundLoss, TokenLogprobs
from open_instruct.records import Batch, StepBatch

Metrics = Mapping[str, float | torch.Tensor]
"""Numbers of an update, the same on every rank; a tensor is one number that the host has not waited for."""

OF_ZERO = "zero"
"""What DeepSpeed's part of a checkpoint is called; the other backend's has several."""


def refuse_other_backend(names: Iterable[str], *, own: str) -> None:
    """:raises InputError: the checkpoint that has `names` in it is not of the backend `own`."""
    theirs = "deepspeed" if any(name.startswith(f"{OF_ZERO}.") for name in names) else "olmo_core"
    if theirs != own:
        raise InputError(
            f"the checkpoints in --output_dir are of --backend {theirs}, and --backend {own} cannot go on from them: "
            f"give --backend {theirs} again, or start in another --output_dir from the hf_model such a run ends with"
        )


class Learner(Protocol):
    """One rank of a sharded policy and its optimizer.

    A step of several updates is: `with_frozen_logprobs` for all of them, then for each of them `zero_grads`,
    `forward_backward`, `update`; at last `end_step`.
    """

    @property
    def loss(self) -> BoundLoss:
        """The objective's, that it was given."""

    @property
    def model(self) -> Transformer:
        """What is trained: the parameters' own dtype, this rank's shards."""

    @property
    def computing_model(self) -> Transformer:
        """The model to call; `model` itself, or a copy of it in the dtype that is computed in."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that see other rows than this one, this one among them."""

    @property
    def train_module(self) -> TrainModule:
        """What OLMo-core's checkpoints and callbacks are given: the state of model and optimizer."""

    def with_frozen_logprobs(self, updates: Sequence[StepBatch], *, num_epochs: int) -> tuple[StepBatch, ...]:
        """The updates of a step with the log-probs that are fixed during it."""

    def zero_grads(self) -> None: ...

    def forward_backward(self, step: StepBatch) -> Metrics:
        """Gradients of this rank's microbatches, reduced over ranks and clipped. Returns `loss` and what goes with it.

        :raises RunError: the loss or the gradient is not finite, or the first loss is not what it must be.
        """

    def update(self) -> Metrics:
        """Take the optimizer's step. Returns `grad_norm`, `lr`, and `step_skipped` where that can be."""

    def own_pace(self) -> float | None:
        """Seconds that this rank computes by itself for a token, since the last call; the first begins to measure."""

    def end_step(self) -> None:
        """Call it once after the last update of a step."""

    def scores(self, batch: Batch) -> TokenLogprobs:
        """Log-probs of the labelled tokens under the policy as it is, and what the loss compares with a teacher; no
        gradient. Call `reshard` after the last of several."""
