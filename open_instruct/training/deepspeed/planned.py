"""The DeepSpeed backend's answers to the planner, without torch and without DeepSpeed.

`planned_memory.py` has the bytes of a rank and `planned_traffic.py` what it sends. Here are the
settings that a plan compares and proposes.
"""

from collections.abc import Iterator
from typing import Any, cast

from open_instruct.config.sharding_sections import ParallelSection
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.parallel.layout import divisors
from open_instruct.planning.exchanges import Exchange
from open_instruct.planning.memory.memory_model import MemoryModel
from open_instruct.planning.setting import BackendPlanner, FlagChange, Setting
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.workload import Workload
from open_instruct.training.deepspeed.planned_memory import ZeroMemoryModel
from open_instruct.training.deepspeed.planned_traffic import plan_exchanges
from open_instruct.training.deepspeed.settings import effective_zpg

SHARED_BY_STAGE = (
    "nothing",
    "optimizer states",
    "optimizer states and gradients",
    "everything",
)


class DeepSpeedPlanner(BackendPlanner):
    """A run on ZeRO as the planner sees it."""

    def __init__(self, parallel: ParallelSection) -> None:
        self.parallel = parallel
        self.sharing = describe_setting(parallel)

    def memory_model(
        self, shape: ModelShape, layout: ShardLayout, workload: Workload
    ) -> ZeroMemoryModel:
        return ZeroMemoryModel(self.parallel, shape, layout, workload)

    def exchanges(self, run: MemoryModel) -> Iterator[Exchange]:
        return plan_exchanges(cast(ZeroMemoryModel, run))

    def cells(self, layout: ShardLayout) -> dict[str, object]:
        on_host = "-"
        if self.parallel.adam_offload:
            on_host = "adam"
        if self.parallel.offload:
            on_host = "all"
        return {
            "stage": self.parallel.deepspeed_stage,
            "zpg": effective_zpg(self.parallel),
            "host": on_host,
        }

    def list_layouts(self, setting: Setting) -> Iterator[dict[str, Any]]:
        """Settings of every stage, with and without second copies of the weights within a node.

        Other flags stay where they can.
        """
        flags = self.parallel
        adam_offload = flags.adam_offload
        for stage in range(3):
            yield {
                "deepspeed_stage": stage,
                "deepspeed_zpg": 1,
                "adam_offload": adam_offload and stage > 0,
                "offload": False,
            }
        for zpg in sorted({1, flags.deepspeed_zpg} | find_node_sizes(setting.layout)):
            yield {
                "deepspeed_stage": 3,
                "deepspeed_zpg": zpg,
                "adam_offload": adam_offload,
                "offload": flags.offload,
            }

    def list_memory_changes(self, setting: Setting) -> Iterator[FlagChange]:
        """Later stages of ZeRO (kind 0), then host memory (4 and 5), then a tensor degree (6)."""
        now = self.parallel
        if setting.layout.world_size > 1:
            for stage in range(now.deepspeed_stage + 1, 4):
                yield change_stage(0, stage)
        if setting.on_cuda and not now.adam_offload:
            for stage in range(max(1, now.deepspeed_stage), 4):
                yield change_stage(4, stage, adam_offload=True)
        if setting.on_cuda and not now.offload:
            yield change_stage(5, 3, adam_offload=True, offload=True)
        for degree in divisors(setting.layout.world_size):
            if degree > now.tensor_parallel_degree:
                yield change_stage(6, 3, tensor_parallel_degree=degree)


def change_stage(kind: int, stage: int, **others: Any) -> FlagChange:
    """The proposal to give `--deepspeed_stage`, with the values of `others`; see `FlagChange`."""
    return FlagChange(kind=kind, strength=stage, values={"deepspeed_stage": stage} | others)


def find_node_sizes(layout: ShardLayout) -> set[int]:
    """The number of GPUs on a node, of several nodes that are alike; otherwise nothing."""
    sizes = set(layout.gpus_per_node)
    if len(layout.nodes) == 1 or len(sizes) > 1:
        return set()
    return sizes


def describe_setting(flags: ParallelSection) -> str:
    """One sentence about what ranks share, and what is in host memory."""
    on_host = []
    if flags.adam_offload:
        on_host.append("optimizer")
    if flags.offload:
        on_host.append("weights")
    stage = flags.deepspeed_stage
    degree = flags.tensor_parallel_degree
    shared = SHARED_BY_STAGE[stage]
    nearby = ""
    neighbours = effective_zpg(flags)
    if neighbours > 1:
        nearby = f", and {neighbours} neighbours a second copy of the weights"
    there = " and ".join(on_host) or "nothing"
    who = "all ranks"
    if degree > 1:
        who = f"{degree} neighbours split matrices, and all with the same part"
    return f"DeepSpeed ZeRO-{stage}: {who} share {shared}{nearby}; in host memory: {there}"
