"""The options and environment variables of a vLLM engine, without importing vLLM.

So a process without a GPU can say what an engine with one would get.
"""

from typing import Any

from open_instruct.config.lora import RANKS_OF_ENGINES, LoRASection
from open_instruct.core.errors import InputError
from open_instruct.generation.nf4_loader import load_options
from open_instruct.generation.requests import EngineSettings
from open_instruct.parallel.listening import LOOPBACK

# Only whole blocks of a prompt are computed once for a group. vLLM's 128 on a CPU are more than
# most prompts have; 32 is the least that its attention there takes.
CPU_BLOCK_TOKENS = 32


def engine_environment(on_cuda: bool, runner: str = "auto") -> dict[str, str]:
    """Variables that must be set in an engine's process before vLLM is imported there.

    Raises:
        InputError: there is no such `runner` (--vllm_runner) on a CPU.
    """
    if runner == "v2" and not on_cuda:
        raise InputError(
            "--vllm_runner v2: vLLM has it on CUDA alone; use auto, or v1", kind="machine"
        )
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the loop that steps is ours
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HOST_IP": LOOPBACK,  # an engine is on one node
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not on_cuda:
        environment |= {
            "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than it gains, and wants g++
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine takes the same cores
        }
    if runner != "auto":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))
    return environment


def engine_options(settings: EngineSettings, *, on_cuda: bool) -> dict[str, Any]:
    """Options of vLLM's `EngineArgs` for an engine on a GPU, or on a CPU.

    vLLM chooses those that are None or left out, for the device.
    """
    fleet = settings.fleet
    kv_cache_mib = fleet.kv_cache_mib(on_cuda=on_cuda)
    options: dict[str, Any] = {
        "model": settings.model_folder,
        "tokenizer": settings.tokenizer_folder,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.batching.max_num_seqs,
        "max_num_batched_tokens": settings.batching.max_num_batched_tokens,
        "async_scheduling": settings.batching.schedules_ahead,
        "tensor_parallel_size": fleet.vllm_tensor_parallel_size,
        # Never Ray's actors.
        "distributed_executor_backend": "mp" if fleet.vllm_tensor_parallel_size > 1 else "uni",
        "gpu_memory_utilization": fleet.vllm_gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_cache_mib and kv_cache_mib << 20,
        "block_size": None if on_cuda else CPU_BLOCK_TOKENS,
        "enable_prefix_caching": fleet.vllm_enable_prefix_caching,
        # Of a prompt in two parts the first has a token drawn too, and a CPU's generator does not
        # return to its state before.
        "enable_chunked_prefill": None if on_cuda else False,
        "enable_return_routed_experts": fleet.routing_replay == "on" and on_cuda,
        # So that it can give up weights and cache, which its CPU build cannot.
        "enable_sleep_mode": fleet.placement == "shared" and on_cuda,
        "enforce_eager": fleet.vllm_enforce_eager or not on_cuda,
        # Log-probs are of the distribution that was sampled from, after the temperature.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        **load_options(settings),
    }
    if settings.adapter is not None:
        options |= adapter_options(settings.adapter)
    return options


def adapter_options(adapter: LoRASection) -> dict[str, Any]:
    """Options of vLLM's `EngineArgs` for an adapter that is replaced in place."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in RANKS_OF_ENGINES if rank >= adapter.lora_r),
        "lora_target_modules": list(adapter.targets),  # others stay as fast as they are
    }
