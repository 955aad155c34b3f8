"""The record of the FSDP2 backend, readable without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from open_instruct.config.sections import ParallelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.config.validation import changed
from open_instruct.parallel.layout import layout_of_degrees
from open_instruct.shard_layout import ShardLayout

if TYPE_CHECKING:
    from open_instruct.learner.olmo_core.fsdp2 import FSDP2Backend
    from open_instruct.planning.plan import Backend as Planned

FLAGS_OF_OTHERS = ("deepspeed_stage", "adam_offload", "deepspeed_zpg", "offload")
INSTEAD_OF_OFFLOAD = (
    "where that is too much for a device, more GPUs share it (--fsdp_num_replicas 1), --activation_checkpointing full "
    "or offload and smaller microbatches keep less, --use_lora trains less, and --backend deepspeed --adam_offload has "
    "it in host memory"
)


class OlmoCore:
    """A `BackendRecord`: OLMo-core's train module, sharded by FSDP2 as HSDP, with tensor and context parallel."""

    def settle(self, config: LearnerConfig) -> None:
        """No default depends on this backend."""

    def problems(self, config: LearnerConfig) -> Iterator[str]:
        yield from ()

    def warnings(self, config: LearnerConfig) -> Iterator[str]:
        if idle := changed(config, *FLAGS_OF_OTHERS):
            helps = f"; {INSTEAD_OF_OFFLOAD}" if config.parallel.adam_offload or config.parallel.offload else ""
            yield f"{', '.join(idle)}: read only with --backend deepspeed; FSDP2 shards all that is trained{helps}"

    def refuse_unfit(self) -> None:
        """OLMo-core is always there."""

    def layout(self, parallel: ParallelSection, gpus_per_node: Sequence[int]) -> ShardLayout:
        return layout_of_degrees(
            parallel, gpus_per_node, shard_degree=parallel.fsdp_shard_degree, num_replicas=parallel.fsdp_num_replicas
        )

    def sharing(self, parallel: ParallelSection, layout: ShardLayout) -> str:
        splits_experts = ", which splits experts" if layout.expert_parallel_degree > 1 else ""
        return f"{layout.num_replicas} x {layout.shard_degree} (replicas x shard degree{splits_experts})"

    def planned(self, config: LearnerConfig) -> Planned:
        from open_instruct.planning.plan import Backend

        return Backend()

    def build(self, *pretrained: Any, **run: Any) -> FSDP2Backend:
        from open_instruct.learner.olmo_core.build import build_backend

        return build_backend(*pretrained, **run)


OLMO_CORE = OlmoCore()
