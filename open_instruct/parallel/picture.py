"""A layout as a picture in 80 columns: nodes as boxes, ranks lettered by shard group, traffic by reach."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from open_instruct.parallel.wording import counted, degrees_of, group_name, nodes_text, ranks_text
from open_instruct.records import ShardLayout

WIDTH = 80
RANKS_IN_A_ROW = 8
MAX_NODES_DRAWN, NODES_DRAWN_FIRST = 8, 4
MAX_ROWS_DRAWN = 4

# One for each shard group in turn; none of them is the green, yellow or red that traffic is marked with.
GROUP_STYLES = ("cyan", "magenta", "blue", "bright_cyan", "bright_magenta", "bright_blue")
_ASCII = str.maketrans("┌┐└┘─│═×", "++++-|=x")


def draw_layout(layout: ShardLayout, *, ascii_only: bool = False) -> Text:
    """The picture, styled for a terminal; `.plain` is the same without colours.

    Args:
        layout: any layout; of more than eight nodes the first four and the last are drawn.
        ascii_only: draw with `+-|=` in place of box characters.
    """
    picture = Text("\n").join([_summary(layout), Text(), *_nodes(layout), Text(), *_traffic(layout)])
    for warning in layout.warnings:
        picture.append("\n\n")
        picture.append(wrap_warning(warning), style="yellow")
    if ascii_only:
        picture.plain = picture.plain.translate(_ASCII)
    return picture


def print_layout(layout: ShardLayout, console: Console) -> None:
    """Print the picture, in box characters where the console's encoding has them."""
    try:
        "┌═×".encode(console.encoding)
        ascii_only = False
    except UnicodeEncodeError:
        ascii_only = True
    console.print(draw_layout(layout, ascii_only=ascii_only), soft_wrap=True, highlight=False)


def wrap_warning(warning: str) -> str:
    """A warning as a paragraph of the picture. Flags are not broken in two."""
    indent = " " * len("warning: ")
    return textwrap.fill(
        f"warning: {warning}", WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _summary(layout: ShardLayout) -> Text:
    nodes = nodes_text(layout.gpus_per_node)
    if layout.single_device:
        return Text(f"{nodes}: the whole model on one GPU, without FSDP (--single_gpu_mode)", style="bold")
    split = layout.shard_group_size * layout.tensor_parallel_degree
    each = "each " if layout.num_replicas > 1 else ""
    whole = f"{each}split over {split} GPUs" if split > 1 else f"{each}whole on one GPU"
    headline = f"{nodes}: {counted(layout.num_replicas, 'replica')} of the model, {whole}"
    summary = Text(textwrap.fill(headline, WIDTH), style="bold")
    if split > layout.shard_degree:
        summary.append(f"\n{split} GPUs = {' × '.join(degrees_of(layout))}", style="not bold")
    flags = f"--fsdp_shard_degree {layout.shard_degree} --fsdp_num_replicas {layout.num_replicas}"
    summary.append(f"\nthe same as {flags}", style="not bold dim")
    return summary


def _nodes(layout: ShardLayout) -> list[Text]:
    """Boxes, as many beside each other as fit, with the middle of a long list left out."""
    num_nodes = len(layout.gpus_per_node)
    groups = {rank: index for index, group in enumerate(layout.shard_groups) for rank in group}
    if num_nodes <= MAX_NODES_DRAWN:
        return _flow([_box(layout, node, groups) for node in range(num_nodes)])
    left_out = range(NODES_DRAWN_FIRST, num_nodes - 1)
    sizes = {layout.gpus_per_node[node] for node in left_out}
    alike = f"{counted(sizes.pop(), 'GPU')} each" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)} GPUs each"
    return [
        *_flow([_box(layout, node, groups) for node in range(NODES_DRAWN_FIRST)]),
        Text(f"  ... nodes {left_out[0]} to {left_out[-1]}, {alike} ...", style="dim"),
        *_flow([_box(layout, num_nodes - 1, groups)]),
    ]


def _box(layout: ShardLayout, node: int, groups: dict[int, int]) -> list[Text]:
    """Lines of equal length: for each eight ranks their numbers, and below them their shard groups."""
    ranks = layout.nodes[node]
    rows = [ranks[start : start + RANKS_IN_A_ROW] for start in range(0, len(ranks), RANKS_IN_A_ROW)]
    cell = max(len(str(layout.world_size - 1)), len(group_name(len(layout.shard_groups) - 1)))
    lines: list[Text] = []
    for index, row in enumerate(rows):
        if len(rows) > MAX_ROWS_DRAWN and MAX_ROWS_DRAWN - 1 <= index < len(rows) - 1:
            if index == MAX_ROWS_DRAWN - 1:
                lines.append(Text(" ...", style="dim"))
            continue
        lines += [_rank_line(layout, row, groups, cell), _group_line(row, groups, cell)]
    title = f" node {node} "
    inner = max(len(title) + 1, *(len(line) for line in lines))
    border = "dim"
    return [
        Text("┌─" + title + "─" * (inner - len(title) - 1) + "┐", style=border),
        *(Text.assemble(("│", border), line, " " * (inner - len(line)), ("│", border)) for line in lines),
        Text("└" + "─" * inner + "┘", style=border),
    ]


def _rank_line(layout: ShardLayout, row: Sequence[int], groups: dict[int, int], cell: int) -> Text:
    """Rank numbers, joined by ═ where neighbours are in one tensor group."""
    degree = layout.tensor_parallel_degree
    line = Text()
    for rank in row:
        joined = rank % degree != 0
        line.append(("═" if joined else " ") * (2 + cell - len(str(rank))), style="dim")
        line.append(str(rank), style=_style(groups[rank]))
    return line.append("══" if (row[-1] + 1) % degree else "  ", style="dim")


def _group_line(row: Sequence[int], groups: dict[int, int], cell: int) -> Text:
    line = Text()
    for rank in row:
        line.append(f"  {group_name(groups[rank]):>{cell}}", style=f"bold {_style(groups[rank])}")
    return line.append("  ")


def _style(group: int) -> str:
    return GROUP_STYLES[group % len(GROUP_STYLES)]


def _flow(boxes: Sequence[list[Text]]) -> list[Text]:
    """Boxes beside each other while they fit, then on the next line."""
    rows: list[list[list[Text]]] = [[]]
    for box in boxes:
        if rows[-1] and sum(len(other[0]) + 2 for other in rows[-1]) + len(box[0]) > WIDTH:
            rows.append([])
        rows[-1].append(box)
    return [line for row in rows for line in _side_by_side(row)]


def _side_by_side(boxes: Sequence[list[Text]]) -> list[Text]:
    height = max(len(box) for box in boxes)
    blank = [[Text(" " * len(box[0]))] * (height - len(box)) for box in boxes]
    columns = [box + filler for box, filler in zip(boxes, blank, strict=True)]
    lines = [Text("  ").join(row) for row in zip(*columns, strict=True)]
    for line in lines:
        line.rstrip()
    return lines


def _traffic(layout: ShardLayout) -> list[Text]:
    """For each kind of group: what its ranks exchange, whether that leaves the node, and who they are."""
    if layout.single_device:
        return [Text("no groups: nothing is exchanged")]
    lines = _group_traffic(
        layout, "shard groups", "all-gather weights, reduce-scatter grads", layout.shard_groups, lettered=True
    )
    lines += _group_traffic(layout, "replica groups", "all-reduce grads", layout.replica_groups)
    if layout.context_parallel_degree > 1:
        lines += _group_traffic(layout, "context groups", "exchange tokens in attention", layout.context_groups)
    if layout.tensor_parallel_degree > 1:
        lines += _group_traffic(layout, "tensor groups ═", "exchange activations in every layer", layout.tensor_groups)
    return lines


def _group_traffic(
    layout: ShardLayout, name: str, traffic: str, groups: tuple[tuple[int, ...], ...], *, lettered: bool = False
) -> list[Text]:
    num_crossing = len(layout.straddling(groups))
    if len(groups[0]) == 1:
        traffic, reach, style = "nothing to exchange", "", "dim"
    elif num_crossing == 0:
        reach, style = "within a node", "green"
    else:
        # Replicas are meant to talk across nodes; the others are slower for it.
        style = "yellow" if name == "replica groups" else "bold red"
        reach = "across nodes" if num_crossing == len(groups) else f"{num_crossing} of {len(groups)} cross nodes"
    first = Text.assemble((f"{name:<16}", "bold"), f"{traffic:<42}", (reach, style))
    first.rstrip()
    return [first, _members(groups, lettered=lettered)]


def _members(groups: tuple[tuple[int, ...], ...], *, lettered: bool) -> Text:
    """How many groups of how many GPUs, and as many of them as fit in the line."""
    line = Text(" " * 16 + f"{counted(len(groups), 'group')} of {counted(len(groups[0]), 'GPU')}: ")
    names = [
        Text.assemble((f"{group_name(index)} ", f"bold {_style(index)}") if lettered else "", ranks_text(group))
        for index, group in enumerate(groups)
    ]
    if len(names) <= 4:
        whole = line + Text(", ").join(names)
        if len(whole) <= WIDTH:
            return whole
    for num_first in (2, 1):
        some = line + Text(", ").join(names[:num_first]) + Text(", ... ") + names[-1]
        if len(some) <= WIDTH:
            break
    return some
