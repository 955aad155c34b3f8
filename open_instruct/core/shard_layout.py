"""Where every rank stands: which ranks share one copy of the model, and which hold the same
shard.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """Where every rank stands: which ranks share one copy of the model, and which hold the same
    shard.

    Ranks are global and node-major. Tensor-parallel ranks are neighbours, then context-parallel
    ranks, then the ranks of one shard group; replicas are the outermost axis (the order of
    OLMo-core's world mesh).

    Example: 16 GPUs on two nodes of 8, no flags::

        >>> layout = ShardLayout(gpus_per_node=(8, 8), shard_degree=8, num_replicas=2)
        >>> layout.shard_groups
        ((0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14, 15))
        >>> layout.replica_groups[0]
        (0, 8)
        >>> layout.straddles_nodes
        False
    """

    gpus_per_node: tuple[int, ...]
    shard_degree: int
    num_replicas: int
    tensor_parallel_degree: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1
    single_device: bool = False
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        degrees = (
            self.num_replicas,
            self.shard_degree,
            self.context_parallel_degree,
            self.tensor_parallel_degree,
        )
        # OLMo-core does not check this product: some ranks would raise and the others hang.
        assert prod(degrees) == self.world_size, (
            f"degrees {degrees} do not multiply to {self.world_size} ranks"
        )

    @property
    def world_size(self) -> int:
        return sum(self.gpus_per_node)

    @property
    def data_parallel_world_size(self) -> int:
        """Ranks that read different data: replicas times shard degree."""
        return self.num_replicas * self.shard_degree

    @property
    def model_parallel_degree(self) -> int:
        """Ranks that read the same data: tensor degree times context degree."""
        return self.tensor_parallel_degree * self.context_parallel_degree

    @property
    def shard_group_size(self) -> int:
        """Ranks over which one copy of the parameters is sharded: shard degree times context
        degree.
        """
        return self.shard_degree * self.context_parallel_degree

    @property
    def shard_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that all-gather parameters and reduce-scatter gradients among themselves.

        Context-parallel ranks belong to it: they read parts of the same rows, but each has its
        own gradient to add, so FSDP shards over them too.
        """
        return self._groups(self.shard_group_size, apart=self.tensor_parallel_degree)

    @property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same shard and all-reduce its gradient."""
        return self._groups(
            self.num_replicas, apart=self.shard_group_size * self.tensor_parallel_degree
        )

    @property
    def context_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that split every row of tokens between them."""
        return self._groups(self.context_parallel_degree, apart=self.tensor_parallel_degree)

    @property
    def expert_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that split the experts of every layer between them: a shard group, or each rank by
        itself.
        """
        return self._groups(self.expert_parallel_degree, apart=1)

    @property
    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that split every matrix of a layer between them."""
        return self._groups(self.tensor_parallel_degree, apart=1)

    def _groups(self, size: int, *, apart: int) -> tuple[tuple[int, ...], ...]:
        """All ranks in groups of `size`, in each of which neighbours are `apart`."""
        return _group_ranks(self.world_size, size, apart)

    @property
    def nodes(self) -> tuple[range, ...]:
        """The global ranks of every node."""
        ends = tuple(accumulate(self.gpus_per_node))
        return tuple(
            range(end - num_gpus, end)
            for end, num_gpus in zip(ends, self.gpus_per_node, strict=True)
        )

    def find_node(self, rank: int) -> int:
        """Index of the node that global rank `rank` runs on."""
        return self.rank_nodes[rank]

    @property
    def rank_nodes(self) -> tuple[int, ...]:
        """Index of the node of every global rank."""
        return _rank_nodes(self.gpus_per_node)

    def straddling(self, groups: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """The groups among `groups` (of ascending ranks) with ranks on more than one node."""
        return _find_straddling(self.rank_nodes, tuple(groups))

    @property
    def straddles_nodes(self) -> bool:
        """Whether any shard group has ranks on more than one node."""
        return bool(self.straddling(self.shard_groups))

    def as_json(self) -> dict[str, Any]:
        """The keys scripts read: of `open-instruct layout --json` and of `layout.json` in a run."""
        groups = {"shard_groups": self.shard_groups, "replica_groups": self.replica_groups}
        return asdict(self) | groups | {"straddles_nodes": self.straddles_nodes}


# A search for a layout asks for the same few groups of a thousand ranks again and again.
@lru_cache(maxsize=256)
def _group_ranks(world_size: int, size: int, apart: int) -> tuple[tuple[int, ...], ...]:
    """All ranks in groups of `size`, in each of which neighbours are `apart`."""
    block_size = size * apart
    starts = range(0, world_size, block_size)
    return tuple(
        tuple(range(start + offset, start + block_size, apart))
        for start in starts
        for offset in range(apart)
    )


@lru_cache(maxsize=64)
def _rank_nodes(gpus_per_node: tuple[int, ...]) -> tuple[int, ...]:
    """Index of the node of every rank."""
    return tuple(node for node, num_gpus in enumerate(gpus_per_node) for _ in range(num_gpus))


@lru_cache(maxsize=256)
def _find_straddling(
    rank_nodes: tuple[int, ...], groups: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """The groups of ascending ranks whose first and last rank are on different nodes."""
    return tuple(group for group in groups if rank_nodes[group[0]] != rank_nodes[group[-1]])
