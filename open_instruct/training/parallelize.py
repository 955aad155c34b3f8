"""How a model is split over devices and prepared to train: all of it, in the order it is applied.

Read `parallelize` from top to bottom. What it applies is decided before, from the flags and the
device, by `plan_frozen` (a reference, a teacher) or `plan_trained`. Both backends come by here;
DeepSpeed shards and splits matrices by itself, so its policy asks only for the rest.
"""

from dataclasses import dataclass, replace

from olmo_core.distributed.parallel import get_cp_mesh, get_dp_model_mesh, get_tp_mesh
from olmo_core.float8 import Float8Config
from olmo_core.train.train_module import TransformerActivationCheckpointingConfig
from olmo_core.train.train_module.transformer import TransformerDataParallelConfig
from torch.distributed.device_mesh import DeviceMesh

from open_instruct.config.training import LearnerConfig
from open_instruct.models.transformer import SegmentTransformer
from open_instruct.parallel.data_parallel import build_parallel_configs, find_mesh
from open_instruct.run.opening import Run
from open_instruct.training.model.float8 import build_float8_config
from open_instruct.training.model.kernels import choose_kernels, compiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """What `parallelize` does to a model, in its order; by default nothing."""

    mesh: DeviceMesh | None
    """The mesh of this process: replica, shard, context, tensor. None on a single device."""

    float8: Float8Config | None = None
    context_parallel: bool = False
    tensor_parallel: bool = False
    checkpointing: TransformerActivationCheckpointingConfig | None = None
    compiles: bool = False
    sharding: TransformerDataParallelConfig | None = None
    """FSDP2's; None on a single device, and where another library shards."""

    splits_experts: bool = False
    on_host: bool = False
    """Whether shards are in host memory; the optimizer steps there."""


def parallelize(model: SegmentTransformer, how: Parallelism) -> SegmentTransformer:
    """Split and prepare `model`, in place; call its `init_weights` next. Collective.

    The order is OLMo-core's (`parallelize_model`): layers are exchanged before they are split,
    blocks are wrapped before they are compiled, and compiled before they are sharded.
    """
    if how.float8 is not None:
        model.apply_fp8(how.float8)
    if how.context_parallel:
        assert how.mesh is not None
        model.apply_cp(get_cp_mesh(how.mesh))
    if how.tensor_parallel:
        assert how.mesh is not None
        model.apply_tp(get_tp_mesh(how.mesh))
    if how.checkpointing is not None:
        model.apply_activation_checkpointing(
            how.checkpointing.mode,
            block_interval=how.checkpointing.block_interval,
            modules=how.checkpointing.modules,
            activation_memory_budget=how.checkpointing.activation_memory_budget,
            determinism_check=how.checkpointing.determinism_check,
        )
    if how.compiles:
        model.apply_compile()
    if how.sharding is not None:
        assert how.mesh is not None and how.sharding.param_dtype is not None
        model.apply_fsdp(
            get_dp_model_mesh(how.mesh),
            how.sharding.param_dtype.as_pt(),
            how.sharding.reduce_dtype.as_pt(),
            how.sharding.prefetch_factor,
            splits_experts=how.splits_experts,
            on_host=how.on_host,
        )
    return model


def plan_frozen(run: Run, config: LearnerConfig) -> Parallelism:
    """How a model without gradients is parallelized: split and compiled as the policy is.

    :raises InputError: compilation was requested, and the compiler does not work.
    """
    layout = run.layout
    device = run.process.device
    configs = build_parallel_configs(
        layout,
        param_dtype=config.model.param_dtype,
        prefetch_factor=config.parallel.fsdp_prefetch_factor,
    )
    return Parallelism(
        mesh=find_mesh(layout, device),
        context_parallel=layout.context_parallel_degree > 1,
        tensor_parallel=layout.tensor_parallel_degree > 1,
        compiles=compiles(config.memory, layout=layout, device=device),
        sharding=configs["dp"],
        splits_experts=layout.expert_parallel_degree > 1,
        on_host=config.parallel.offload,
    )


def plan_trained(model: SegmentTransformer, *, run: Run, config: LearnerConfig) -> Parallelism:
    """How a policy or a critic is parallelized; the console warns of settings without an effect.

    :raises InputError: a flag cannot be had for this model, or on this device.
    """
    checkpointing = choose_kernels(
        model,
        run=run,
        memory=config.memory,
        param_dtype=config.model.param_dtype,
        shares_prompts=config.shares_prompts,
    )
    recipe = config.model.float8_linears
    float8 = build_float8_config(recipe, model=model, device=run.process.device)
    return replace(plan_frozen(run, config), float8=float8, checkpointing=checkpointing)
