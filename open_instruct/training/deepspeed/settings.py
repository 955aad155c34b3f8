"""DeepSpeed's own configuration, made of the flags, and the versions of it that fit.

Neither torch nor DeepSpeed is imported.
"""

import importlib.metadata
from typing import Any

from packaging.specifiers import SpecifierSet

from open_instruct.config.sharding_sections import ParallelSection
from open_instruct.core.errors import InputError

FIT_VERSIONS = SpecifierSet(">=0.19.8,<0.20")


def refuse_unfit() -> None:
    """Refuse a missing DeepSpeed, and versions that the tests were not run with.

    :raises InputError: there is no fit DeepSpeed.
    """
    remedy = "make install puts it in, and so does pip install 'open-instruct[deepspeed]'"
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"--backend deepspeed: the package deepspeed is not installed; {remedy}",
            kind="missing_package",
        ) from None
    if version not in FIT_VERSIONS:
        raise InputError(
            f"--backend deepspeed: deepspeed {version} is installed, and {FIT_VERSIONS} is needed; "
            f"{remedy}",
            kind="missing_package",
        )


def effective_zpg(parallel: ParallelSection) -> int:
    """`deepspeed_zpg` at stage 3, and 1 below it, where no weights are gathered."""
    return parallel.deepspeed_zpg if parallel.deepspeed_stage == 3 else 1


def engine_settings(
    parallel: ParallelSection,
    *,
    param_dtype: str,
    max_grad_norm: float,
    on_cuda: bool,
) -> dict[str, Any]:
    """The `config` of `deepspeed.initialize`.

    It says nothing of batches: losses are divided by global counts already, and `step()` is called
    once for all microbatches of an update. DeepCompile has to know which of them is the last while
    it runs backward, so there gradient accumulation is "managed": the backend says so of each.
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": parallel.deepcompile,
        "steps_per_print": 10**9,  # never
        # Without ZeRO DeepSpeed keeps the norm to itself, so there the learner clips.
        "gradient_clipping": max_grad_norm if parallel.deepspeed_stage else 0.0,
        # PyTorch's AdamW may take the place of DeepSpeed's CPU Adam where that cannot be compiled.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": parallel.deepspeed_stage,
            "zero_hpz_partition_size": effective_zpg(parallel),
        },
        "tensor_parallel": {"autotp_size": parallel.tensor_parallel_degree},
        "compile": {"deepcompile": parallel.deepcompile},
    }
    host = {"device": "cpu", "pin_memory": on_cuda}
    if parallel.adam_offload:
        settings["zero_optimization"]["offload_optimizer"] = dict(host)
    if parallel.offload:
        settings["zero_optimization"]["offload_param"] = dict(host)
    if param_dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        # Gradients of microbatches and of ranks are summed in the same dtypes as on the other
        # backend.
        settings["communication_data_type"] = "fp32"
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
