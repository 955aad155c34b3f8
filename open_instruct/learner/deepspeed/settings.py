"""From flags to DeepSpeed's own configuration: no torch, no DeepSpeed, nothing but the words that it reads."""

from __future__ import annotations

from typing import Any

from open_instruct.config.sections import ModelSection, OptimizerSection, ParallelSection

NEVER = 10**9  # steps


def engine_settings(
    parallel: ParallelSection, *, model: ModelSection, optim: OptimizerSection, on_cuda: bool
) -> dict[str, Any]:
    """What `deepspeed.initialize` is given as its `config`.

    DeepSpeed is told nothing of batches: losses come divided by global counts already, and `step()` is called once for
    all microbatches of an update, however many they are.
    """
    in_bfloat16 = model.param_dtype == "bfloat16"
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "steps_per_print": NEVER,
        # Without ZeRO DeepSpeed keeps the norm to itself, so there the learner clips.
        "gradient_clipping": optim.max_grad_norm if parallel.deepspeed_stage else 0.0,
        # PyTorch's AdamW is as good, where DeepSpeed's own for states in host memory cannot be compiled.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _sharing(parallel, on_cuda=on_cuda),
        "tensor_parallel": {"autotp_size": parallel.tensor_parallel_degree},
    }
    if in_bfloat16:
        settings["bf16"] = {"enabled": True}
        # Gradients of microbatches and of ranks add up as on the other backend.
        settings["communication_data_type"] = "fp32"
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _sharing(parallel: ParallelSection, *, on_cuda: bool) -> dict[str, Any]:
    in_host_memory = {"device": "cpu", "pin_memory": on_cuda}
    sharing: dict[str, Any] = {"stage": parallel.deepspeed_stage}
    if parallel.deepspeed_zpg > 1:
        sharing["zero_hpz_partition_size"] = parallel.deepspeed_zpg
    if parallel.adam_offload:
        sharing["offload_optimizer"] = in_host_memory
    if parallel.offload:
        sharing["offload_param"] = in_host_memory
    return sharing
