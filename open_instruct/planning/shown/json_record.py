"""A plan as JSON, for scripts and pages: bytes, seconds, and every layout of the ranking."""

from dataclasses import asdict
from typing import Any

from open_instruct.config.sections import OptimSection
from open_instruct.planning.advice import Advice, Change
from open_instruct.planning.memory.phases import Phase
from open_instruct.planning.plan import BATCH, Plan

CHANGES = ("to_fit", "with_adapters", "faster", "recomputes_less", "exchanges_less")
DEGREES = (
    *("shard_degree", "num_replicas", "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"),
    "straddles_nodes",
)


def as_record(plan: Plan, advice: Advice) -> dict[str, Any]:
    """The keys that scripts read; nothing in it is rounded."""
    return {
        "model": _named(plan.setting.shape, "name", "family", "num_params", "num_trained"),
        "device": asdict(plan.setting.device),
        "mfu": plan.setting.mfu,
        "layout": plan.layout.as_json(),
        "workload": asdict(plan.workload),
        **_named(plan, "fits", "headroom_bytes"),
        **memory_record(plan),
        "host": _phase(plan.host),
        "exchanges": [asdict(exchange) for exchange in plan.exchanges],
        "time": asdict(plan.time) | _named(plan.time, "step_s", "bound_by"),
        **_named(plan, "tokens_per_step", "tokens_per_second"),
        "weight_syncs": [asdict(cost) for cost in plan.syncs],
        "advice": {"text": advice.lines()} | {name: _change(getattr(advice, name)) for name in CHANGES},
        "layouts": [_layout(other) for other in advice.ranked],
    }


def memory_record(plan: Plan) -> dict[str, Any]:
    """The content of a run's `plan.json`: the memory of a GPU, and that of each phase by its parts."""
    optim = plan.setting.config.optim
    return {
        "memory_bytes": plan.setting.device.memory_bytes,
        "peak_phase": plan.peak.name,
        "activation_checkpointing": plan.setting.config.memory.activation_checkpointing,
        "activation_checkpointing_modules": list(plan.workload.checkpointing_modules),
        "phases": [{"name": phase.name} | _phase(phase) for phase in plan.phases],
    } | (_named(optim, *BATCH) if isinstance(optim, OptimSection) else {})


def _phase(phase: Phase) -> dict[str, Any]:
    return {"total_bytes": phase.total_bytes, "parts": dict(phase.parts)}


def _change(change: Change | None) -> dict[str, Any] | None:
    if change is None:
        return None
    gpus_per_node = list(change.plan.setting.gpus_per_node)
    return _named(change, "flags", "values") | {"gpus_per_node": gpus_per_node} | _layout(change.plan)


def _layout(plan: Plan) -> dict[str, Any]:
    return {
        **_named(plan.layout, *DEGREES),
        "sharing": " ".join(map(str, plan.setting.backend.cells(plan.layout).values())),
        "fits": plan.fits,
        "peak_bytes": plan.peak.total_bytes,
        "peak_phase": plan.peak.name,
        "step_s": plan.time.step_s,
        **_named(plan, "tokens_per_step", "tokens_per_second"),
    }


def _named(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}
