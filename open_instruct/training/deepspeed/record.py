"""The record of the DeepSpeed backend, readable without torch and without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any

from open_instruct.config.fleet_sections import LearnerParallelSection
from open_instruct.config.sharding_sections import ParallelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.config.validation import find_changed
from open_instruct.core.errors import problems_of_kind
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.parallel.layout import build_layout, check_divides
from open_instruct.training.deepspeed.deepcompile_limits import (
    find_deepcompile_problems,
    find_deepcompile_warnings,
)
from open_instruct.training.deepspeed.settings import effective_zpg, refuse_unfit

if TYPE_CHECKING:
    from open_instruct.training.deepspeed.planned import DeepSpeedPlanner
    from open_instruct.training.deepspeed.zero import ZeroBackend

# Flags that only the other backend has.
FLAGS_OF_OTHERS = (
    "activation_memory_budget",
    "compile_model",
    "expert_parallel_degree",
    "float8_linears",
    "fsdp_num_replicas",
    "fsdp_prefetch_factor",
    "fsdp_shard_degree",
    "gradient_reduction",
    "init_device",
    "optimizer",
    "use_qlora",
)
WHY_ADAMW = (
    " (it steps AdamW alone here: its own Muon clips after matrices are made orthogonal, and its "
    "shards have no rows for the blocks of 8-bit AdamW)"
)
# The first stage of ZeRO at which a flag has a use.
FIRST_STAGE = {
    "adam_offload": 1,
    "offload": 3,
    "tensor_parallel_degree": 1,
}


class DeepSpeed:
    """A `BackendRecord`: ZeRO 0 to 3 over all ranks."""

    refuse_unfit = staticmethod(refuse_unfit)

    def default_values(self, config: LearnerConfig) -> dict[str, Any]:
        """The defaults of ZeRO's flags.

        Other backends leave them None, so a flag that was given can be refused.
        """
        parallel = config.parallel
        values: dict[str, Any] = {}
        if parallel.deepspeed_stage is None:
            values["deepspeed_stage"] = 2
        if parallel.deepspeed_zpg is None:
            values["deepspeed_zpg"] = default_zpg(replace(parallel, **values))
        if config.memory.activation_checkpointing == "auto":
            values["activation_checkpointing"] = "full"
        return values

    @problems_of_kind("conflict")
    def problems(self, config: LearnerConfig) -> Iterator[str]:
        """What cannot work of ZeRO's flags, with each other and with other flags."""
        parallel = config.parallel
        stage = parallel.deepspeed_stage
        degree = parallel.tensor_parallel_degree
        for flag in find_changed(config, *FLAGS_OF_OTHERS):
            why = WHY_ADAMW if flag.startswith("--optimizer") else ""
            yield (
                f"{flag} cannot go with --backend deepspeed{why}; leave it out, or use "
                "--backend olmo_core"
            )
        if stage == 0 and config.model.param_dtype == "bfloat16":
            yield (
                "--deepspeed_stage 0 keeps no float32 weights beside the bfloat16 ones, and small "
                "updates are lost; use --deepspeed_stage 1, 2 or 3, or --param_dtype float32"
            )
        zpg = effective_zpg(parallel)
        if degree > 1 and zpg > 1:
            yield (
                f"--deepspeed_zpg {zpg}: neighbours that split matrices have no weights in "
                "common; leave one out"
            )
        if degree > 1 and config.adapters is not None:
            yield (
                f"--backend deepspeed --tensor_parallel_degree {degree} cannot go with "
                "--use_lora: use --backend olmo_core"
            )
        for name, first in FIRST_STAGE.items():
            if stage < first:
                for flag in find_changed(config, name):
                    yield f"{flag} has no use under --deepspeed_stage {stage}; use {first} or more"
        yield from find_deepcompile_problems(config)

    def warnings(self, config: LearnerConfig) -> Iterator[str]:
        zpg = config.parallel.deepspeed_zpg
        if zpg != effective_zpg(config.parallel):
            yield (
                f"--deepspeed_zpg {zpg}: read only with --deepspeed_stage 3; nothing is gathered "
                "below"
            )
        yield from find_deepcompile_warnings(config)

    def layout(self, parallel: ParallelSection, gpus_per_node: Sequence[int]) -> ShardLayout:
        """All ranks share the weights, on all nodes."""
        degrees: dict[str, int | None]
        if parallel.deepspeed_stage:
            degrees = {"fsdp_shard_degree": None, "fsdp_num_replicas": 1}
        else:
            degrees = {"fsdp_shard_degree": 1, "fsdp_num_replicas": None}
        layout = build_layout(parallel, gpus_per_node, **degrees)
        check_divides("--deepspeed_zpg", effective_zpg(parallel), layout.gpus_per_node)
        # A single rank is a shard group of its own: ZeRO casts its weights to the compute dtype, as
        # for several ranks.
        return replace(layout, single_device=False, warnings=())

    def sharing(self, parallel: ParallelSection, layout: ShardLayout) -> str:
        sharing = f"DeepSpeed ZeRO-{parallel.deepspeed_stage}"
        neighbours = effective_zpg(parallel)
        if neighbours > 1:
            sharing += f", second copies of the weights shared by {neighbours} neighbours"
        return sharing

    def make_planner(self, parallel: ParallelSection) -> DeepSpeedPlanner:
        from open_instruct.training.deepspeed.planned import DeepSpeedPlanner

        return DeepSpeedPlanner(parallel)

    def build(self, *pretrained: Any, **run: Any) -> ZeroBackend:
        from open_instruct.training.deepspeed.zero import build_backend

        return build_backend(*pretrained, **run)


def default_zpg(parallel: ParallelSection) -> int:
    """The default of `deepspeed_zpg`: the number of ranks that share a second copy of the weights.

    It is 8, as upstream, or the most that a node has room for; and 1 on one node, where a second
    copy is no nearer.
    """
    if parallel.deepspeed_stage != 3 or parallel.tensor_parallel_degree != 1:
        return 1
    if not isinstance(parallel, LearnerParallelSection):
        return 1
    nodes = parallel.num_learners_per_node
    if len(nodes) < 2:
        return 1
    num_shared = gcd(*nodes)
    return max(n for n in range(1, 9) if num_shared % n == 0)


DEEPSPEED = DeepSpeed()
