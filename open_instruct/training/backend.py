"""A backend holds the weights of a policy and steps its optimizer, with one sharding library or
another.

`Backend` says what a policy asks of it. Our two have in common OLMo-core's train module, filled
from a start model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from olmo_core.nn.transformer import Transformer
from olmo_core.optim import SkipStepOptimizer
from olmo_core.train.train_module import TrainModule, TransformerTrainModule
from torch.distributed.checkpoint.metadata import Metadata

from open_instruct.config.training import LearnerConfig
from open_instruct.core.errors import InputError
from open_instruct.core.text import counted
from open_instruct.models.load import parameter_shapes, stream_load
from open_instruct.models.lora.adapters import adapt, fill_adapter
from open_instruct.models.transformer import SegmentTransformer
from open_instruct.parallel.status import this_process
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.model.inputs_on_host import offload_inputs
from open_instruct.training.optim.optimizers import set_learning_rate
from open_instruct.training.reference import Reference

Metrics = Mapping[str, float | torch.Tensor]
"""Numbers of an update, the same on every rank; a tensor is one number that the host has not waited
for.
"""

GRAD_NORM = "grad_norm"
"""The norm of the whole gradient before it was clipped."""

IN_CHECKPOINT = "reference"
"""The part of a checkpoint for a reference policy that moves."""

OF_CRITIC = "critic"
"""The part of a checkpoint for a critic, its optimizer's state too."""


def has_part(names: Iterable[str], part: str) -> bool:
    """Whether a checkpoint with these `names` has that part."""
    return any(name.startswith(f"{part}.") for name in names)


def critics(metadata: Metadata) -> Metadata:
    """The part of a checkpoint's `metadata` that is a critic's.

    :raises InputError: it has none.
    """
    saved, start = metadata.state_dict_metadata, f"{OF_CRITIC}."
    refuse_others("--advantages", "gae", has_part(saved, OF_CRITIC))
    own = {name.removeprefix(start): each for name, each in saved.items() if name.startswith(start)}
    return Metadata(state_dict_metadata=own)


def kept_of_weights(names: Iterable[str]) -> set[str]:
    """What an optimizer keeps of each weight, by the names of its state in a checkpoint or
    alone.
    """
    return {
        name.rpartition(".")[2] for name in names if name.startswith(("optim.state.", "state."))
    }


def refuse_others(flag: str, own: object, is_own: bool) -> None:
    """Refuse checkpoints that were written under another value of `flag`.

    Args:
        own: the value of this run.

    Raises:
        InputError: not `is_own`: the checkpoints are of another value.
    """
    if not is_own:
        raise InputError(
            f"the checkpoints in --output_dir are of another {flag} than {own}: give theirs "
            "again, or start in another --output_dir from the hf_model such a run ends with",
            kind="other_run",
        )


class Backend(Protocol):
    """One rank's shards of a model and its optimizer. Every method is collective.

    An update is: `microbatch` and in it `backward` for each microbatch, `clip`, then either
    `set_learning_rate` and `step`, or `leave_out_step`.
    """

    reference: Reference | None
    """The reference policy, for losses with a penalty for leaving it. Set it before the first step,
    and before a checkpoint is loaded: one that moves is part of the checkpoints.
    """

    critic: Backend | None
    """The backend of a critic, whose weights and optimizer are part of the checkpoints too.

    Set it when that one is.
    """

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
        """Whether a step with a gradient that is not finite is left out; otherwise it ends the
        run.
        """

    @property
    def train_module(self) -> TrainModule:
        """OLMo-core's checkpoints and callbacks read the state of model and optimizer from this
        train module.
        """

    def set_mode(self, mode: Literal["train", "eval"]) -> None: ...

    def microbatch(self, index: int, num_microbatches: int) -> AbstractContextManager[None]:
        """Within, forward and backward of one of the microbatches of an update."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add to the gradients those of `loss` summed over all ranks: a backend that averages
        multiplies it first.
        """

    def clip(self) -> torch.Tensor | None:
        """Clip the gradient and return its norm before clipping;

        None where only `step` clips and knows the norm.
        """

    def set_learning_rate(self) -> float | torch.Tensor:
        """Set the scheduled learning rate of the coming step, and return it."""

    def step(self, *, loss: float, grad_norm: float) -> Metrics:
        """Take the optimizer's step. Returns `grad_norm` if it is known only now, and
        `step_skipped` if that can be.

        :param loss: the update's, over all ranks; an optimizer may recognise an outlier by it.
        :param grad_norm: the norm that `clip` returned.
        """

    def leave_out_step(self) -> None:
        """Drop the gradients, and change nothing."""

    def zero_grads(self) -> None: ...

    def moving_reference(
        self, pretrained: Pretrained, *, run: Run, config: LearnerConfig, **moves: Any
    ) -> Reference:
        """A reference that starts from `pretrained` then follows the policy;

        `moves` are `Reference`'s arguments.
        """


def unfilled(
    pretrained: Pretrained, config: LearnerConfig, *, init_device: str
) -> SegmentTransformer:
    """The start model without its weights, with the adapters that the flags ask for."""
    this_process.begin("loading the start model")
    model = pretrained.build(init_device=init_device)
    if config.adapters is not None:
        adapt(model, config.adapters, dtype=getattr(torch, config.model.param_dtype))
    return model


class ShardedModule(TransformerTrainModule):
    """The common part of two `Backend`s; see there. It is built without weights: call `fill`."""

    reference: Reference | None = None
    critic: Backend | None = None

    @property
    def computing_model(self) -> Transformer:
        return self.model

    @property
    def compute_dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def leaves_out_outliers(self) -> bool:
        return isinstance(self.optim, SkipStepOptimizer)

    @property
    def train_module(self) -> TransformerTrainModule:
        return self

    def weights_changed(self) -> None:
        """Have the passes compute with weights that were written from outside."""

    def fill(self, pretrained: Pretrained, *, run: Run, config: LearnerConfig) -> None:
        """Stream the start model into the shards. Collective."""
        offload_inputs(self.computing_model, config.memory, run.process.device)
        report = stream_load(self.model, pretrained.files, pretrained.names)
        if config.adapters is not None:
            fill_adapter(
                self.model, config.adapters, seed=config.optim.seed, start=pretrained.adapter
            )
        self.weights_changed()
        num_params = sum(map(prod, parameter_shapes(self.model).values()))
        run.console.say(
            f"loaded {counted(report.num_tensors, 'tensor')} ({num_params / 1e6:,.1f}M parameters) "
            f"in {report.wall_time_s:.1f} s"
        )

    def set_mode(self, mode: Literal["train", "eval"]) -> None:
        self._set_model_mode(mode)
        self.computing_model.train(mode == "train")

    def set_learning_rate(self) -> float | torch.Tensor:
        return set_learning_rate(self.optim, self.scheduler, self.trainer)

    def state_of_others(self, metadata: Metadata | None = None) -> dict[str, Any]:
        """The parts of a checkpoint for a reference that moves and a critic; with its `metadata`,
        to be filled.

        A reference is read in place, and is none if not among what was saved.

        :raises InputError: what was saved has no critic.
        """
        state: dict[str, Any] = {}
        is_wanted = metadata is None or has_part(metadata.state_dict_metadata, IN_CHECKPOINT)
        if self.reference is not None and self.reference.update_freq is not None and is_wanted:
            state[IN_CHECKPOINT] = self.reference.state()
        if self.critic is not None:
            module = self.critic.train_module
            part = (
                module.state_dict_to_save()
                if metadata is None
                else module.state_dict_to_load(critics(metadata))
            )
            state[OF_CRITIC] = part
        return state

    def load_critic(self, state_dict: dict[str, Any]) -> None:
        """Have the critic take over its part of a state dict that was filled."""
        if self.critic is not None:
            self.critic.train_module.load_state_dict(state_dict[OF_CRITIC])
