"""Flags become DeepSpeed's own configuration, or are refused; neither torch nor DeepSpeed is imported."""

from collections.abc import Iterator
from math import gcd
from typing import Any

from open_instruct.config.flags import flags_of
from open_instruct.config.rollout_sections import LearnerParallelSection
from open_instruct.config.sections import ModelSection, OptimizerSection, ParallelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.config.validation import changed

# Flags that only the other backend has, with a reason; and the first stage of ZeRO at which a flag has a use.
NOT_HAD = {
    **dict.fromkeys(("fsdp_shard_degree", "fsdp_num_replicas", "expert_parallel_degree", "init_device"), ""),
    **dict.fromkeys(("gradient_reduction", "fsdp_prefetch_factor", "compile_model"), ""),
    **dict.fromkeys(("activation_memory_budget", "float8_linears", "use_qlora"), ""),
    "optimizer": " (it steps AdamW; its own Muon takes the gradient's norm, and clips, when matrices are orthogonal)",
}
FIRST_STAGE = {"adam_offload": 1, "offload": 3, "tensor_parallel_degree": 1}


def settle(config: LearnerConfig) -> None:
    """Set the defaults of ZeRO's flags. Other backends leave them None, so a flag that was given can be refused."""
    parallel = config.parallel
    if parallel.deepspeed_stage is None:
        parallel.deepspeed_stage = 2
    if parallel.deepspeed_zpg is None:
        parallel.deepspeed_zpg = neighbours_of(parallel)
    if config.memory.activation_checkpointing == "auto":
        config.memory.activation_checkpointing = "full"


def neighbours_of(parallel: ParallelSection) -> int:
    """The default of `deepspeed_zpg`: the number of ranks that share a second copy of the weights.

    It is 8, as upstream, or the most that a node has room for; and 1 on one node, where a second copy is no nearer.
    """
    nodes = parallel.num_learners_per_node if isinstance(parallel, LearnerParallelSection) else [1]
    has_second = parallel.deepspeed_stage == 3 and parallel.tensor_parallel_degree == 1 and len(nodes) > 1
    return max(n for n in range(1, 9) if gcd(*nodes) % n == 0) if has_second else 1


def zpg_of(parallel: ParallelSection) -> int:
    """`deepspeed_zpg` at stage 3, and 1 below it, where no weights are gathered."""
    return parallel.deepspeed_zpg if parallel.deepspeed_stage == 3 else 1


def problems(config: LearnerConfig) -> Iterator[str]:
    """The combinations of ZeRO's flags with each other, and with other flags, that cannot work."""
    stage, flags = config.parallel.deepspeed_stage, flags_of(type(config))
    for name, why in sorted(NOT_HAD.items()):
        for given in changed(config, name) if name in flags else ():
            yield f"{given} cannot go with --backend deepspeed{why}; leave it out, or use --backend olmo_core"
    if stage == 0 and config.model.param_dtype == "bfloat16":
        lost = "keeps no float32 weights beside the bfloat16 ones, and small updates are lost"
        yield f"--deepspeed_stage 0 {lost}; use --deepspeed_stage 1, 2 or 3, or --param_dtype float32"
    if config.parallel.tensor_parallel_degree > 1 and (zpg := zpg_of(config.parallel)) > 1:
        yield f"--deepspeed_zpg {zpg}: neighbours that split matrices have no weights in common; leave one of them out"
    if config.adapters is not None and config.parallel.tensor_parallel_degree > 1:
        given = f"--backend deepspeed --tensor_parallel_degree {config.parallel.tensor_parallel_degree}"
        yield f"{given} cannot go with --use_lora: use --backend olmo_core"
    for name, first in FIRST_STAGE.items():
        for given in changed(config, name) if stage < first else ():
            yield f"{given} has no use under --deepspeed_stage {stage}; use {first} or more"


def engine_settings(
    parallel: ParallelSection, *, model: ModelSection, optim: OptimizerSection, on_cuda: bool
) -> dict[str, Any]:
    """The `config` of `deepspeed.initialize`.

    It says nothing of batches: losses are divided by global counts already, and `step()` is called once for all
    microbatches of an update.
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "steps_per_print": 10**9,  # never
        # Without ZeRO DeepSpeed keeps the norm to itself, so there the learner clips.
        "gradient_clipping": optim.max_grad_norm if parallel.deepspeed_stage else 0.0,
        # PyTorch's AdamW may take the place of DeepSpeed's CPU Adam where that cannot be compiled.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": parallel.deepspeed_stage, "zero_hpz_partition_size": zpg_of(parallel)},
        "tensor_parallel": {"autotp_size": parallel.tensor_parallel_degree},
    }
    on_host = {"offload_optimizer": parallel.adam_offload, "offload_param": parallel.offload}
    for what in (name for name, is_asked in on_host.items() if is_asked):
        settings["zero_optimization"][what] = {"device": "cpu", "pin_memory": on_cuda}
    if model.param_dtype == "bfloat16":
        # Gradients of microbatches and of ranks are summed in the same dtypes as on the other backend.
        added = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
        settings |= {"bf16": {"enabled": True}} | added
    return settings
