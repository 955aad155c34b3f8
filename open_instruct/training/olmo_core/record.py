"""The record of the FSDP2 backend, readable without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from open_instruct.config.sharding_sections import ParallelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.config.validation import find_changed
from open_instruct.core.errors import problems_of_kind
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.parallel.layout import build_layout

if TYPE_CHECKING:
    from open_instruct.planning.setting import BackendPlanner
    from open_instruct.training.olmo_core.fsdp2 import FSDP2Backend

FLAGS_OF_OTHERS = ("deepspeed_stage", "deepspeed_zpg", "deepcompile")


class OlmoCore:
    """A `BackendRecord`: OLMo-core's train module, sharded by FSDP2 as HSDP.

    It has tensor, context and expert parallelism too.
    """

    def default_values(self, config: LearnerConfig) -> dict[str, Any]:
        """No default depends on this backend."""
        return {}

    @problems_of_kind("conflict")
    def problems(self, config: LearnerConfig) -> Iterator[str]:
        if config.parallel.adam_offload and config.optim.optimizer not in ("adamw", "adamw_8bit"):
            yield (
                f"--adam_offload cannot go with --optimizer {config.optim.optimizer}: use adamw "
                "or adamw_8bit"
            )
        if config.parallel.offload and config.parallel.single_gpu_mode:
            yield (
                "--offload is FSDP2's, and --single_gpu_mode does without FSDP2: leave that out, "
                "on one GPU too"
            )
        if config.parallel.offload and config.optim.optimizer == "muon":
            yield (
                "--offload has the host's CPU step, which is too slow for --optimizer muon: use "
                "adamw"
            )

    def warnings(self, config: LearnerConfig) -> Iterator[str]:
        unread = find_changed(config, *FLAGS_OF_OTHERS)
        if unread:
            yield (
                f"{', '.join(unread)}: read only with --backend deepspeed; FSDP2 shards all that "
                "is trained"
            )
        if config.parallel.offload and config.parallel.adam_offload:
            yield "--adam_offload: --offload has the optimizer's states in host memory anyway"

    def refuse_unfit(self) -> None:
        """OLMo-core is always there."""

    def layout(self, parallel: ParallelSection, gpus_per_node: Sequence[int]) -> ShardLayout:
        return build_layout(parallel, gpus_per_node)

    def sharing(self, parallel: ParallelSection, layout: ShardLayout) -> str:
        sharing = "one copy of the model"
        if layout.num_replicas > 1:
            sharing = f"{layout.num_replicas} copies of the model"
        if layout.shard_degree > 1:
            each = "each " if layout.num_replicas > 1 else ""
            sharing += f", {each}split over {layout.shard_degree}"
        if layout.expert_parallel_degree > 1:
            sharing += ", experts too"
        return sharing

    def make_planner(self, parallel: ParallelSection) -> BackendPlanner:
        from open_instruct.planning.setting import BackendPlanner

        return BackendPlanner()

    def build(self, *pretrained: Any, **run: Any) -> FSDP2Backend:
        from open_instruct.training.olmo_core.fsdp2 import build_backend

        return build_backend(*pretrained, **run)


OLMO_CORE = OlmoCore()
