"""Flags of how a model is spread over GPUs, and of what fits into their memory."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from open_instruct.config.sections import flag, resumable_flag

# What --activation_checkpointing selected_modules recomputes by default.
NORMS_AND_SUBLAYERS = [
    *("blocks.*.attention_norm", "blocks.*.attention", "blocks.*.attention_residual_stream"),
    *(
        "blocks.*.feed_forward_norm",
        "blocks.*.feed_forward",
        "blocks.*.feed_forward_residual_stream",
    ),
]


@dataclass(kw_only=True)
class DegreesSection:
    """How many GPUs share a copy of the model, and how."""

    title: ClassVar[str] = "Sharding"

    fsdp_shard_degree: int | None = resumable_flag(
        "GPUs that share a copy of the model; default: a node's", None, minimum=1
    )
    fsdp_num_replicas: int | None = resumable_flag(
        "copies of the model; default: the number of nodes", None, minimum=1
    )
    tensor_parallel_degree: int = resumable_flag("GPUs that split every matrix", 1, minimum=1)
    context_parallel_degree: int = resumable_flag(
        "GPUs that split every packed row (also: --sequence_parallel_size)", 1, minimum=1
    )
    expert_parallel_degree: int = resumable_flag(
        (
            "GPUs that split the experts of each layer, to which tokens are sent: 1, or the "
            "shard degree"
        ),
        1,
        minimum=1,
    )

    @property
    def splitting(self) -> dict[str, int]:
        """The degrees that are above 1, by flag."""
        degrees = {each.name: getattr(self, each.name) or 1 for each in fields(DegreesSection)}
        return {name: degree for name, degree in degrees.items() if degree > 1}


@dataclass(kw_only=True)
class ParallelSection(DegreesSection):
    """How the weights are sharded, and by which backend."""

    more_ranks: ClassVar[str] = ""  # how to start {0} ranks, for messages

    single_gpu_mode: bool = flag(
        (
            "one device, no sharding: float32 master weights, and a copy in --param_dtype to "
            "compute with"
        ),
        False,
    )
    gradient_reduction: Literal["every", "last"] = resumable_flag(
        (
            "reduce gradients over a shard group after 'every' microbatch, or whole float32 ones "
            "after the 'last'"
        ),
        "every",
    )
    fsdp_prefetch_factor: int = resumable_flag(
        "blocks that the forward pass gathers ahead of the one at work", 0, minimum=0
    )
    dist_timeout_s: int = resumable_flag(
        "seconds a rank waits for the others before it gives up", 1800, minimum=1
    )
    backend: str = flag(
        "how weights are sharded: olmo_core (FSDP2), or deepspeed (ZeRO over all ranks)",
        "olmo_core",
    )
    deepspeed_stage: int = resumable_flag(
        "ZeRO shards: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too; default: 2",
        None,
        minimum=0,
        maximum=3,
    )
    deepspeed_zpg: int = resumable_flag(
        "stage 3: ranks that share a second copy of the weights; default: 1, or a node's in GRPO "
        "on several nodes",
        None,
        minimum=1,
    )
    deepcompile: bool = resumable_flag(
        "DeepSpeed compiles forward and backward passes with the exchanges of stages 1 to 3 in "
        "them, on CUDA alone; passes without gradients run uncompiled",
        False,
    )
    adam_offload: bool = resumable_flag(
        (
            "the host holds the optimizer's states; on DeepSpeed, from stage 1, its CPU takes "
            "the step too"
        ),
        False,
    )
    offload: bool = resumable_flag(
        (
            "the host holds shards of weights and gradients too, and its CPU takes the step; on "
            "DeepSpeed, stage 3"
        ),
        False,
    )


@dataclass(kw_only=True)
class RanksSection(ParallelSection):
    """Sharding of an offline run, which starts its own ranks."""

    more_ranks: ClassVar[str] = (
        "--num_processes {0} starts them, and so does torchrun --nproc_per_node {0}"
    )

    num_processes: str | None = resumable_flag(
        "processes to start on this machine, one for each GPU; 'auto': as many as GPUs; default: "
        "one, or torchrun's",
        None,
    )


@dataclass(kw_only=True)
class MemorySection:
    """What is recomputed or compiled to fit and to be fast."""

    title: ClassVar[str] = "Memory and compilation"

    activation_checkpointing: Literal["auto", "none", "full", "selected_modules", "offload"] = (
        resumable_flag(
            "recompute 'full' blocks or chosen modules; 'offload': blocks, whose inputs wait in "
            "host memory; 'auto': on GPUs the least with which the plan fits, with room, of the "
            "same batch in smaller microbatches too; with --backend deepspeed 'full'; else 'none'",
            "auto",
        )
    )
    activation_checkpointing_modules: list[str] = resumable_flag(
        "names of the modules; a * stands for anything but a dot",
        NORMS_AND_SUBLAYERS,
        requires="activation_checkpointing selected_modules",
    )
    activation_memory_budget: float = resumable_flag(
        "below 1.0: the share of activations to keep, chosen by the compiler",
        1.0,
        above=0,
        maximum=1,
    )
    compile_model: bool | None = resumable_flag(
        "torch.compile each block; default: on CUDA, where a compiler works and no row, matrix or "
        "expert is split. On a CPU it takes a minute or two at the start, and steps are some 1.1 "
        "times as fast",
        None,
    )
    plan_check: bool = resumable_flag(
        (
            "refuse to start where weights, gradients and optimizer states alone are more than a "
            "device's memory"
        ),
        True,
    )
