"""Plans of many settings: their figures and their advice are those of plans.yaml.

What the figures are right by stands in the tests beside this one: blocks and steps that PyTorch
traces, and sums by hand. These hold all settings where they are. A change that is meant to move
them writes the file anew:

    python -m tests.unit.planning.test_plans
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from open_instruct.commands.plan import parse_request
from open_instruct.planning.advice import Advice, Change
from open_instruct.planning.plan import Plan, make_plan

FILE = Path(__file__).with_name("plans.yaml")
ADVICE = ("to_fit", "with_adapters", "faster", "recomputes_less", "exchanges_less")
PLANS: list[dict[str, Any]] = yaml.load(FILE.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


def planned(words: Iterable[str]) -> Plan:
    return make_plan(parse_request([*words]).setting)


def advised(plan: Plan) -> dict[str, Change]:
    advice = Advice(plan)
    changes = {name: getattr(advice, name) for name in ADVICE}
    return {name: change for name, change in changes.items() if change is not None}


def record_of(plan: Plan, changes: Mapping[str, Change]) -> dict[str, Any]:
    layout = plan.layout
    return {
        "layout": f"{layout.num_replicas} x {layout.shard_degree} x {layout.tensor_parallel_degree}",
        "checkpointing": plan.workload.checkpointing,
        "tokens_per_step": plan.tokens_per_step,
        "peak": f"{plan.peak.name} {plan.peak.total_bytes}",
        "host_bytes": sum(num_bytes for _, num_bytes in plan.host.parts),
        "sent_bytes": round(plan.sent_bytes),
        "step_s": float(f"{plan.time.step_s:.4g}"),
        "bound_by": plan.time.bound_by,
        "fits": "with room" if plan.has_room else "barely" if plan.fits else "not",
        "advice": {name: change.text for name, change in changes.items()},
    }


def without(words: list[str], flags: Iterable[str]) -> list[str]:
    """The words without the first flag of each name that is among them, and its one value."""
    for flag in flags:
        if f"--{flag}" in words:
            first = words.index(f"--{flag}")
            words = words[:first] + words[first + 2 :]
    return words


@pytest.mark.parametrize("recorded", PLANS, ids=lambda recorded: recorded["run"])
def test_plan_has_recorded_figures_and_its_advice_is_the_plan_of_the_flags_it_names(
    recorded: dict[str, Any],
) -> None:
    words = recorded["run"].split()
    plan = planned(words)
    changes = advised(plan)
    assert record_of(plan, changes) == {
        name: value for name, value in recorded.items() if name != "run"
    }
    for name, change in changes.items():
        nodes = (
            ["--num_nodes", str(len(change.plan.setting.gpus_per_node))]
            if "num_nodes" in change.values
            else []
        )
        again = planned([*without(words, change.values), *change.flags.split(), *nodes])
        assert again.phases == change.plan.phases and again.has_room, name
        assert change.plan.tokens_per_step == plan.tokens_per_step or {
            "num_nodes",
            "tensor_parallel_degree",
        } & set(change.values)


def write() -> None:
    head = FILE.read_text(encoding="utf-8").partition("\n\n")[0]
    records = []
    for recorded in PLANS:
        plan = planned(recorded["run"].split())
        records.append({"run": recorded["run"]} | record_of(plan, advised(plan)))
    FILE.write_text(
        f"{head}\n\n{yaml.safe_dump(records, sort_keys=False, width=10**6)}", encoding="utf-8"
    )


if __name__ == "__main__":
    write()
