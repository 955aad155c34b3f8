"""The backend on FSDP2: OLMo-core's train module, whose model serves any loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from olmo_core.distributed.utils import get_world_size
from olmo_core.nn.transformer import Transformer
from olmo_core.optim import SkipStepOptimizer
from olmo_core.train.train_module.transformer import TransformerDataParallelConfig
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from open_instruct.config.training import LearnerConfig
from open_instruct.models.attention.attention import find_context_group
from open_instruct.models.compiled import prepare_compiler
from open_instruct.models.hf.names import clean_name
from open_instruct.models.shards import local_part
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.backend import (
    Metrics,
    ShardedModule,
    build_empty_model,
    has_part,
    optimizer_state_keys,
    require_same_setting,
)
from open_instruct.training.optim.optimizers import build_optimizer_config, build_scheduler
from open_instruct.training.parallelize import Parallelism, parallelize, plan_trained
from open_instruct.training.reference import Reference, build_replica

# Checkpoints of adapters hold no frozen weights; `strict` is of loading alone.
ADAPTER_STATE_OPTIONS = StateDictOptions(
    flatten_optimizer_state_dict=True, strict=False, ignore_frozen_params=True
)


def build_backend(
    pretrained: Pretrained, *, run: Run, config: LearnerConfig, num_steps: int
) -> FSDP2Backend:
    """FSDP-first: build without weights, parallelize, then stream the checkpoint into shards."""
    flags = config.model
    optim = config.optim
    device = run.process.device
    transformer = build_empty_model(
        pretrained,
        adapters=config.adapters,
        param_dtype=flags.param_dtype,
        init_device=flags.init_device,
    )
    parallelism = plan_trained(transformer, run=run, config=config)
    # FSDP gathers in the compute dtype; on a single device a copy in that dtype computes, unless
    # the model is frozen.
    has_copy = (
        run.layout.single_device and flags.param_dtype != "float32" and config.adapters is None
    )
    if not has_copy:
        parallelize(transformer, parallelism)
    # An optimizer keeps its states where weights are, unless it is told otherwise.
    on_host = config.parallel.adam_offload and device.type == "cuda" and not config.parallel.offload
    state_options: dict[str, StateDictOptions] = {}
    if config.adapters is not None:
        state_options["state_dict_save_opts"] = ADAPTER_STATE_OPTIONS
        state_options["state_dict_load_opts"] = ADAPTER_STATE_OPTIONS
    module = FSDP2Backend(
        parallelism=parallelism,
        reduces_last=config.parallel.gradient_reduction == "last",
        model=transformer,
        optim=build_optimizer_config(
            optim,
            device=device,
            names=pretrained.names.olmo_core_names,
            on_host=on_host,
            has_dtensors=True,
        ),
        scheduler=build_scheduler(optim, num_steps=num_steps),
        # Infinity clips nothing and still measures the norm.
        max_grad_norm=optim.max_grad_norm or math.inf,
        device=device,
        max_sequence_length=config.data.max_seq_length,
        rank_microbatch_size=config.data.max_seq_length,
        **state_options,
    )
    if has_copy:
        copy = build_replica(
            pretrained,
            parallelism,
            run=run,
            flags=flags,
            max_seq_length=config.data.max_seq_length,
        )
        module.set_computing_copy(copy)
    module.fill(
        pretrained, run=run, memory=config.memory, adapters=config.adapters, seed=optim.seed
    )
    return module


def hand_gradients_over(copy: Transformer, masters: Transformer) -> None:
    """Have the gradients of `copy`, which computes in another dtype, go to the float32 `masters`.

    FSDP casts a sharded model unit by unit. On a single device the whole copy stays, and the
    masters are updated, saved and exported: an update that is small beside a weight would be lost
    in bfloat16, but not in float32. Gradients go over as soon as each is whole, and add up there in
    float32.
    """
    for parameter, master in zip(copy.parameters(), masters.parameters(), strict=True):
        parameter.register_post_accumulate_grad_hook(partial(_hand_over, master))


def _hand_over(master: torch.Tensor, parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None
    parameter.grad = None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)


class FSDP2Backend(ShardedModule):
    """A `Backend`: a model that FSDP2 shards as HSDP, and OLMo-core's optimizer.

    Args:
        parallelism: of a model that `parallelize` has seen; None: OLMo-core parallelizes it, by its
            own arguments.
        reduces_last: gradients stay whole on each rank, in float32, until the last microbatch of an
            update is done.
        olmo_core: arguments of `TransformerTrainModule`.
    """

    def __init__(
        self,
        *,
        parallelism: Parallelism | None = None,
        reduces_last: bool = False,
        **olmo_core: Any,
    ) -> None:
        self.parallelism = parallelism
        super().__init__(mesh=None if parallelism is None else parallelism.mesh, **olmo_core)
        # Tensors are copied from a GPU while the training goes on, not when they are listed.
        self.state_dict_save_opts.cpu_offload = False
        self.reduces_last = reduces_last
        self._copy: Transformer | None = None
        # FSDP averages gradients over the ranks that split rows too, though each has only its own
        # tokens' part.
        context = find_context_group(self.model)
        self._num_averaged = get_world_size(self.dp_process_group)
        if context is not None:
            self._num_averaged *= context.degree

    def set_computing_copy(self, model: Transformer) -> None:
        """Run the passes with `model`, an unfilled copy of the trained model in another dtype."""
        self._copy = model
        hand_gradients_over(model, self.model)

    @property
    def dp_config(self) -> TransformerDataParallelConfig | None:
        return super().dp_config if self.parallelism is None else self.parallelism.sharding

    @property
    def computing_model(self) -> Transformer:
        return self.model if self._copy is None else self._copy

    @property
    def compute_dtype(self) -> torch.dtype:
        if self.dp_config is not None and self.dp_config.param_dtype is not None:
            return self.dp_config.param_dtype.as_pt()
        return next(self.computing_model.parameters()).dtype

    @contextmanager
    def microbatch(self, index: int, num_microbatches: int) -> Iterator[None]:
        with self._train_microbatch_context(index, num_microbatches):
            if self.reduces_last and isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(index == num_microbatches - 1)
            yield

    def backward(self, loss: torch.Tensor) -> None:
        if self.computing_model.compile_enabled:
            loss.register_hook(lambda _: prepare_compiler())  # in the thread of this backward pass
        (loss * self._num_averaged).backward()

    @torch.no_grad()
    def clip(self) -> torch.Tensor:
        """Scale the gradients down to the largest norm allowed; returns the norm before.

        It is `nn.utils.clip_grad_norm_`, but each rank scales its parts by itself: of DTensors
        torch would first work out, in the first step, how each may be sharded.
        """
        assert self.max_grad_norm is not None
        parameters = self.model.parameters()
        gradients = [each.grad for each in parameters if each.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        scale = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if gradients:
            torch._foreach_mul_([local_part(each) for each in gradients], scale)
        return norm

    def step(self, *, loss: float, grad_norm: float) -> Metrics:
        assert self.optim is not None
        if isinstance(self.optim, SkipStepOptimizer):
            device = self.optim.device
            self.optim.latest_loss = torch.tensor(loss, device=device)
            self.optim.latest_grad_norm = torch.tensor(grad_norm, device=device)
        self.optim.step()
        self.model.post_optim_step()
        self.refresh_computing_weights()
        if isinstance(self.optim, SkipStepOptimizer):
            return {"step_skipped": self.optim.step_skipped}
        return {}

    def leave_out_step(self) -> None:
        """Nothing is left to do: `zero_grads` drops the gradients."""

    def moving_reference(self, build_model: Callable[[], Transformer], **moves: Any) -> Reference:
        return Reference(model=build_model(), **moves)

    @torch.no_grad()
    def refresh_computing_weights(self) -> None:
        """Update the copy that computes; call it after every change of the weights of `model`."""
        if self._copy is None:
            return
        masters = self.model.parameters()
        for parameter, master in zip(self._copy.parameters(), masters, strict=True):
            local_part(parameter).copy_(local_part(master))

    def state_dict_to_save(self, *, optim: bool | None = None) -> dict[str, Any]:
        if optim is False or self.optim is None:
            return super().state_dict_to_save(optim=optim)
        # PyTorch's own functions would have an optimizer without a state take a step of zero
        # gradients, which AdamW counts. They also take five times as long, and the training waits
        # for that.
        return flatten_state(self.model, self.optim)

    def state_dict_to_load(
        self, metadata: Metadata, *, optim: bool | None = None
    ) -> dict[str, Any]:
        saved_metadata = metadata.state_dict_metadata
        require_same_setting("--backend", "olmo_core", has_part(saved_metadata, "model"))
        # Saved before the optimizer's first step.
        if self.optim is not None and not optimizer_state_keys(saved_metadata):
            self.optim.state.clear()
            state = flatten_state(self.model, self.optim)
            if not has_part(saved_metadata, "optim"):  # weights alone, of `convert` or OLMo-core's
                del state["optim"]
            return state
        state = super().state_dict_to_load(metadata, optim=optim)
        if "optim" not in state:  # only the weights were asked for
            return state
        require_same_setting(
            "--optimizer",
            "this command's",
            optimizer_state_keys(state["optim"]) == optimizer_state_keys(saved_metadata),
        )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not optimizer_state_keys(state_dict.get("optim", {})):
            # PyTorch would give the optimizer the state of a step, see `state_dict_to_save`.
            state_dict = {name: part for name, part in state_dict.items() if name != "optim"}
        super().load_state_dict(state_dict)
        self.refresh_computing_weights()


def flatten_state(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """The present state of both, flat, by the names of PyTorch's distributed checkpoints.

    Frozen weights are left out. An optimizer that has not taken a step has settings
    (`param_groups`) and no state.
    """
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    frozen = {name for parameter, name in names.items() if not parameter.requires_grad}
    weights: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if clean_name(name) not in frozen:
            weights[clean_name(name)] = tensor
    states: dict[str, Any] = {}
    for group in optim.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            name = names[parameter]
            for key, value in optim.state.get(parameter, {}).items():
                states[f"state.{name}.{key}"] = value
            for key, value in settings.items():
                states[f"param_groups.{name}.{key}"] = value
    return {"model": weights, "optim": states}
