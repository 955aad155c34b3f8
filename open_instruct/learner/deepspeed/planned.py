"""The learner on DeepSpeed, as a plan asks it. Without torch, and without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from open_instruct.config.training import LearnerConfig
from open_instruct.learner.deepspeed.planned_memory import Zero, ZeroMoments
from open_instruct.learner.deepspeed.planned_traffic import exchanges_of, exchanges_of_merging
from open_instruct.parallel.training_state import ADAMW_MOMENTS, MASTER_BYTES, MOMENT_BYTES
from open_instruct.planning.memory.forward_backward import GATHERED, GRADIENTS, REDUCED
from open_instruct.planning.memory.phases import BUFFERS, OPTIMIZER, PARAMETERS, Moments
from open_instruct.planning.plan import Backend, Plan, Setting, Way, tensor_degrees
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.workload import Workload
from open_instruct.planning.traffic.collectives import Exchange
from open_instruct.records import ShardLayout


class DeepSpeed(Backend):
    """How a run shares under ZeRO."""

    def __init__(self, config: LearnerConfig) -> None:
        self.parallel = flags = config.parallel
        self.zero = Zero(
            stage=flags.deepspeed_stage,
            nearby=flags.zpg,
            optimizer_on_host=flags.adam_offload,
            weights_on_host=flags.offload,
        )
        self.sharing = _in_a_sentence(self.zero, flags.tensor_parallel_degree)

    def moments(self, shape: ModelShape, layout: ShardLayout, workload: Workload) -> ZeroMoments:
        return ZeroMoments(self.zero, shape, layout, workload)

    def exchanges(self, run: Moments) -> Iterator[Exchange]:
        return exchanges_of(cast(ZeroMoments, run))

    def exchanges_of_merging(self, run: Moments) -> Iterator[Exchange]:
        return exchanges_of_merging(cast(ZeroMoments, run))

    def cells(self, layout: ShardLayout) -> dict[str, object]:
        on_host = "all" if self.zero.weights_on_host else "adam" if self.zero.optimizer_on_host else "-"
        return {"stage": self.zero.stage, "zpg": self.zero.nearby, "host": on_host}

    def meanings(self, plan: Plan) -> dict[str, str]:
        zero, dtype = self.zero, plan.workload.param_dtype
        part = "all of them" if zero.stage == 0 else f"this rank's 1/{plan.layout.shard_group_size}"
        copy = {0: "", 3: f", and the same part in {dtype}, to be gathered"}
        copies = copy.get(zero.stage, f", and all of them in {dtype}, to compute with")
        gradients, what = "all of them" if zero.stage < 2 else part, "weights that are trained"
        if (degree := plan.layout.tensor_parallel_degree) > 1:
            what += f" (of matrices a part, 1/{degree} of each)"
        if plan.setting.shape.adapters is not None:
            what = f"frozen weights, {part if zero.stage == 3 else 'all of them'}, in {dtype}, and the adapters'"
        return {
            PARAMETERS: f"the {what}, {part}, {MASTER_BYTES} bytes each{copies}",
            GRADIENTS: f"what the backward passes of a step found for each that is trained, {gradients}, in float32",
            OPTIMIZER: f"AdamW's {ADAMW_MOMENTS} moments of each of these, {part}, {MOMENT_BYTES} bytes a moment",
            GATHERED: "whole weights, of what runs and of what is fetched ahead or needed again soon",
            REDUCED: f"gradients in a bucket of {zero.reduce_bucket_size:,} values, and on their way",
            BUFFERS: "the bucket, where it stays; tables of positions, and tensors that are being read or written",
        }

    def others(self, setting: Setting) -> Iterator[dict[str, Any]]:
        """Every stage, with what stays as it is where it can, and second copies within a node."""
        flags, sizes = self.parallel, set(setting.layout.gpus_per_node)
        in_nodes = sizes if len(setting.layout.nodes) > 1 and len(sizes) == 1 else set()
        for stage in range(4):
            for zpg in sorted({1, flags.deepspeed_zpg} | in_nodes if stage == 3 else {1}):
                offload = {"adam_offload": flags.adam_offload and stage > 0, "offload": flags.offload and stage == 3}
                yield {"deepspeed_stage": stage, "deepspeed_zpg": zpg} | offload

    def ways_to_need_less(self, setting: Setting) -> Iterator[Way]:
        """Later stages (kind 0), the optimizer in host memory (4), the weights too (5), then a tensor degree (6)."""
        now, stages, on_host = self.parallel, range(4), {"adam_offload": True}
        later, none = stages[now.deepspeed_stage + 1 :] if setting.layout.world_size > 1 else (), dict[str, Any]()
        found = [(0, stage, none) for stage in later]
        if setting.on_cuda and not now.adam_offload:
            found += [(4, stage, on_host) for stage in stages[max(1, now.deepspeed_stage) :]]
        if setting.on_cuda and not now.offload:
            found += [(5, 3, on_host | {"offload": True})]
        degrees = tensor_degrees(setting.shape, setting.layout.context_parallel_degree)
        found += [(6, 3, {"tensor_parallel_degree": n}) for n in degrees if n > now.tensor_parallel_degree]
        for kind, stage, flags in found:
            yield Way(kind=kind, strength=stage, values={"deepspeed_stage": stage} | flags)


def _in_a_sentence(zero: Zero, degree: int) -> str:
    on_host = {"optimizer": zero.optimizer_on_host, "weights": zero.weights_on_host}
    kept = " and ".join(name for name, is_there in on_host.items() if is_there) or "nothing"
    shared = ("nothing", "optimizer states", "optimizer states and gradients", "everything")[zero.stage]
    nearby = f", and {zero.nearby} neighbours a second copy of the weights" if zero.nearby > 1 else ""
    who = "all ranks" if degree == 1 else f"{degree} neighbours split matrices, and all with the same part"
    return f"DeepSpeed ZeRO-{zero.stage}: {who} share {shared}{nearby}; in host memory: {kept}"
