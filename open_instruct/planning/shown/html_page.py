"""A plan as one HTML file, from page.html.jinja: tables and drawings of our own, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from open_instruct.parallel.wording import counted, group_name
from open_instruct.planning.advice import Advice
from open_instruct.planning.plan import Plan
from open_instruct.planning.shown.summary import (
    LETTERS,
    headline,
    meaning_of,
    notes_on,
    parts_in_any,
    parts_of,
    time_lines,
    traffic_rows,
    unit_of,
    verdict,
    work_lines,
)
from open_instruct.planning.shown.units import amount, gib, seconds
from open_instruct.records import ShardLayout

NUM_COLOURS = 12
MAX_NODES_DRAWN, NODES_DRAWN_FIRST = 8, 4
MAX_RANKS_DRAWN = 16
PAGE_WIDTH = 880


def html_page(plan: Plan, advice: Advice) -> str:
    """The whole file."""
    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    pages.filters["thousands"] = "{:,.0f}".format
    unit_name, unit = unit_of(plan)
    layout, nodes = plan.layout, list(_nodes_drawn(plan.layout))
    num_not_drawn = len(layout.nodes) - len(nodes)
    return pages.get_template("page.html.jinja").render(
        plan=plan,
        advice=advice,
        headline=headline(plan),
        verdict=verdict(plan),
        work_lines=work_lines(plan),
        time_lines=time_lines(plan),
        traffic=traffic_rows(plan),
        phases=[(phase, dict(parts_of(phase, plan))) for phase in plan.phases],
        meanings={label: meaning_of(label, plan) for label in parts_in_any(plan)},
        colours={label: index for index, label in enumerate(LETTERS)},
        memory=f"{plan.setting.device.memory_gib:g} GiB",
        unit_name=unit_name,
        unit=unit,
        whole=_whole_model(layout),
        nodes=nodes,
        not_drawn=counted(num_not_drawn, "node") if num_not_drawn else "",
        notes_on=notes_on,
        gib=gib,
        amount=amount,
        seconds=seconds,
        num_colours=NUM_COLOURS,
        page_width=PAGE_WIDTH,
    )


def _whole_model(layout: ShardLayout) -> str:
    if layout.single_device:
        return "the whole model on one GPU, without FSDP"
    split = counted(layout.shard_group_size * layout.tensor_parallel_degree, "GPU")
    return f"{counted(layout.num_replicas, 'replica')} of the model, each split over {split}"


def _nodes_drawn(layout: ShardLayout) -> Iterator[dict[str, Any]]:
    """Of each node its title, and its first ranks with the number and the letters of their shard group."""
    groups = {rank: index for index, group in enumerate(layout.shard_groups) for rank in group}
    drawn = list(range(len(layout.nodes)))
    if len(drawn) > MAX_NODES_DRAWN:
        drawn = [*drawn[:NODES_DRAWN_FIRST], drawn[-1]]
    for node in drawn:
        ranks = layout.nodes[node]
        more = f", {len(ranks) - MAX_RANKS_DRAWN} more not drawn" if len(ranks) > MAX_RANKS_DRAWN else ""
        yield {
            "title": f"node {node}: ranks {ranks[0]} to {ranks[-1]}{more}",
            "ranks": [(rank, groups[rank], group_name(groups[rank])) for rank in ranks[:MAX_RANKS_DRAWN]],
        }
