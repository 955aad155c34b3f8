"""Templates of the pages, which escape all text, and the drawing of a layout's nodes."""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from open_instruct.core.text import open_templates
from open_instruct.parallel.wording import group_name
from open_instruct.planning.presentation import LETTERS
from open_instruct.planning.subject import units

MAX_NODES_DRAWN = 8
NODES_DRAWN_FIRST = 4
MAX_RANKS_DRAWN = 16


def render_template(template: str, **values: Any) -> str:
    """The text of a template in this folder, with `values` in it."""
    pages = open_templates(Path(__file__).parent, autoescape=True, keep_trailing_newline=True)
    pages.policies["json.dumps_kwargs"] = {"sort_keys": False}  # curves have an order
    pages.filters["with_flags"] = _with_flags
    colours = {label: index for index, label in enumerate(LETTERS)}
    pages.globals |= {
        "num_colours": len(LETTERS),
        "units": units,
        "part_colours": colours,
        "draw_nodes": draw_nodes,
    }
    return pages.get_template(template).render(values)


def _with_flags(text: str) -> Markup:
    """The escaped text with its flags as `<code>`, which are not broken at line ends."""
    return Markup(re.sub(r"--\w+", r"<code>\g<0></code>", str(escape(text))))


def draw_nodes(
    gpus_per_node: Sequence[int], shard_groups: Sequence[Sequence[int]]
) -> Iterator[dict[str, Any]]:
    """Yields each node with its `title`, and numbers and shard groups of its first `ranks`."""
    group_of_rank: dict[int, int] = {}
    for index, group in enumerate(shard_groups):
        group_of_rank |= dict.fromkeys(group, index)
    nodes = list(enumerate(pairwise(accumulate(gpus_per_node, initial=0))))
    if len(nodes) > MAX_NODES_DRAWN:
        nodes = [*nodes[:NODES_DRAWN_FIRST], nodes[-1]]
    for node, (start, stop) in nodes:
        title = f"node {node}: ranks {start} to {stop - 1}"
        num_hidden = stop - start - MAX_RANKS_DRAWN
        if num_hidden > 0:
            title += f", {num_hidden} more not drawn"
        ranks = []
        for rank in range(start, stop)[:MAX_RANKS_DRAWN]:
            index = group_of_rank[rank]
            ranks.append((rank, index, group_name(index)))
        yield {"title": title, "ranks": ranks}
