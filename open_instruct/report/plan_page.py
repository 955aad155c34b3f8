"""A plan as one HTML file, from plan.html.jinja: tables and drawings of our own, no script, nothing fetched."""

from __future__ import annotations

from open_instruct.planning.advice import Advice
from open_instruct.planning.plan import Plan
from open_instruct.planning.shown import summary
from open_instruct.planning.subject.words import said
from open_instruct.report.templates import nodes_drawn, rendered


def html_page(plan: Plan, advice: Advice) -> str:
    """The whole file."""
    layout = plan.layout
    bars = [
        {"name": phase.name, "total_bytes": phase.total_bytes, "parts": summary.parts_of(phase, plan)}
        for phase in plan.phases
    ]
    nodes = list(nodes_drawn(layout.gpus_per_node, layout.shard_groups))
    return rendered("plan.html.jinja", plan=plan, advice=advice, said=said, summary=summary, bars=bars, nodes=nodes)
