"""A backend holds the weights of a policy and steps its optimizer, with a library that shards.

`Backend` says what a policy asks of it. Both of ours are OLMo-core's train module, filled from a
start model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from olmo_core.nn.transformer import Transformer
from olmo_core.optim import SkipStepOptimizer
from olmo_core.train.train_module import TrainModule, TransformerTrainModule
from torch.distributed.device_mesh import DeviceMesh

from open_instruct.config.lora import LoRASection
from open_instruct.config.sharding_sections import MemorySection
from open_instruct.core.errors import InputError
from open_instruct.core.text import spell_count
from open_instruct.models.load import find_parameter_shapes, stream_load
from open_instruct.models.lora.adapters import add_adapters, fill_adapter
from open_instruct.models.storages import list_module_tensors, list_nested_tensors
from open_instruct.models.transformer import SegmentTransformer
from open_instruct.parallel.data_parallel import set_mesh
from open_instruct.parallel.status import this_process
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.model.host_heap import trim_between_blocks
from open_instruct.training.model.inputs_on_host import offload_inputs
from open_instruct.training.optim.optimizers import set_learning_rate
from open_instruct.training.reference import Reference

Metrics = Mapping[str, float | torch.Tensor]
"""Numbers of an update, the same on every rank; a tensor is one not waited for on the host."""

GRAD_NORM = "grad_norm"
"""The norm of the whole gradient before it was clipped."""


def has_part(names: Iterable[str], part: str) -> bool:
    """Whether a checkpoint with these `names` has that part."""
    return any(name.startswith(f"{part}.") for name in names)


def optimizer_state_keys(names: Iterable[str]) -> set[str]:
    """What an optimizer has for each weight, by the names of its state in a checkpoint or alone."""
    states = [name for name in names if name.startswith(("optim.state.", "state."))]
    return {name.rpartition(".")[2] for name in states}


def require_same_setting(flag: str, value: object, is_same: bool) -> None:
    """Refuse checkpoints that were written under another value of `flag` than this run's `value`.

    :raises InputError: not `is_same`.
    """
    if not is_same:
        raise InputError(
            f"the checkpoints in --output_dir are of another {flag} than {value}: give theirs "
            "again, or start in another --output_dir from the hf_model such a run ends with",
            kind="other_run",
        )


class Backend(Protocol):
    """One rank's shards of a model and its optimizer. Every method is collective.

    An update is: `microbatch` and in it `backward` for each microbatch, `clip`, then
    `set_learning_rate` and `step`; or `leave_out_step`, with or without `set_learning_rate` before.

    What no backend may do:

    - know the objective, or divide by counts of a batch: the loss that it gets is divided already;
    - give another gradient than that of the loss summed over ranks: one whose library averages
      multiplies first;
    - step from a gradient that is not finite, or change anything in `leave_out_step`;
    - call a collective on some of the ranks alone;
    - import another backend, or have its record (`config/training.py:BackendRecord`) import torch.
    """

    model: Transformer
    """The trained model: this rank's shards, in the parameters' own dtype."""

    rounding: Mapping[str, float]
    """The relative change by rounding of each matrix in 4 bits, by its name in files."""

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
        """Whether a step whose gradient is not finite is left out; otherwise it ends the run."""

    @property
    def train_module(self) -> TrainModule:
        """What OLMo-core's checkpoints and callbacks read the model and the optimizer from."""

    def set_mode(self, mode: Literal["train", "eval"]) -> None: ...

    def microbatch(self, index: int, num_microbatches: int) -> AbstractContextManager[None]:
        """The context of forward and backward of one of the microbatches of an update."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss` summed over ranks; a backend that averages multiplies it."""

    def clip(self) -> torch.Tensor | None:
        """Clip the gradient and return its norm before; None where only `step` knows the norm."""

    def set_learning_rate(self) -> float | torch.Tensor:
        """Set the scheduled learning rate of the coming step, and return it."""

    def step(self, *, loss: float, grad_norm: float) -> Metrics:
        """Take the optimizer's step, and return what is known of it.

        That is `grad_norm` if it is known only now, and `step_skipped` if steps may be skipped.

        :param loss: the update's, over all ranks; an optimizer may recognise an outlier by it.
        :param grad_norm: the norm that `clip` returned.
        """

    def leave_out_step(self) -> None:
        """Drop the gradients, and change nothing."""

    def zero_grads(self) -> None: ...

    def moving_reference(self, build_model: Callable[[], Transformer], **moves: Any) -> Reference:
        """A reference that starts from the start model, and follows the policy.

        :param build_model: builds the start model, frozen; not called where none is needed.
        :param moves: arguments of `Reference`.
        """

    def list_resident_tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that stays from step to step: weights, optimizer states, buffers.

        Several may be views of one storage. A `StateMover` takes them off the device between two
        steps, when there are no gradients, and nothing but `model` may be used until they are back.
        """


def build_empty_model(
    pretrained: Pretrained,
    *,
    adapters: LoRASection | None,
    param_dtype: str,
    init_device: str,
) -> SegmentTransformer:
    """Build the start model without its weights, with the adapters that the flags ask for."""
    this_process.begin("loading the start model")
    model = pretrained.build(init_device=init_device)
    if adapters is not None:
        add_adapters(model, adapters, dtype=getattr(torch, param_dtype))
    return model


class ShardedModule(TransformerTrainModule):
    """The common part of two `Backend`s; see there. It is built without weights: call `fill`.

    Args:
        mesh: of a model that is parallelized already. None: OLMo-core's train module is given the
            degrees, makes the mesh and parallelizes, or there is a single device.
        olmo_core: arguments of `TransformerTrainModule`.
    """

    def __init__(self, *, mesh: DeviceMesh | None = None, **olmo_core: Any) -> None:
        if mesh is not None:
            set_mesh(None)  # OLMo-core's train module makes a mesh of its own, which nothing reads
        super().__init__(**olmo_core)
        self.rounding: Mapping[str, float] = {}
        if mesh is not None:
            self.world_mesh = mesh
            set_mesh(mesh)

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

    def refresh_computing_weights(self) -> None:
        """Have the passes compute with weights that were written from outside."""

    def fill(
        self,
        pretrained: Pretrained,
        *,
        run: Run,
        memory: MemorySection,
        adapters: LoRASection | None,
        seed: int,
    ) -> None:
        """Stream the start model into the shards. Collective."""
        offload_inputs(self.computing_model, memory, run.process.device)
        trim_between_blocks(self.computing_model, memory, run.process.device)
        report = stream_load(self.model, pretrained.files, pretrained.names)
        self.rounding = report.rounding
        if adapters is not None:
            fill_adapter(self.model, adapters, seed=seed, start=pretrained.adapter)
        self.refresh_computing_weights()
        num_params = sum(map(prod, find_parameter_shapes(self.model).values()))
        run.console.say(
            f"loaded {spell_count(report.num_tensors, 'tensor')} ({num_params / 1e6:,.1f}M "
            f"parameters) in {report.wall_time_s:.1f} s"
        )

    def set_mode(self, mode: Literal["train", "eval"]) -> None:
        self._set_model_mode(mode)
        self.computing_model.train(mode == "train")

    def list_resident_tensors(self) -> Iterator[torch.Tensor]:
        yield from list_module_tensors(self.model)
        if self.computing_model is not self.model:
            yield from list_module_tensors(self.computing_model)
        assert self.optim is not None
        for state in self.optim.state.values():
            yield from list_nested_tensors(state)

    def set_learning_rate(self) -> float | torch.Tensor:
        return set_learning_rate(self.optim, self.scheduler, self.trainer)
