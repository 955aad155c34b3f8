"""What is allowed but costs something: groups whose traffic leaves the node, and copies that nothing shards.

Every warning names the groups and ends with flags that would avoid it, or says that none can.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from open_instruct.parallel.wording import counted, group_name, nodes_text, one_of, ranks_text
from open_instruct.records import ShardLayout

MAX_GROUPS_SHOWN = 3


def find_warnings(
    layout: ShardLayout, *, fsdp_shard_degree: int | None, fsdp_num_replicas: int | None
) -> tuple[str, ...]:
    """All warnings about `layout`, in the light of what the user asked for."""
    found = [
        _tensor_groups_across_nodes(layout),
        _context_groups_across_nodes(layout),
        _shard_groups_across_nodes(layout),
        # Who asks for a shard degree of 1 knows that nothing is sharded.
        None if fsdp_shard_degree == 1 else _not_sharded(layout, num_replicas_given=fsdp_num_replicas is not None),
    ]
    return tuple(warning for warning in found if warning is not None)


def _tensor_groups_across_nodes(layout: ShardLayout) -> str | None:
    straddling = layout.straddling(layout.tensor_groups)
    if not straddling:
        return None
    return (
        f"Tensor groups straddle nodes: {_show(layout, straddling)}. "
        "Every layer would exchange its activations over the network between nodes. "
        f"Keep the groups within a node with --tensor_parallel_degree {one_of(_tensor_degrees_within(layout))}."
    )


def _context_groups_across_nodes(layout: ShardLayout) -> str | None:
    straddling = layout.straddling(layout.context_groups)
    if not straddling:
        return None
    within = [
        degree
        for degree in range(1, layout.context_parallel_degree)
        if gcd(*layout.gpus_per_node) % (degree * layout.tensor_parallel_degree) == 0
    ]
    remedy = (
        f"Keep the groups within a node with --context_parallel_degree {one_of(within)}."
        if within
        else "Lower --tensor_parallel_degree first: its groups do not fit in a node either."
    )
    return (
        f"Context groups straddle nodes: {_show(layout, straddling)}. "
        f"Every attention layer would exchange its tokens over the network between nodes. {remedy}"
    )


def _shard_groups_across_nodes(layout: ShardLayout) -> str | None:
    # At shard degree 1 a shard group is a context group, which has its own warning and remedy.
    if not layout.straddles_nodes or layout.shard_degree == 1:
        return None
    straddling = layout.straddling(layout.shard_groups)
    common, model_parallel = gcd(*layout.gpus_per_node), layout.model_parallel_degree
    within = common // model_parallel if common % model_parallel == 0 else 1
    if within > 1:
        num_replicas = layout.data_parallel_world_size // within
        remedy = (
            f"Keep the groups within a node with --fsdp_shard_degree {within} --fsdp_num_replicas {num_replicas}, "
            "or by leaving both flags out."
        )
    elif model_parallel > 1 and common > 1:
        context = layout.context_parallel_degree
        degrees = [
            degree
            for degree in _tensor_degrees_within(layout)
            if degree * context < common and common % (degree * context) == 0
        ]
        beside = f"tensor degree {layout.tensor_parallel_degree}"
        if context > 1:
            beside += f" and context degree {context}"
        remedy = f"No shard degree above 1 stays within a node beside {beside}; " + (
            f"--tensor_parallel_degree {one_of(degrees)} would leave room."
            if degrees
            else "a lower --context_parallel_degree would leave room."
        )
    elif common == max(layout.gpus_per_node):
        remedy = "With one GPU in each node, sharding has to cross nodes."
    else:
        remedy = (
            f"With {nodes_text(layout.gpus_per_node)} no shard degree above 1 fits evenly in every node; "
            "nodes of equal size would allow it."
        )
    return (
        f"Shard groups straddle nodes: {_show(layout, straddling, lettered=True)}. "
        "Every forward and backward pass would gather parameters and scatter gradients over the network "
        f"between nodes. {remedy}"
    )


def _not_sharded(layout: ShardLayout, *, num_replicas_given: bool) -> str | None:
    num_copies = layout.data_parallel_world_size
    if layout.shard_group_size > 1 or num_copies == 1:
        return None
    common, tensor = gcd(*layout.gpus_per_node), layout.tensor_parallel_degree
    nodes = nodes_text(layout.gpus_per_node)
    shard_degrees = [degree for degree in range(2, num_copies + 1) if num_copies % degree == 0]
    within = [degree for degree in shard_degrees if common % (degree * tensor) == 0]
    across = [degree for degree in shard_degrees if degree not in within]
    smaller = [degree for degree in _tensor_degrees_within(layout) if degree < min(tensor, common)]

    if within:
        why = f"--fsdp_num_replicas {num_copies} asks for a copy on every data-parallel rank"
    elif tensor > 1:
        why = f"--tensor_parallel_degree {tensor} leaves nothing to shard over within a node ({nodes})"
    elif common == max(layout.gpus_per_node):
        why = "each node has one GPU"
    else:
        why = f"{nodes} have no common divisor above 1"
    held = "every GPU holds the whole training state"
    if tensor > 1:
        held = (
            f"there are {num_copies} copies of the training state, each split {tensor} ways by tensor parallelism only"
        )

    remedies = []
    if within:
        remedies.append(f"--fsdp_shard_degree {one_of(within)} (groups within a node)")
    if smaller and not within:
        remedies.append(f"--tensor_parallel_degree {one_of(smaller)} (leaves room to shard within a node)")
    if across:
        remedies.append(f"--fsdp_shard_degree {one_of(across)} (groups across nodes)")
    instead = ", in place of --fsdp_num_replicas" if num_replicas_given else ""
    return f"The model is not sharded: {why}, so {held}. If that does not fit: {', or '.join(remedies)}{instead}."


def _tensor_degrees_within(layout: ShardLayout) -> list[int]:
    """Tensor degrees that keep a tensor group within a node and leave the context degree as it is."""
    common = gcd(*layout.gpus_per_node)
    return [
        degree
        for degree in range(1, common + 1)
        if common % degree == 0 and layout.world_size % (degree * layout.context_parallel_degree) == 0
    ]


def _show(layout: ShardLayout, groups: Sequence[tuple[int, ...]], *, lettered: bool = False) -> str:
    """The first groups, node by node: "A: ranks 0-1 (node 0) + 2 (node 1), and 4 more groups"."""
    letters = {group: f"{group_name(index)}: " for index, group in enumerate(layout.shard_groups)} if lettered else {}
    shown = [letters.get(group, "") + _node_by_node(layout, group) for group in groups[:MAX_GROUPS_SHOWN]]
    more = len(groups) - MAX_GROUPS_SHOWN
    return ", ".join(shown) + (f", and {counted(more, 'more group')}" if more > 0 else "")


def _node_by_node(layout: ShardLayout, group: tuple[int, ...]) -> str:
    first, last = layout.node_of(group[0]), layout.node_of(group[-1])
    if last - first >= 4:
        return f"ranks {ranks_text(group)} (nodes {first} to {last})"
    nodes = layout.nodes
    on_node = {node: [rank for rank in group if rank in nodes[node]] for node in range(first, last + 1)}
    return "ranks " + " + ".join(f"{ranks_text(ranks)} (node {node})" for node, ranks in on_node.items() if ranks)
