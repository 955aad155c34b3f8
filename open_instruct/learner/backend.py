"""A backend holds the weights of a policy and steps its optimizer, with one sharding library or another."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from olmo_core.nn.transformer import Transformer
from olmo_core.train.train_module import TrainModule

from open_instruct.config.training import LearnerConfig
from open_instruct.errors import InputError
from open_instruct.learner.reference import Reference
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained

Metrics = Mapping[str, float | torch.Tensor]
"""Numbers of an update, the same on every rank; a tensor is one number that the host has not waited for."""

GRAD_NORM = "grad_norm"
"""The norm of the whole gradient before it was clipped."""


def has_part(names: Iterable[str], part: str) -> bool:
    """Whether a checkpoint with these `names` has that part."""
    return any(name.startswith(f"{part}.") for name in names)


def refuse_other_backend(names: Iterable[str], *, own: str, part: str) -> None:
    """:raises InputError: a checkpoint with these `names` lacks the `part` that the backend `own` writes."""
    if not has_part(names, part):
        raise InputError(
            f"the checkpoints in --output_dir are not of --backend {own}, which cannot go on from them: give the "
            "--backend that they began with, or start in another --output_dir from the hf_model such a run ends with"
        )


class Backend(Protocol):
    """One rank's shards of a model and its optimizer. Every method is collective.

    An update is: `microbatch` and in it `backward` for each microbatch, `clip`, then either `set_learning_rate` and
    `step`, or `leave_out_step`.
    """

    reference: Reference | None
    """The reference policy, for losses with a penalty for leaving it. Set it before the first step, and before a
    checkpoint is loaded: one that moves is part of the checkpoints."""

    model: Transformer
    """The trained model: this rank's shards, in the parameters' own dtype."""

    @property
    def computing_model(self) -> Transformer:
        """The model to call; `model` itself, or a copy of it in `compute_dtype`."""

    @property
    def compute_dtype(self) -> torch.dtype: ...

    device: torch.device

    @property
    def dp_process_group(self) -> dist.ProcessGroup | None:
        """The data-parallel group: this rank, and the ranks that see other rows."""

    @property
    def leaves_out_outliers(self) -> bool:
        """Whether a step with a gradient that is not finite is left out; otherwise it ends the run."""

    @property
    def train_module(self) -> TrainModule:
        """OLMo-core's checkpoints and callbacks read the state of model and optimizer from this train module."""

    def set_mode(self, mode: Literal["train", "eval"]) -> None: ...

    def microbatch(self, index: int, num_microbatches: int) -> AbstractContextManager[None]:
        """Within, forward and backward of one of the microbatches of an update."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add to the gradients those of `loss` summed over all ranks: a backend that averages multiplies it first."""

    def clip(self) -> torch.Tensor | None:
        """Clip the gradient and return its norm before clipping; None where only `step` clips and knows the norm."""

    def set_learning_rate(self) -> float | torch.Tensor:
        """Set the scheduled learning rate of the coming step, and return it."""

    def step(self, *, loss: float, grad_norm: float) -> Metrics:
        """Take the optimizer's step. Returns `grad_norm` if it is known only now, and `step_skipped` if that can be.

        :param loss: the update's, over all ranks; an optimizer may recognise an outlier by it.
        :param grad_norm: the norm that `clip` returned.
        """

    def leave_out_step(self) -> None:
        """Drop the gradients, and change nothing."""

    def zero_grads(self) -> None: ...

    def moving_reference(self, pretrained: Pretrained, *, run: Run, config: LearnerConfig, **moves: Any) -> Reference:
        """A reference that starts from `pretrained` then follows the policy; `moves` are `Reference`'s arguments."""
