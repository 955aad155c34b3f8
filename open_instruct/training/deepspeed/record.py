"""The record of the DeepSpeed backend, readable without torch and without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any

from open_instruct.config.flags import flags_of
from open_instruct.config.fleet_sections import LearnerParallelSection
from open_instruct.config.sharding_sections import ParallelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.config.validation import changed
from open_instruct.core.errors import problems_of_kind
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.parallel.layout import check_divides, layout_of_degrees
from open_instruct.training.deepspeed.settings import refuse_unfit, zpg_of

if TYPE_CHECKING:
    from open_instruct.training.deepspeed.planned import DeepSpeed as Planned
    from open_instruct.training.deepspeed.zero import ZeroBackend

# Flags that only the other backend has, with a reason; and the first stage of ZeRO at which a flag
# has a use.
NOT_HAD = {
    **dict.fromkeys(
        ("fsdp_shard_degree", "fsdp_num_replicas", "expert_parallel_degree", "init_device"), ""
    ),
    **dict.fromkeys(("gradient_reduction", "fsdp_prefetch_factor", "compile_model"), ""),
    **dict.fromkeys(("activation_memory_budget", "float8_linears", "use_qlora"), ""),
    "optimizer": " (it steps AdamW alone here: its own Muon clips after matrices are made "
    "orthogonal, and its shards have no rows for the blocks of 8-bit AdamW)",
}
FIRST_STAGE = {"adam_offload": 1, "offload": 3, "tensor_parallel_degree": 1}


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
            values["deepspeed_zpg"] = neighbours_of(replace(parallel, **values))
        if config.memory.activation_checkpointing == "auto":
            values["activation_checkpointing"] = "full"
        return values

    @problems_of_kind("conflict")
    def problems(self, config: LearnerConfig) -> Iterator[str]:
        """The combinations of ZeRO's flags with each other, and with other flags, that cannot
        work.
        """
        stage, flags = config.parallel.deepspeed_stage, flags_of(type(config))
        for name, why in sorted(NOT_HAD.items()):
            for given in changed(config, name) if name in flags else ():
                yield (
                    f"{given} cannot go with --backend deepspeed{why}; leave it out, or use "
                    "--backend olmo_core"
                )
        if stage == 0 and config.model.param_dtype == "bfloat16":
            lost = "keeps no float32 weights beside the bfloat16 ones, and small updates are lost"
            yield (
                f"--deepspeed_stage 0 {lost}; use --deepspeed_stage 1, 2 or 3, or --param_dtype "
                "float32"
            )
        if config.parallel.tensor_parallel_degree > 1 and (zpg := zpg_of(config.parallel)) > 1:
            yield (
                f"--deepspeed_zpg {zpg}: neighbours that split matrices have no weights in "
                "common; leave one out"
            )
        if config.adapters is not None and config.parallel.tensor_parallel_degree > 1:
            given = (
                "--backend deepspeed --tensor_parallel_degree "
                f"{config.parallel.tensor_parallel_degree}"
            )
            yield f"{given} cannot go with --use_lora: use --backend olmo_core"
        for name, first in FIRST_STAGE.items():
            for given in changed(config, name) if stage < first else ():
                yield f"{given} has no use under --deepspeed_stage {stage}; use {first} or more"

    def warnings(self, config: LearnerConfig) -> Iterator[str]:
        if (zpg := config.parallel.deepspeed_zpg) != zpg_of(config.parallel):
            yield (
                f"--deepspeed_zpg {zpg}: read only with --deepspeed_stage 3; nothing is gathered "
                "below"
            )

    def layout(self, parallel: ParallelSection, gpus_per_node: Sequence[int]) -> ShardLayout:
        """All ranks share the weights, on all nodes."""
        degree, copies = (None, 1) if parallel.deepspeed_stage else (1, None)
        layout = layout_of_degrees(
            parallel, gpus_per_node, fsdp_shard_degree=degree, fsdp_num_replicas=copies
        )
        check_divides("--deepspeed_zpg", zpg_of(parallel), layout.gpus_per_node)
        # A single rank is a shard group of its own: ZeRO casts its weights to the compute dtype, as
        # for several ranks.
        return replace(layout, single_device=False, warnings=())

    def sharing(self, parallel: ParallelSection, layout: ShardLayout) -> str:
        nearby = zpg_of(parallel)
        copies = (
            f", second copies of the weights shared by {nearby} neighbours" if nearby > 1 else ""
        )
        return f"DeepSpeed ZeRO-{parallel.deepspeed_stage}{copies}"

    def planned(self, config: LearnerConfig) -> Planned:
        from open_instruct.training.deepspeed import planned

        return planned.DeepSpeed(config)

    def build(self, *pretrained: Any, **run: Any) -> ZeroBackend:
        from open_instruct.training.deepspeed.zero import build_backend

        return build_backend(*pretrained, **run)


def neighbours_of(parallel: ParallelSection) -> int:
    """The default of `deepspeed_zpg`: the number of ranks that share a second copy of the weights.

    It is 8, as upstream, or the most that a node has room for; and 1 on one node, where a second
    copy is no nearer.
    """
    nodes = parallel.num_learners_per_node if isinstance(parallel, LearnerParallelSection) else [1]
    has_second = (
        parallel.deepspeed_stage == 3 and parallel.tensor_parallel_degree == 1 and len(nodes) > 1
    )
    return max(n for n in range(1, 9) if gcd(*nodes) % n == 0) if has_second else 1


DEEPSPEED = DeepSpeed()
