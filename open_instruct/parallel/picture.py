"""A layout in 80 columns: a line a node with its shard groups, then the exchanges by group."""

import textwrap
from collections.abc import Iterable, Iterator

from rich.text import Text

from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.text import spell_count
from open_instruct.parallel.wording import group_name, list_degrees, nodes_text, ranks_text

WIDTH = 80
MAX_NODES_SHOWN = 8
NODES_SHOWN_FIRST = 4

# Colours of shard groups in turn; green, yellow and red are left for traffic.
GROUP_STYLES = ("cyan", "magenta", "blue", "bright_cyan", "bright_magenta", "bright_blue")


def draw_layout(layout: ShardLayout) -> Text:
    """The picture, styled for a terminal; `.plain` is the same without colours, in ASCII alone."""
    lines = [*_summary(layout), Text(), *_nodes(layout), Text(), *_traffic(layout)]
    for warning in layout.warnings:
        paragraph = wrap_paragraph(f"warning: {warning}", later_indent="         ")
        lines += [Text(), Text(paragraph, style="yellow")]
    return Text("\n").join(lines)


def _summary(layout: ShardLayout) -> Iterator[Text]:
    nodes = nodes_text(layout.gpus_per_node)
    if layout.single_device:
        yield Text(
            f"{nodes}: the whole model on one GPU, without FSDP (--single_gpu_mode)", style="bold"
        )
        return
    split = layout.shard_group_size * layout.tensor_parallel_degree
    share = "whole on one GPU"
    if split > 1:
        share = f"split over {split} GPUs"
    if layout.num_replicas > 1:
        share = f"each {share}"
    replicas = spell_count(layout.num_replicas, "replica")
    yield Text(wrap_paragraph(f"{nodes}: {replicas} of the model, {share}"), style="bold")
    if split > layout.shard_degree:
        yield Text(f"{split} GPUs = {' x '.join(list_degrees(layout))}")
    flags = f"--fsdp_shard_degree {layout.shard_degree} --fsdp_num_replicas {layout.num_replicas}"
    yield Text(f"the same as {flags}", style="dim")


def _nodes(layout: ShardLayout) -> Iterator[Text]:
    """Each node's ranks and their shard groups; the middle of a long list is left out."""
    letters: dict[int, Text] = {}
    for index, group in enumerate(layout.shard_groups):
        letters |= dict.fromkeys(group, _letter(index))
    last = len(layout.nodes) - 1
    node_width = len(str(last))
    ranks_width = 2 * len(str(layout.world_size)) + 2
    for node, ranks in enumerate(layout.nodes):
        if last < MAX_NODES_SHOWN or node < NODES_SHOWN_FIRST or node == last:
            title = f"node {node:<{node_width}}  ranks {ranks_text(ranks):<{ranks_width}} "
            yield _list_names(title, (letters[rank] for rank in ranks), between=" ")
        elif node == NODES_SHOWN_FIRST:
            yield Text(f"... nodes {node} to {last - 1}", style="dim")


def _traffic(layout: ShardLayout) -> Iterator[Text]:
    """For each kind of group: what its ranks exchange, whether that leaves the node, and who."""
    kinds = (
        ("shard groups", "all-gather weights, reduce-scatter grads", layout.shard_groups),
        ("replica groups", "all-reduce grads", layout.replica_groups),
        ("context groups", "exchange tokens in attention", layout.context_groups),
        ("expert groups", "exchange tokens at the experts", layout.expert_groups),
        ("tensor groups", "exchange activations in every layer", layout.tensor_groups),
    )
    if layout.world_size == 1:
        yield Text("no groups: nothing is exchanged")
    for name, traffic, groups in kinds:
        if len(groups[0]) == 1:
            continue
        num_crossing = len(layout.straddling(groups))
        # Replica groups are expected to cross nodes; other groups become slower by it.
        style = "yellow" if name == "replica groups" else "bold red"
        if num_crossing == 0:
            reach = "within a node"
            style = "green"
        elif num_crossing == len(groups):
            reach = "across nodes"
        else:
            reach = f"{num_crossing} of {len(groups)} cross nodes"
        yield Text.assemble((f"{name:<16}", "bold"), f"{traffic:<42}", (reach, style))
        members = []
        for index, group in enumerate(groups):
            ranks = Text(ranks_text(group))
            if name == "shard groups":
                ranks = Text.assemble(_letter(index), " ", ranks)
            members.append(ranks)
        title = f"{'':16}{spell_count(len(groups), 'group')} of {len(groups[0])} GPUs: "
        yield _list_names(title, members, between=", ")


def _letter(group: int) -> Text:
    return Text(group_name(group), style=f"bold {GROUP_STYLES[group % len(GROUP_STYLES)]}")


def _list_names(title: str, names: Iterable[Text], *, between: str) -> Text:
    """The title and as many of `names` as fit in a line."""
    line = Text(title)
    more = f"{between}..."
    for index, name in enumerate(names):
        if len(line) + len(between) + len(name) > WIDTH - len(more):
            return line.append(more)
        line.append(between if index else "").append(name)
    return line


def wrap_paragraph(text: str, *, later_indent: str = "") -> str:
    """A paragraph of the picture or of a plan in wrapped lines; flags are never broken."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=later_indent, break_on_hyphens=False, break_long_words=False
    )
