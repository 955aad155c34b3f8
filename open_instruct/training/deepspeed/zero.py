"""The backend on DeepSpeed: ZeRO holds the shards of OLMo-core's model and takes its steps."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from olmo_core.nn.transformer import Transformer
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh

from open_instruct.checkpoints.safe_checkpointer import SafeCheckpointer
from open_instruct.config.sharding_sections import MemorySection
from open_instruct.config.training import LearnerConfig
from open_instruct.models.heads.value_head import ValueHead
from open_instruct.parallel.data_parallel import find_mesh
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.backend import (
    GRAD_NORM,
    Metrics,
    ShardedModule,
    build_empty_model,
    has_part,
    require_same_setting,
)
from open_instruct.training.deepspeed.adam import choose_adam_config, choose_adam_kind
from open_instruct.training.deepspeed.deepcompile import (
    compile_engine,
    require_compiled_backward,
    require_cuda,
)
from open_instruct.training.deepspeed.library import deepspeed
from open_instruct.training.deepspeed.settings import engine_settings
from open_instruct.training.deepspeed.shards import (
    MOMENTS,
    Masters,
    list_zero_tensors,
    make_init_weights,
)
from open_instruct.training.deepspeed.swapped_reference import SwappedReference
from open_instruct.training.model.kernels import choose_kernels
from open_instruct.training.optim.optimizers import (
    build_optimizer_config,
    build_scheduler,
)
from open_instruct.training.parallelize import Parallelism, parallelize
from open_instruct.training.reference import Reference

ZERO_STATE = "zero"
"""The name of DeepSpeed's part of a checkpoint."""


def start_deepspeed(run: Run, *, timeout_s: float) -> DeviceMesh:
    """Set DeepSpeed up on the process group of `start_process`; returns the mesh."""
    process = run.process
    # DeepSpeed reads a launcher's variables, and remembers the groups of an earlier run in this
    # process.
    os.environ.setdefault("LOCAL_RANK", str(process.local_rank))
    deepspeed.comm.comm.cdb = None
    deepspeed.utils.groups._release_process_group_references()
    deepspeed.init_distributed(timeout=timedelta(seconds=timeout_s))
    mesh = find_mesh(run.layout, process.device)
    assert mesh is not None
    return mesh


def without_compilation(memory: MemorySection) -> MemorySection:
    """The flags without --compile_model.

    DeepSpeed compiles no blocks, so a broken compiler needs no warning.
    """
    return replace(memory, compile_model=False)


def build_backend(
    pretrained: Pretrained, *, run: Run, config: LearnerConfig, num_steps: int
) -> ZeroBackend:
    """Build without weights, partition, then stream the checkpoint into the shards."""
    parallel = config.parallel
    optim = config.optim
    param_dtype = config.model.param_dtype
    max_seq_length = config.data.max_seq_length
    device = run.process.device
    if parallel.deepcompile:
        require_cuda(device)
    mesh = start_deepspeed(run, timeout_s=parallel.dist_timeout_s)
    # They name no gradient accumulation, so DeepSpeed does not divide by it.
    settings = engine_settings(
        parallel,
        param_dtype=param_dtype,
        max_grad_norm=optim.max_grad_norm,
        on_cuda=device.type == "cuda",
    )
    transformer = build_empty_model(
        pretrained, adapters=config.adapters, param_dtype=param_dtype, init_device="meta"
    )
    if isinstance(transformer.lm_head, ValueHead):
        # DeepSpeed takes one dtype for all, and steps float32 ones.
        transformer.lm_head.keeps_float32 = False
    transformer.to(getattr(torch, param_dtype))  # adapters too
    adamw = build_optimizer_config(optim, device=device, names=pretrained.names.olmo_core_names)
    adam = choose_adam_kind(device, adam_offload=parallel.adam_offload)
    # DeepSpeed shards, and splits matrices, by itself.
    parallelism = Parallelism(
        mesh=mesh,
        context_parallel=run.layout.context_parallel_degree > 1,
        checkpointing=choose_kernels(
            transformer,
            run=run,
            memory=without_compilation(config.memory),
            param_dtype=param_dtype,
            shares_prompts=config.shares_prompts,
        ),
    )
    parallelize(transformer, parallelism)
    module = ZeroBackend(
        mesh=mesh,
        settings=settings,
        model=transformer,
        optim=choose_adam_config(adamw, adam, warn=run.console.warn),
        scheduler=build_scheduler(optim, num_steps=num_steps),
        rank_microbatch_size=max_seq_length,
        max_sequence_length=max_seq_length,
        max_grad_norm=optim.max_grad_norm or math.inf,
        device=device,
    )
    module.fill(
        pretrained, run=run, memory=config.memory, adapters=config.adapters, seed=optim.seed
    )
    if parallel.deepcompile:
        compile_engine(module.engine)
    run.console.say(f"optimizer: {type(module.optim).__name__}")
    dist.barrier()  # no rank is ready before all are
    return module


@contextmanager
def _embeddings_alone(model: Transformer) -> Iterator[None]:
    """Take the head's `weight` away in the block, if it shares that matrix with the embeddings.

    Stage 3 reduces the gradient of a head, gathered as a whole, when the head's backward pass ends.
    At that time the embeddings have not yet added their part to a shared matrix, so DeepSpeed must
    see it as the embeddings' alone.
    """
    matrix = model.lm_head.w_out
    embeddings = model.embeddings
    is_shared = matrix.weight is embeddings.weight
    if is_shared:
        del matrix.weight
    yield
    if is_shared:
        matrix.weight = embeddings.weight


class ZeroBackend(ShardedModule):
    """A `Backend`: a model and an optimizer that DeepSpeed shares among ranks.

    Args:
        settings: DeepSpeed's configuration.
        olmo_core: arguments of `TransformerTrainModule`.
    """

    def __init__(
        self, *, settings: Mapping[str, Any], model: Transformer, **olmo_core: Any
    ) -> None:
        self._tensor_degree = settings["tensor_parallel"]["autotp_size"]
        # Added to names in a checkpoint where ranks split matrices, since values have another order
        # there.
        self._suffix = ""
        if self._tensor_degree > 1:
            self._suffix = f"_over_{self._tensor_degree}"
        if settings["zero_optimization"]["stage"] == 3 or self._tensor_degree > 1:
            dtype = next(model.parameters()).dtype
            init_weights = make_init_weights(settings, dtype=dtype)
            model.init_weights = MethodType(init_weights, model)  # type: ignore[method-assign]
        # Ranks call the head a different number of times in a microbatch, so stage 3 gathers its
        # weights only once. A compiled pass does so anyway, and DeepCompile leaves the hooks behind
        # that reduce a leaf's gradients in DeepSpeed's other way.
        if not settings["compile"]["deepcompile"]:
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.lm_head)])
        super().__init__(model=model, **olmo_core)
        self._manages_accumulation = settings["managed_gradient_accumulation"]
        self._norm: float | None = None
        self._leaves_out = False
        assert self.optim is not None
        take_step = self.optim.step

        def step_unless_refused() -> None:
            if not self._refuses_step():
                take_step()

        # DeepSpeed knows the gradient's norm only when it calls the optimizer, so the check has to
        # be there.
        self.optim.step = step_unless_refused  # type: ignore[assignment, method-assign]
        with _embeddings_alone(self.model):
            self.engine: Any = deepspeed.initialize(
                model=self.model,
                optimizer=self.optim,
                config=dict(settings),
                dist_init_required=False,
            )[0]
        if self._tensor_degree > 1:
            # It would fail on one rank and leave the others waiting.
            self.engine.first_dataloader_check.remove()
        self.masters: Masters = Masters(self.engine, rank=dist.get_rank())

    @property
    def computing_model(self) -> Transformer:
        """The engine, which is called like its model, and gathers what stage 3 partitions."""
        return cast(Transformer, self.engine)

    def refresh_computing_weights(self) -> None:
        self.masters.refresh_computing_weights()

    def microbatch(self, index: int, num_microbatches: int) -> AbstractContextManager[None]:
        """A microbatch needs no context of its own: gradients add up until the engine steps.

        Under DeepCompile the engine is told whether it is the last, as its backward pass then ends
        the accumulation.
        """
        if self._manages_accumulation:
            self.engine.set_gradient_accumulation_boundary(index == num_microbatches - 1)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        # DeepSpeed averages over all ranks but those that split matrices: it does not know which
        # ranks split rows.
        num_averaged = dist.get_world_size() // self._tensor_degree
        self.engine.backward(loss * num_averaged, scale_wrt_gas=False)

    def clip(self) -> None:
        """Nothing is known of the norm here: gradients are reduced and clipped in the step."""

    def step(self, *, loss: float, grad_norm: float) -> Metrics:
        """Take the engine's step.

        If the norm that it returns is not finite, no weight has changed.
        """
        self._take_step()
        self.model.post_optim_step()
        assert self._norm is not None
        return {GRAD_NORM: self._norm}

    def leave_out_step(self) -> None:
        """Call the engine's step without the optimizer's: DeepSpeed drops gradients only there."""
        self._leaves_out = True
        self._take_step()
        self._leaves_out = False

    def zero_grads(self) -> None:
        """Nothing is left to do: DeepSpeed drops the gradients in its step."""

    def _take_step(self) -> None:
        if self.engine.is_deepcompile_active():
            require_compiled_backward(self.model)
        self._norm = None
        self.engine.step()
        # DeepSpeed does not ask if it found by itself that the gradient is not finite.
        self._refuses_step()

    def _refuses_step(self) -> bool:
        """Whether the optimizer takes no step; called within the engine's, after the reduction."""
        if self._norm is None:
            if self.engine.zero_optimization():
                norm = self.engine.optimizer._global_grad_norm
            else:
                # Without ZeRO every rank has the whole gradient, and it is clipped here.
                max_norm = cast(float, self.max_grad_norm)
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            self._norm = float(norm)
        return self._leaves_out or not math.isfinite(self._norm)

    def moving_reference(self, build_model: Callable[[], Transformer], **moves: Any) -> Reference:
        """A `SwappedReference`, which builds no second model."""
        del build_model
        parts = self.masters.parts
        return SwappedReference(
            model=self.computing_model,
            masters=self.masters,
            weights={name: part.weights.clone() for name, part in parts.items()},
            wait_for_copy=self._wait_for_copy,
            **moves,
        )

    def _wait_for_copy(self) -> None:
        cast(SafeCheckpointer, self.trainer.checkpointer).wait_for_copy()

    def list_resident_tensors(self) -> Iterator[torch.Tensor]:
        yield from super().list_resident_tensors()
        yield from list_zero_tensors(self.engine)

    def state_dict_to_save(self, *, optim: bool | None = None) -> dict[str, Any]:
        return self._flatten_state()

    def _flatten_state(self) -> dict[str, Any]:
        """The state as flat ranges, the same for every stage.

        So a run may go on under another stage, or on other ranks.
        """
        parts = self.masters.parts
        weights = {name: part.weights for name, part in parts.items()}
        state: dict[str, Any] = {f"weights{self._suffix}": self.masters.list_parts(weights)}
        for moment in MOMENTS:
            values = {name: part.moments[moment] for name, part in parts.items()}
            state[f"{moment}{self._suffix}"] = self.masters.list_parts(values)
        return {ZERO_STATE: {**state, "num_steps": self.masters.num_steps}}

    def state_dict_to_load(
        self, metadata: Metadata, *, optim: bool | None = None
    ) -> dict[str, Any]:
        names = metadata.state_dict_metadata
        require_same_setting("--backend", "deepspeed", has_part(names, ZERO_STATE))
        require_same_setting(
            "--tensor_parallel_degree",
            self._tensor_degree,
            has_part(names, f"{ZERO_STATE}.weights{self._suffix}"),
        )
        return self._flatten_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict whose parts were filled in place."""
        self.masters.refresh_computing_weights(num_steps=state_dict[ZERO_STATE]["num_steps"])
