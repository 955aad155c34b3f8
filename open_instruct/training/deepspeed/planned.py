"""The DeepSpeed backend's answers to the planner, without torch and without DeepSpeed.

`planned_memory.py` has the bytes of a rank, `planned_traffic.py` what it sends; here are the
settings that a plan compares and proposes.
"""

from collections.abc import Iterator
from typing import Any, cast

from open_instruct.config.sharding_sections import ParallelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.parallel.layout import divisors
from open_instruct.planning.exchanges import Exchange
from open_instruct.planning.memory.memory_model import MemoryModel
from open_instruct.planning.setting import Backend, FlagChange, Setting
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.workload import Workload
from open_instruct.training.deepspeed.planned_memory import ZeroMemoryModel
from open_instruct.training.deepspeed.planned_traffic import exchanges_of
from open_instruct.training.deepspeed.settings import zpg_of


class DeepSpeed(Backend):
    """A run on ZeRO as the planner sees it."""

    def __init__(self, config: LearnerConfig) -> None:
        self.parallel = config.parallel
        self.sharing = describe_sharing(config.parallel)

    def memory_model(
        self, shape: ModelShape, layout: ShardLayout, workload: Workload
    ) -> ZeroMemoryModel:
        return ZeroMemoryModel(self.parallel, shape, layout, workload)

    def exchanges(self, run: MemoryModel) -> Iterator[Exchange]:
        return exchanges_of(cast(ZeroMemoryModel, run))

    def cells(self, layout: ShardLayout) -> dict[str, object]:
        on_host = "-"
        if self.parallel.adam_offload:
            on_host = "adam"
        if self.parallel.offload:
            on_host = "all"
        return {
            "stage": self.parallel.deepspeed_stage,
            "zpg": zpg_of(self.parallel),
            "host": on_host,
        }

    def others(self, setting: Setting) -> Iterator[dict[str, Any]]:
        """Settings of every stage, with and without second copies within a node; other flags stay
        where they can.
        """
        flags, sizes = self.parallel, set(setting.layout.gpus_per_node)
        in_nodes = sizes if len(setting.layout.nodes) > 1 and len(sizes) == 1 else set()
        for stage in range(4):
            for zpg in sorted({1, flags.deepspeed_zpg} | in_nodes if stage == 3 else {1}):
                offload = {
                    "adam_offload": flags.adam_offload and stage > 0,
                    "offload": flags.offload and stage == 3,
                }
                yield {"deepspeed_stage": stage, "deepspeed_zpg": zpg} | offload

    def ways_to_need_less(self, setting: Setting) -> Iterator[FlagChange]:
        """Later stages (kind 0), the optimizer in host memory (4), the weights too (5), then a
        tensor degree (6).
        """
        now = self.parallel
        on_host = {"adam_offload": True}
        remedies: list[tuple[int, int, dict[str, Any]]] = []
        if setting.layout.world_size > 1:
            remedies += [(0, stage, {}) for stage in range(now.deepspeed_stage + 1, 4)]
        if setting.on_cuda and not now.adam_offload:
            remedies += [(4, stage, on_host) for stage in range(max(1, now.deepspeed_stage), 4)]
        if setting.on_cuda and not now.offload:
            remedies += [(5, 3, on_host | {"offload": True})]
        degrees = divisors(setting.layout.world_size)
        remedies += [
            (6, 3, {"tensor_parallel_degree": n}) for n in degrees if n > now.tensor_parallel_degree
        ]
        for kind, stage, flags in remedies:
            yield FlagChange(kind=kind, strength=stage, values={"deepspeed_stage": stage} | flags)


def describe_sharing(flags: ParallelSection) -> str:
    on_host = {"optimizer": flags.adam_offload, "weights": flags.offload}
    kept = " and ".join(name for name, is_there in on_host.items() if is_there) or "nothing"
    stage, degree = flags.deepspeed_stage, flags.tensor_parallel_degree
    shared = ("nothing", "optimizer states", "optimizer states and gradients", "everything")[stage]
    nearby = ""
    neighbours = zpg_of(flags)
    if neighbours > 1:
        nearby = f", and {neighbours} neighbours a second copy of the weights"
    who = "all ranks"
    if degree > 1:
        who = f"{degree} neighbours split matrices, and all with the same part"
    return f"DeepSpeed ZeRO-{stage}: {who} share {shared}{nearby}; in host memory: {kept}"
