"""The calls of one collective in a step, among the groups of one axis of the layout."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from open_instruct.core.shard_layout import ShardLayout

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
Axis = Literal["shard", "replica", "tensor", "context", "expert", "sync", "world", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of one collective with the same bytes. It is no `Exchange` before it has an axis.

    `num_bytes` are those of one call, as `Exchange.bytes_per_call` counts them.

    Example: `Calls(what="norm of the gradient", collective="all_reduce", num_bytes=1_408,
    num_calls=1)`.
    """

    what: str
    collective: Collective
    num_bytes: int
    num_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Calls of one collective with the same bytes, as the first rank issues them in a step.

    Where sizes do not divide, that rank has the most.

    `bytes_per_call` is, of an all-gather, what comes out of it; of every other collective, what
    goes in: so of a reduce-scatter the whole gradient, of an all-reduce its tensor. `wire_bytes` is
    what all calls together send from each rank in a ring (of a broadcast, whose parts have many
    senders: what each receiver takes). A group of one rank issues its calls and sends nothing.

    Example: the gradients of 32 blocks of 809 MB in float32, in groups of 8::

        Exchange(what="gradients of a block, after it", collective="reduce_scatter", axis="shard",
                 num_calls=32,
                 bytes_per_call=809_533_440, group_size=8, wire_bytes=22_666_936_320,
                 crosses_nodes=False)
    """

    what: str
    collective: Collective
    axis: Axis
    num_calls: int
    bytes_per_call: int
    group_size: int
    wire_bytes: int
    crosses_nodes: bool
    # Of a group that crosses nodes: of its ranks, on the node where it has fewest.
    ranks_on_a_node: int = 1

    @property
    def num_bytes(self) -> int:
        """The bytes of all calls together."""
        return self.num_calls * self.bytes_per_call

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends, over all calls."""
        if self.collective == "broadcast":
            return self.num_bytes
        return self.wire_bytes

    @property
    def reach(self) -> str:
        """Among how many GPUs, and whether they leave the node."""
        if self.crosses_nodes:
            return f"{self.group_size} across nodes"
        return f"{self.group_size} in a node"


def ring_bytes(collective: Collective, num_bytes: int, group_size: int) -> int:
    """Bytes that each rank sends at least in a collective of `num_bytes`, in a ring.

    A ring passes every part but one on from each rank; an all-reduce does so twice, to add up and
    to hand out (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations").
    """
    num_rounds = 2 if collective == "all_reduce" else 1
    return num_rounds * num_bytes * (group_size - 1) // group_size


def build_exchange(
    layout: ShardLayout,
    axis: Axis,
    calls: Calls,
    *,
    within: int = 0,
) -> Exchange:
    """Calls in the groups of one axis of the layout.

    Args:
        within: so many neighbours of each group exchange instead; 0: all of it.
    """
    group_size, crosses_nodes, ranks_on_a_node = group_span(layout, axis, within)
    sent_bytes = ring_bytes(calls.collective, calls.num_bytes, group_size)
    return Exchange(
        what=calls.what,
        collective=calls.collective,
        axis=axis,
        num_calls=calls.num_calls,
        bytes_per_call=calls.num_bytes,
        group_size=group_size,
        wire_bytes=calls.num_calls * sent_bytes,
        crosses_nodes=crosses_nodes,
        ranks_on_a_node=ranks_on_a_node,
    )


@lru_cache(maxsize=1024)
def group_span(layout: ShardLayout, axis: Axis, within: int = 0) -> tuple[int, bool, int]:
    """Size of an axis's groups, whether any crosses nodes, and its fewest ranks on a node."""
    groups = axis_groups(layout, axis)
    if within:
        groups = _split_groups(groups, within)
    straddling = layout.straddling(groups)
    rank_nodes = layout.rank_nodes
    counts: list[int] = []
    for group in straddling:
        ranks_by_node = Counter(rank_nodes[rank] for rank in group)
        counts += ranks_by_node.values()
    return len(groups[0]), bool(straddling), min(counts, default=1)


def _split_groups(groups: Sequence[tuple[int, ...]], num_members: int) -> Sequence[tuple[int, ...]]:
    """The groups, each split into groups of `num_members` neighbours."""
    parts = []
    for group in groups:
        for first in range(0, len(group), num_members):
            parts.append(group[first : first + num_members])
    return parts


def axis_groups(layout: ShardLayout, axis: Axis) -> Sequence[tuple[int, ...]]:
    """The global ranks of every group of an axis."""
    # Those that have the same part of a matrix that ranks split.
    strides = {"world": layout.tensor_parallel_degree, "all": 1}
    stride = strides.get(axis)
    if stride is not None:
        return [tuple(range(first, layout.world_size, stride)) for first in range(stride)]
    groups: Sequence[tuple[int, ...]] = getattr(layout, f"{axis}_groups")
    return groups
