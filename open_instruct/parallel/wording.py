"""The spelling of degrees, ranks, groups and nodes in warnings, errors and pictures."""

from collections.abc import Sequence
from string import ascii_uppercase

from open_instruct.config.sharding_sections import ParallelSection
from open_instruct.config.training import BackendRecord
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.text import spell_count

TENSOR = "--tensor_parallel_degree"
CONTEXT = "--context_parallel_degree"
SHARD = "--fsdp_shard_degree"


def list_degrees(layout: ShardLayout) -> list[str]:
    """The degrees above 1 that split the training state: "shard degree 8", "tensor degree 2"."""
    degrees = {
        "shard": layout.shard_degree,
        "context": layout.context_parallel_degree,
        "tensor": layout.tensor_parallel_degree,
    }
    return [f"{name} degree {degree}" for name, degree in degrees.items() if degree > 1]


def group_name(index: int) -> str:
    """The letters of a shard group, as in a spreadsheet: A, B, … Z, AA, AB, …"""
    before, letter = divmod(index, 26)
    if before == 0:
        return ascii_uppercase[letter]
    return group_name(before - 1) + ascii_uppercase[letter]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ascending ranks in few characters: "0-7" of neighbours, else "0 8" or "0 2 ... 30"."""
    first = ranks[0]
    last = ranks[-1]
    if len(ranks) > 1 and last - first == len(ranks) - 1:
        return f"{first}-{last}"
    if len(ranks) > 4:
        return f"{first} {ranks[1]} ... {last}"
    return " ".join(str(rank) for rank in ranks)


def nodes_text(gpus_per_node: Sequence[int], device: str = "GPU") -> str:
    """Node sizes in few words: "2 nodes of 8 GPUs" or "nodes of 2, 4 and 2 GPUs"."""
    sizes = set(gpus_per_node)
    if len(sizes) == 1:
        return (
            f"{spell_count(len(gpus_per_node), 'node')} of {spell_count(gpus_per_node[0], device)}"
        )
    if len(gpus_per_node) <= 4:
        *others, last = gpus_per_node
        return f"nodes of {', '.join(map(str, others))} and {last} {device}s"
    return f"{len(gpus_per_node)} nodes of {min(sizes)} to {max(sizes)} {device}s"


def describe_layout(
    layout: ShardLayout,
    parallel: ParallelSection,
    backend: BackendRecord,
    *,
    who: str = "process",
) -> str:
    """The layout in words, with the number of processes: `2 processes, DeepSpeed ZeRO-3`."""
    words = [spell_count(layout.world_size, who), backend.sharing(parallel, layout)]
    if layout.context_parallel_degree > 1:
        words.append(f"context degree {layout.context_parallel_degree}")
    if layout.tensor_parallel_degree > 1:
        words.append(f"tensor degree {layout.tensor_parallel_degree}")
    return ", ".join(words)
