"""The learner on DeepSpeed, as a plan asks it. Without torch, and without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from open_instruct.config.sections import ParallelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.errors import InputError
from open_instruct.learner.deepspeed.planned_memory import ZeroMoments
from open_instruct.learner.deepspeed.planned_state import Zero
from open_instruct.learner.deepspeed.planned_traffic import exchanges_of
from open_instruct.learner.deepspeed.settings import engine_settings
from open_instruct.parallel.training_state import ADAMW_MOMENTS, MASTER_BYTES, MOMENT_BYTES
from open_instruct.planning.memory.forward_backward import GATHERED, GRADIENTS, REDUCED
from open_instruct.planning.memory.phases import BUFFERS, OPTIMIZER, PARAMETERS
from open_instruct.planning.plan import Backend, Setting, Way
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.workload import Workload
from open_instruct.planning.traffic.collectives import Exchange
from open_instruct.planning.traffic.per_step import traffic_of_weight_sync
from open_instruct.records import ShardLayout

# DeepSpeed's own, where its configuration says nothing; a test holds them equal.
DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
}


def zero_of(sharing: dict[str, Any], *, decays: bool) -> Zero:
    """From what is `zero_optimization` in DeepSpeed's configuration."""
    return Zero(
        stage=sharing["stage"],
        nearby=sharing.get("zero_hpz_partition_size", 1),
        optimizer_on_host="offload_optimizer" in sharing,
        weights_on_host="offload_param" in sharing,
        decays=decays,
        **{name.removeprefix("stage3_"): sharing.get(name, default) for name, default in DEFAULTS.items()},
    )


@dataclass(frozen=True, kw_only=True)
class DeepSpeed(Backend):
    """ZeRO."""

    parallel: ParallelSection
    zero: Zero
    sharing: str

    columns = ("stage", "zpg", "host")

    def moments(self, shape: ModelShape, layout: ShardLayout, workload: Workload) -> ZeroMoments:
        if layout.tensor_parallel_degree > 1:
            raise InputError(
                f"--tensor_parallel_degree {layout.tensor_parallel_degree}: what split matrices need is not planned "
                "with --backend deepspeed; plan it without that flag"
            )
        return ZeroMoments(self.zero, shape, layout, workload)

    def exchanges(self, shape: ModelShape, layout: ShardLayout, workload: Workload) -> tuple[Exchange, ...]:
        exchanges = [*exchanges_of(self.moments(shape, layout, workload))]
        return (*exchanges, *(traffic_of_weight_sync(shape, layout, workload) if workload.num_engines else ()))

    def cells(self, layout: ShardLayout) -> tuple[str, str, str]:
        on_host = "all" if self.zero.weights_on_host else "adam" if self.zero.optimizer_on_host else "-"
        return f"{self.zero.stage}", f"{self.zero.nearby}", on_host

    def meanings(self, layout: ShardLayout, workload: Workload) -> dict[str, str]:
        zero, size = self.zero, layout.world_size
        part = "all of them" if zero.stage == 0 else f"this rank's 1/{size}"
        copy = {0: "", 3: f", and the same part in {workload.param_dtype}, to be gathered"}
        copies = copy.get(zero.stage, f", and all of them in {workload.param_dtype}, to compute with")
        gradients = "all of them" if zero.stage < 2 else part
        return {
            PARAMETERS: f"the weights that are trained, {part}, {MASTER_BYTES} bytes each{copies}",
            GRADIENTS: f"what the backward passes of a step found for each weight, {gradients}, in float32",
            OPTIMIZER: f"AdamW's {ADAMW_MOMENTS} moments of each weight, {part}, {MOMENT_BYTES} bytes a moment",
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
        """Later stages (kind 0), then the optimizer in host memory (kind 4), then the weights too (kind 5)."""
        now, shares = self.parallel, setting.layout.world_size > 1
        later, on_host = range(now.deepspeed_stage + 1, 4), {"adam_offload": True}
        found = [(0, stage, {"deepspeed_stage": stage}) for stage in later if shares]
        if setting.on_cuda and not now.adam_offload:
            found += [
                (4, stage, {"deepspeed_stage": stage} | on_host) for stage in range(max(1, now.deepspeed_stage), 4)
            ]
        if setting.on_cuda and not now.offload:
            found += [(5, 1, {"deepspeed_stage": 3, "offload": True} | on_host)]
        for kind, strength, flags in found:
            values = {name: value for name, value in flags.items() if getattr(now, name) != value}
            yield Way(kind=kind, strength=strength, values=values)


def backend_of(config: LearnerConfig, *, on_cuda: bool) -> DeepSpeed:
    """How a run shares."""
    parallel, optim = config.parallel, config.optim
    settings = engine_settings(parallel, model=config.model, optim=optim, on_cuda=on_cuda)
    zero = zero_of(settings["zero_optimization"], decays=optim.weight_decay > 0)
    return DeepSpeed(parallel=parallel, zero=zero, sharing=_in_a_sentence(zero))


def _in_a_sentence(zero: Zero) -> str:
    on_host = {"optimizer": zero.optimizer_on_host, "weights": zero.weights_on_host}
    kept = " and ".join(name for name, is_there in on_host.items() if is_there) or "nothing"
    shared = ("nothing", "optimizer states", "optimizer states and gradients", "everything")[zero.stage]
    nearby = f", and {zero.nearby} neighbours a second copy of the weights" if zero.nearby > 1 else ""
    return f"DeepSpeed ZeRO-{zero.stage}: all ranks share {shared}{nearby}; in host memory: {kept}"
