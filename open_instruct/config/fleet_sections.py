"""Flags of GRPO's processes: its learners, its engines, and how weights reach these."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from open_instruct.config.sections import Switch, flag, resumable_flag
from open_instruct.config.sharding_sections import ParallelSection

THROUGH_FOLDER = "weight_sync_backend files"
CPU_KV_CACHE_MIB = 256  # of an engine on a CPU, where vLLM would take gigabytes


@dataclass(kw_only=True)
class LearnerParallelSection(ParallelSection):
    """Sharding of GRPO's learners, which Ray starts."""

    more_ranks: ClassVar[str] = "--num_learners_per_node {0} starts them"

    num_learners_per_node: list[int] = resumable_flag(
        "learner processes on each node, such as '8 8' or '2 4'", [1]
    )


@dataclass(kw_only=True)
class FleetSection:
    """The engines, and how weights reach them."""

    title: ClassVar[str] = "Fleet"

    placement: Literal["split", "shared", "mixed", "auto"] = resumable_flag(
        "'split': learners and engines have GPUs of their own; 'shared': each learner's GPU has an "
        "engine too, and they take turns; 'mixed': so, and further engines have GPUs of their own; "
        "'auto': the fastest that fits, by the plan, on --num_learners_per_node GPUs in all",
        "split",
    )
    vllm_num_engines: int = resumable_flag("vLLM engines", 1, minimum=1)
    vllm_tensor_parallel_size: int = resumable_flag("GPUs of one engine", 1, minimum=1)
    vllm_gpu_memory_utilization: float = resumable_flag(
        "an engine's share of a GPU's memory", 0.9, above=0, maximum=1
    )
    vllm_kv_cache_mib: int | None = resumable_flag(
        "MiB of an engine's key-value cache; default: 256 on a CPU, the rest on CUDA",
        None,
        minimum=1,
    )
    vllm_max_num_seqs: int | None = resumable_flag(
        "completions in an engine at once; default: 256 on CUDA, 64 on a CPU", None, minimum=1
    )
    vllm_max_num_batched_tokens: int | None = resumable_flag(
        "tokens in a step of an engine; default: vLLM's on CUDA, 4096 or a sample's on a CPU",
        None,
        minimum=1,
    )
    vllm_async_scheduling: Switch = resumable_flag(
        "schedule the next step during this one; 'auto': on CUDA", "auto"
    )
    vllm_runner: Literal["auto", "v1", "v2"] = resumable_flag(
        "vLLM's model runner; 'auto': v2 on CUDA, v1 on a CPU", "auto"
    )
    vllm_enable_prefix_caching: bool = resumable_flag(
        "compute a prompt's keys and values once for its group", True
    )
    routing_replay: Literal["on", "off"] = flag(
        "route the learner's tokens to the experts that engines chose", "off"
    )
    vllm_enforce_eager: bool = resumable_flag("run the engine without CUDA graphs", False)
    vllm_dtype: Literal["bfloat16", "float32", "policy"] = flag(
        "dtype of the engines' weights; 'policy': --param_dtype", "policy"
    )
    ray_address: str | None = resumable_flag(
        "'auto' or the address of a Ray cluster; default: start a local one", None
    )
    ray_dashboard_host: str | None = resumable_flag(
        "address that Ray's dashboard binds to; default: no dashboard", None
    )
    cluster_timeout_s: int = resumable_flag(
        "seconds to wait for the nodes and GPUs that were asked for", 600, minimum=1
    )
    engine_timeout_s: int = resumable_flag(
        "seconds to wait for an engine's start or health check", 600, minimum=1
    )
    step_timeout_s: int = resumable_flag(
        "seconds to wait for the learners to finish one step", 3600, minimum=1
    )
    max_restarts: int = resumable_flag(
        "times that dead learners or engines are started again", 3, minimum=0
    )
    weight_sync_backend: Literal["auto", "nccl", "gloo", "shm", "ipc", "files"] = resumable_flag(
        (
            "'auto': ipc on one shared device, nccl on CUDA, shm on one host, gloo across hosts; "
            "files: a folder"
        ),
        "auto",
    )
    weight_sync_folder: str | None = resumable_flag(
        "seen by all hosts, with room for 3 times the weights; default: in --output_dir",
        None,
        requires=THROUGH_FOLDER,
        is_path=True,
    )
    weight_sync_anchor_every: int = resumable_flag(
        "versions from one that is written whole to the next",
        16,
        requires=THROUGH_FOLDER,
        minimum=1,
    )
    weight_sync: Literal["auto", "dense", "delta"] = resumable_flag(
        (
            "send all weights, or of each version what has changed; 'auto': delta of 16-bit "
            "weights across hosts"
        ),
        "auto",
    )
    weight_sync_check: int = resumable_flag(
        "of how many delta versions one is compared with the learners' to the bit, by digests; 0 "
        "for none",
        1,
        requires="weight_sync auto delta",
        minimum=0,
    )
    weight_sync_bucket_mib: int = resumable_flag(
        "MiB of weights that travel at once", 256, minimum=1
    )
    weight_sync_timeout_s: int = resumable_flag(
        "seconds to wait for an engine during a weight sync", 300, minimum=1
    )
    lora_sync: Literal["merged", "adapter"] = resumable_flag(
        "send engines the whole model, or the adapter alone", "merged", requires="use_lora"
    )

    @property
    def takes_turns(self) -> bool:
        """Whether learners' GPUs have engines too, and one or the other at a time."""
        return self.placement in ("shared", "mixed")

    def count_turning_engines(self, num_learners: int) -> int:
        """How many engines, the first ones, are on learners' GPUs and take turns with these."""
        return num_learners // self.vllm_tensor_parallel_size if self.takes_turns else 0

    @property
    def num_gpus(self) -> int:
        """GPUs of all engines together."""
        return self.vllm_num_engines * self.vllm_tensor_parallel_size

    def kv_cache_mib(self, *, on_cuda: bool) -> int | None:
        """MiB of an engine's keys and values.

        None: on CUDA, what --vllm_gpu_memory_utilization leaves.
        """
        return self.vllm_kv_cache_mib or (None if on_cuda else CPU_KV_CACHE_MIB)
