"""Warnings about costly layouts: groups that straddle nodes, and whole copies on each rank.

Each names the groups, and ends with flags that would avoid it, or says that none can.
"""

from collections.abc import Iterator, Sequence
from math import gcd

from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.text import join_choices, spell_count
from open_instruct.parallel.wording import (
    CONTEXT,
    SHARD,
    TENSOR,
    group_name,
    nodes_text,
    ranks_text,
)

MAX_GROUPS_SHOWN = 3


def find_warnings(
    layout: ShardLayout, *, fsdp_shard_degree: int | None, fsdp_num_replicas: int | None
) -> Iterator[str]:
    """All warnings about `layout`, given the flags that the user set."""
    instead = "" if fsdp_num_replicas is None else " in place of --fsdp_num_replicas"
    yield from _across_nodes(layout, instead)
    # No warning if the user asked for a shard degree of 1.
    if fsdp_shard_degree != 1 and layout.shard_group_size == 1 < layout.num_replicas:
        yield _not_sharded(layout, instead)


def _across_nodes(layout: ShardLayout, instead: str) -> Iterator[str]:
    """A warning for each kind of group that straddles nodes."""
    # At shard degree 1 a shard group is a context group, which has its own warning.
    shard_groups = layout.shard_groups if layout.shard_degree > 1 else ()
    kinds = (
        (TENSOR, "Tensor", layout.tensor_groups, "layer would exchange its activations"),
        (CONTEXT, "Context", layout.context_groups, "attention layer would exchange its tokens"),
        (
            SHARD,
            "Shard",
            shard_groups,
            "forward and backward pass would gather parameters and scatter gradients",
        ),
    )
    for flag, kind, groups, traffic in kinds:
        straddling = layout.straddling(groups)
        if not straddling:
            continue
        ways = _ways_within_nodes(layout, flag, instead) or ["no change of one degree"]
        yield (
            f"{kind} groups straddle nodes: {_describe_groups(layout, straddling)}. Every "
            f"{traffic} over the network between nodes. The groups would stay within a node with "
            f"{ways[0]}."
        )


def _not_sharded(layout: ShardLayout, instead: str) -> str:
    num_copies = layout.num_replicas
    tensor = layout.tensor_parallel_degree
    ways = _ways_within_nodes(layout, SHARD, instead)[:1]
    across = [
        degree
        for degree in range(2, num_copies + 1)
        if num_copies % degree == 0 and gcd(*layout.gpus_per_node) % (degree * tensor)
    ]
    if across:
        ways.append(f"{SHARD} {join_choices(across)} (groups across nodes){instead}")
    return (
        f"The model is not sharded: {nodes_text(layout.gpus_per_node)} hold {num_copies} copies "
        f"of the training state, each on {spell_count(tensor, 'GPU')}. If that does not fit: "
        f"{', or '.join(ways)}."
    )


def _ways_within_nodes(layout: ShardLayout, flag: str, instead: str) -> list[str]:
    """Flags with the degrees that keep the groups of `flag` within a node; its own comes first.

    Groups tile the ranks from 0 on, so they stay within nodes exactly when their size divides every
    node.
    """
    tensor = layout.tensor_parallel_degree
    context = layout.context_parallel_degree
    common = gcd(*layout.gpus_per_node)

    def fitting(beside: int, *, times: int = 1) -> list[int]:
        """Degrees whose product with `beside` fits in a node, at least `times` times."""
        blocks = {degree: degree * beside for degree in range(1, common + 1)}
        return [
            degree
            for degree, block in blocks.items()
            if common % block == 0 and common >= times * block
        ]

    beside_context = [
        degree for degree in fitting(1) if layout.world_size % (degree * context) == 0
    ]
    room = " (leaves room to shard within a node)"
    ways = {
        TENSOR: [(TENSOR, beside_context, "")],
        CONTEXT: [(CONTEXT, fitting(tensor), ""), (TENSOR, fitting(context), "")],
        SHARD: [
            (SHARD, fitting(tensor * context)[1:], instead),
            (TENSOR, fitting(context, times=2), room),
            (CONTEXT, fitting(tensor, times=2), room),
        ],
    }
    texts = []
    for changed_flag, degrees, note in ways[flag]:
        if degrees:
            texts.append(f"{changed_flag} {join_choices(degrees)}{note}")
    return texts


def _describe_groups(layout: ShardLayout, groups: Sequence[tuple[int, ...]]) -> str:
    """The first groups with their nodes: "A: ranks 0-2 (nodes 0 to 1), and 4 more groups"."""
    letters = {group: f"{group_name(index)}: " for index, group in enumerate(layout.shard_groups)}
    texts = []
    for group in groups[:MAX_GROUPS_SHOWN]:
        first_node = layout.find_node(group[0])
        last_node = layout.find_node(group[-1])
        letter = letters.get(group, "")
        texts.append(f"{letter}ranks {ranks_text(group)} (nodes {first_node} to {last_node})")
    num_more = len(groups) - MAX_GROUPS_SHOWN
    if num_more > 0:
        texts.append(f"and {spell_count(num_more, 'more group')}")
    return ", ".join(texts)
