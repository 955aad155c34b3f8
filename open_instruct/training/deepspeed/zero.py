"""The backend on DeepSpeed:

ZeRO holds the shards of OLMo-core's model, filled from disk, and takes its steps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from types import MethodType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from olmo_core.nn.transformer import Transformer
from olmo_core.optim import OptimConfig
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh

from open_instruct.checkpoints.safe_checkpointer import SafeCheckpointer
from open_instruct.config.training import LearnerConfig
from open_instruct.models.heads.value_head import ValueHead
from open_instruct.parallel.data_parallel import mesh_of
from open_instruct.parallel.process import gathered
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.backend import (
    GRAD_NORM,
    Metrics,
    ShardedModule,
    build_empty_model,
    has_part,
    require_same_setting,
)
from open_instruct.training.deepspeed.library import deepspeed
from open_instruct.training.deepspeed.settings import engine_settings
from open_instruct.training.deepspeed.shards import MOMENTS, Masters, without_weights
from open_instruct.training.model.kernels import choose_kernels
from open_instruct.training.optim.optimizers import (
    AdamLikeConfig,
    build_optimizer_config,
    build_scheduler,
)
from open_instruct.training.parallelize import Parallelism, parallelize
from open_instruct.training.reference import Reference

OF_ZERO = "zero"
"""The name of DeepSpeed's part of a checkpoint."""

Adam = Literal["FusedAdam", "CPUAdam", "AdamW"]


def set_up(run: Run, config: LearnerConfig) -> tuple[DeviceMesh, dict[str, Any]]:
    """Set DeepSpeed up on the process group of `start_process`.

    Returns the mesh and DeepSpeed's config.
    """
    parallel, process = config.parallel, run.process
    # DeepSpeed reads a launcher's variables, and remembers the groups of an earlier run in this
    # process.
    os.environ.setdefault("LOCAL_RANK", str(process.local_rank))
    deepspeed.comm.comm.cdb = None
    deepspeed.utils.groups._release_process_group_references()
    deepspeed.init_distributed(timeout=timedelta(seconds=parallel.dist_timeout_s))
    mesh = mesh_of(run.layout, process.device)
    assert mesh is not None
    # The config names no gradient accumulation, so DeepSpeed does not divide by it.
    return mesh, engine_settings(config, on_cuda=process.device.type == "cuda")


def uncompiled(config: LearnerConfig) -> LearnerConfig:
    """The config without --compile_model:

    DeepSpeed compiles no blocks, so a broken compiler needs no warning.
    """
    return replace(config, memory=replace(config.memory, compile_model=False))


def build_backend(
    pretrained: Pretrained, *, run: Run, config: LearnerConfig, num_steps: int
) -> ZeroBackend:
    """Build without weights, partition, then stream the checkpoint into the shards of the trained
    weights.
    """
    mesh, settings = set_up(run, config)
    optim, device, max_seq_length = config.optim, run.process.device, config.data.max_seq_length
    transformer = build_empty_model(pretrained, config, init_device="meta")
    if isinstance(transformer.lm_head, ValueHead):
        # DeepSpeed takes one dtype for all, and steps float32 ones.
        transformer.lm_head.keeps_float32 = False
    transformer.to(getattr(torch, config.model.param_dtype))  # adapters too
    adamw = build_optimizer_config(optim, device=device, names=pretrained.names.olmo_core_names)
    # DeepSpeed shards, and splits matrices, by itself.
    parallelism = Parallelism(
        mesh=mesh,
        context_parallel=run.layout.context_parallel_degree > 1,
        checkpointing=choose_kernels(transformer, run=run, config=uncompiled(config)),
    )
    parallelize(transformer, parallelism)
    module = ZeroBackend(
        mesh=mesh,
        settings=settings,
        model=transformer,
        optim=choose_adam(
            adamw,
            adam_for(device, adam_offload=config.parallel.adam_offload),
            warn=run.console.warn,
        ),
        scheduler=build_scheduler(optim, num_steps=num_steps),
        rank_microbatch_size=max_seq_length,
        max_sequence_length=max_seq_length,
        max_grad_norm=optim.max_grad_norm or math.inf,
        device=device,
    )
    module.fill(pretrained, run=run, config=config)
    run.console.say(f"optimizer: {type(module.optim).__name__}")
    dist.barrier()  # no rank is ready before all are
    return module


def adam_for(device: torch.device, *, adam_offload: bool) -> Adam:
    """DeepSpeed's Adam on CUDA, and PyTorch's on a CPU, where it needs no compiler."""
    if device.type != "cuda":
        return "AdamW"
    return "CPUAdam" if adam_offload else "FusedAdam"  # states in host memory, or on the device


def building_problem(adam: Adam) -> str | None:
    """Why the kernel of DeepSpeed's Adam cannot be compiled here.

    It takes a minute or two, once a machine.
    """
    try:
        getattr(deepspeed.ops.op_builder, f"{adam}Builder")().load()
    except Exception as error:  # a compiler, or the lack of one, may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


class FusedAdamConfig(AdamLikeConfig):
    """DeepSpeed's Adam on CUDA."""

    @classmethod
    def optimizer(cls) -> type[torch.optim.Optimizer]:
        return deepspeed.ops.adam.FusedAdam


class CPUAdamConfig(FusedAdamConfig):
    """DeepSpeed's Adam for states in host memory."""

    @classmethod
    def optimizer(cls) -> type[torch.optim.Optimizer]:
        return deepspeed.ops.adam.DeepSpeedCPUAdam


def choose_adam(
    adamw: OptimConfig[Any], adam: Adam, *, warn: Callable[[str], None]
) -> OptimConfig[Any]:
    """The config of `adam` if every rank can compile its kernel, otherwise PyTorch's `adamw`.

    Collective.
    """
    if adam == "AdamW":
        return adamw
    if problems := [why for why in gathered(building_problem(adam)) if why]:
        warn(f"DeepSpeed's {adam} cannot be compiled here ({problems[0]}); PyTorch's AdamW is used")
        return adamw
    kind = FusedAdamConfig if adam == "FusedAdam" else CPUAdamConfig
    return kind(**{each.name: getattr(adamw, each.name) for each in fields(kind)})


@contextmanager
def _embeddings_alone(model: Transformer) -> Iterator[None]:
    """Within, the head has no `weight` if it shares that matrix with the embeddings.

    Stage 3 reduces the gradient of a head, gathered as a whole, when the head's backward pass ends.
    At that time the embeddings have not yet added their part to a shared matrix, so DeepSpeed must
    see it as the embeddings' alone.
    """
    matrix, embeddings = model.lm_head.w_out, model.embeddings
    is_shared = matrix.weight is embeddings.weight
    if is_shared:
        del matrix.weight
    yield
    if is_shared:
        matrix.weight = embeddings.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldReference(Reference):
    """A reference that follows the policy keeps its weights beside the trained ones, and swaps
    places to compute.

    So there is no second model: a rank holds 4 bytes more for each weight that it steps. `model` is
    the policy's own, with the weights of the policy or, within `activated`, of the reference.
    """

    masters: Masters
    weights: Mapping[str, torch.Tensor]  # this rank's range of each parameter
    # Returns once no unfinished checkpoint reads the policy's weights.
    wait_for_copy: Callable[[], None]

    @torch.no_grad()
    def follow(self, policy: Transformer, *, step: int) -> None:
        del policy
        if self.update_freq is not None and step % self.update_freq == 0:
            for name, ours in self.weights.items():
                ours.lerp_(self.masters.own[name].weights, self.alpha)

    @contextmanager
    def activated(self) -> Iterator[None]:
        self.wait_for_copy()
        self._swap()
        yield
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, ours in self.weights.items():
            theirs = self.masters.own[name].weights
            kept = theirs.clone()
            theirs.copy_(ours)
            ours.copy_(kept)
        self.masters.changed()

    def state(self) -> dict[str, Any]:
        return dict(self.masters.parts(self.weights))


class ZeroBackend(ShardedModule):
    """A `Backend`: a model and an optimizer that DeepSpeed shares among ranks.

    Args:
        settings: DeepSpeed's configuration.
        olmo_core: arguments of `TransformerTrainModule`.
    """

    def __init__(
        self, *, settings: Mapping[str, Any], model: Transformer, **olmo_core: Any
    ) -> None:
        self._split_over = settings["tensor_parallel"]["autotp_size"]
        # Added to names in a checkpoint where ranks split matrices, since values have another order
        # there.
        self._over = f"_over_{self._split_over}" if self._split_over > 1 else ""
        if settings["zero_optimization"]["stage"] == 3 or self._split_over > 1:
            dtype = next(model.parameters()).dtype
            model.init_weights = MethodType(without_weights(settings, dtype=dtype), model)  # type: ignore[method-assign]
        # Ranks call the head a different number of times in a microbatch, so stage 3 gathers its
        # weights only once.
        deepspeed.utils.set_z3_leaf_modules(model, [type(model.lm_head)])
        super().__init__(model=model, **olmo_core)
        self._norm: float | None = None
        self._leaves_out = False
        assert self.optim is not None
        step = self.optim.step
        # DeepSpeed knows the gradient's norm only when it calls the optimizer, so the check has to
        # be there.
        self.optim.step = lambda: None if self._is_held() else step()  # type: ignore[assignment, method-assign]
        with _embeddings_alone(self.model):
            self.engine: Any = deepspeed.initialize(
                model=self.model,
                optimizer=self.optim,
                config=dict(settings),
                dist_init_required=False,
            )[0]
        if self._split_over > 1:
            # It would fail on one rank and leave the others waiting.
            self.engine.first_dataloader_check.remove()
        self.masters: Masters = Masters(self.engine, rank=dist.get_rank())

    @property
    def computing_model(self) -> Transformer:
        """The engine, which is called like its model; only the engine gathers the weights that
        stage 3 partitions.
        """
        return cast(Transformer, self.engine)

    def weights_changed(self) -> None:
        self.masters.changed()

    def microbatch(self, index: int, num_microbatches: int) -> AbstractContextManager[None]:
        """A microbatch needs no context of its own: gradients add up until the engine steps."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        # DeepSpeed averages over all ranks but those that split matrices: it does not know which
        # ranks split rows.
        num_averaged = dist.get_world_size() // self._split_over
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
        """Call the engine's step with the optimizer held, as DeepSpeed drops the gradients in its
        step only.
        """
        self._leaves_out = True
        self._take_step()
        self._leaves_out = False

    def zero_grads(self) -> None:
        """Nothing is left to do: DeepSpeed drops the gradients in its step."""

    def _take_step(self) -> None:
        self._norm = None
        self.engine.step()
        # DeepSpeed does not ask if it found by itself that the gradient is not finite.
        self._is_held()

    def _is_held(self) -> bool:
        """Whether the optimizer's step is held; asked within the engine's step, after gradients are
        reduced.
        """
        if self._norm is None:
            # Without ZeRO every rank has the whole gradient, and it is clipped here.
            is_shared, most = self.engine.zero_optimization(), cast(float, self.max_grad_norm)
            norm = None if is_shared else nn.utils.clip_grad_norm_(self.model.parameters(), most)
            self._norm = float(self.engine.optimizer._global_grad_norm if norm is None else norm)
        return self._leaves_out or not math.isfinite(self._norm)

    def moving_reference(
        self, pretrained: Pretrained, *, run: Run, config: LearnerConfig, **moves: Any
    ) -> Reference:
        del pretrained, run, config
        return HeldReference(
            model=self.computing_model,
            masters=self.masters,
            weights={name: master.weights.clone() for name, master in self.masters.own.items()},
            wait_for_copy=lambda: cast(SafeCheckpointer, self.trainer.checkpointer).wait_for_copy(),
            **moves,
        )

    def state_dict_to_save(self, *, optim: bool | None = None) -> dict[str, Any]:
        return self._own_state()

    def _own_state(self) -> dict[str, Any]:
        """The state as flat ranges, the same for every stage: a run may go on under another stage
        or on other ranks.
        """
        own = self.masters.own.items()
        state: dict[str, Any] = {
            f"weights{self._over}": self.masters.parts({name: each.weights for name, each in own})
        }
        for moment in MOMENTS:
            state[f"{moment}{self._over}"] = self.masters.parts(
                {name: each.moments[moment] for name, each in own}
            )
        return {OF_ZERO: {**state, "num_steps": self.masters.num_steps}}

    def state_dict_to_load(
        self, metadata: Metadata, *, optim: bool | None = None
    ) -> dict[str, Any]:
        names = metadata.state_dict_metadata
        require_same_setting("--backend", "deepspeed", has_part(names, OF_ZERO))
        require_same_setting(
            "--tensor_parallel_degree",
            self._split_over,
            has_part(names, f"{OF_ZERO}.weights{self._over}"),
        )
        return self._own_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict whose parts were filled in place."""
        self.masters.changed(num_steps=state_dict[OF_ZERO]["num_steps"])
