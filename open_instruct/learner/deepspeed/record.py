"""The record of the DeepSpeed backend, readable without torch and without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from open_instruct.config.sections import ParallelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.learner.deepspeed.settings import problems, settle, zpg_of
from open_instruct.learner.deepspeed.versions import refuse_unfit
from open_instruct.parallel.layout import check_divides, layout_of_degrees
from open_instruct.shard_layout import ShardLayout

if TYPE_CHECKING:
    from open_instruct.learner.deepspeed.planned import DeepSpeed as Planned
    from open_instruct.learner.deepspeed.zero import ZeroBackend


class DeepSpeed:
    """A `BackendRecord`: ZeRO 0 to 3 over all ranks."""

    settle = staticmethod(settle)
    problems = staticmethod(problems)
    refuse_unfit = staticmethod(refuse_unfit)

    def warnings(self, config: LearnerConfig) -> Iterator[str]:
        if (zpg := config.parallel.deepspeed_zpg) != zpg_of(config.parallel):
            yield f"--deepspeed_zpg {zpg}: read only with --deepspeed_stage 3; nothing is gathered below"

    def layout(self, parallel: ParallelSection, gpus_per_node: Sequence[int]) -> ShardLayout:
        """All ranks share the weights, on all nodes."""
        shard_degree, num_replicas = (None, 1) if parallel.deepspeed_stage else (1, None)
        if parallel.single_gpu_mode:
            num_replicas = shard_degree = None
        layout = layout_of_degrees(parallel, gpus_per_node, shard_degree=shard_degree, num_replicas=num_replicas)
        check_divides("--deepspeed_zpg", zpg_of(parallel), layout.gpus_per_node)
        # A single rank is a shard group of its own: ZeRO casts its weights to the compute dtype, as for several ranks.
        return replace(layout, single_device=False, warnings=())

    def sharing(self, parallel: ParallelSection, layout: ShardLayout) -> str:
        nearby = zpg_of(parallel)
        copies = f", second copies of the weights shared by {nearby} neighbours" if nearby > 1 else ""
        return f"DeepSpeed ZeRO-{parallel.deepspeed_stage}{copies}"

    def planned(self, config: LearnerConfig) -> Planned:
        from open_instruct.learner.deepspeed import planned

        return planned.DeepSpeed(config)

    def build(self, *pretrained: Any, **run: Any) -> ZeroBackend:
        from open_instruct.learner.deepspeed.build import build_backend

        return build_backend(*pretrained, **run)


DEEPSPEED = DeepSpeed()
