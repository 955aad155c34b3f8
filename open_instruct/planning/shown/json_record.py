"""A plan as JSON, for scripts and pages: bytes, seconds, and every layout of the ranking."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from open_instruct.planning.advice import Advice, Change
from open_instruct.planning.plan import Plan


def as_record(plan: Plan, advice: Advice) -> dict[str, Any]:
    """The keys that scripts read; nothing in it is rounded."""
    shape = plan.setting.shape
    return {
        "model": {name: getattr(shape, name) for name in ("name", "family", "num_params", "num_trained")},
        "device": asdict(plan.setting.device),
        "mfu": plan.setting.mfu,
        "layout": plan.layout.as_json(),
        "workload": asdict(plan.workload),
        "fits": plan.fits,
        "headroom_bytes": plan.headroom_bytes,
        **memory_record(plan),
        "host": {"total_bytes": plan.host.total_bytes, "parts": dict(plan.host.parts)},
        "exchanges": [asdict(exchange) for exchange in plan.exchanges],
        "time": asdict(plan.time) | {"step_s": plan.time.step_s, "bound_by": plan.time.bound_by},
        "tokens_per_step": plan.tokens_per_step,
        "tokens_per_second": plan.tokens_per_second,
        "advice": {"text": advice.lines()}
        | {
            name: _change(getattr(advice, name))
            for name in ("to_fit", "with_adapters", "faster", "recomputes_less", "exchanges_less")
        },
        "layouts": [_layout(other) for other in advice.ranked],
    }


def memory_record(plan: Plan) -> dict[str, Any]:
    """What a GPU has and what each phase needs of it: the `plan.json` of a run."""
    return {
        "memory_bytes": plan.setting.device.memory_bytes,
        "peak_phase": plan.peak.name,
        "activation_checkpointing": plan.setting.config.memory.activation_checkpointing,
        "activation_checkpointing_modules": list(plan.workload.checkpointing_modules),
        "phases": [
            {"name": phase.name, "total_bytes": phase.total_bytes, "parts": dict(phase.parts)} for phase in plan.phases
        ],
    }


def _change(change: Change | None) -> dict[str, Any] | None:
    if change is None:
        return None
    gpus_per_node = list(change.plan.setting.gpus_per_node)
    return {"flags": change.flags, "values": change.values, "gpus_per_node": gpus_per_node} | _layout(change.plan)


def _layout(plan: Plan) -> dict[str, Any]:
    degrees = ("shard_degree", "num_replicas", "tensor_parallel_degree", "context_parallel_degree", "straddles_nodes")
    return {name: getattr(plan.layout, name) for name in degrees} | {
        "sharing": " ".join(map(str, plan.setting.backend.cells(plan.layout).values())),
        "fits": plan.fits,
        "peak_bytes": plan.peak.total_bytes,
        "peak_phase": plan.peak.name,
        "step_s": plan.time.step_s,
        "tokens_per_step": plan.tokens_per_step,
        "tokens_per_second": plan.tokens_per_second,
    }
