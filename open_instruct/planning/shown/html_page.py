"""A plan as one HTML file, from page.html.jinja: tables and drawings of our own, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from open_instruct.parallel.wording import counted, group_name
from open_instruct.planning.advice import Advice
from open_instruct.planning.plan import Plan
from open_instruct.planning.shown import summary, units
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
    pages.filters["counted"] = counted
    drawn = {"num_colours": NUM_COLOURS, "page_width": PAGE_WIDTH, "nodes": list(_nodes_drawn(plan.layout))}
    said = {"plan": plan, "advice": advice, "summary": summary, "units": units}
    return pages.get_template("page.html.jinja").render(drawn | said)


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
