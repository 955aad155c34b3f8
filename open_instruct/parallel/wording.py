"""How ranks, groups and lists of choices are written in warnings, errors and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from open_instruct.records import ShardLayout

# What steers a terminal or turns the order of letters, and what has no form in UTF-8.
_STEERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def one_of(values: Iterable[object]) -> str:
    """Values as a choice: `[1, 2, 4]` is "1, 2 or 4"."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def counted(count: int, noun: str) -> str:
    """`counted(1, "node")` is "1 node", `counted(2000, "node")` "2,000 nodes", `counted(2, "copy")` "2 copies"."""
    if count == 1:
        return f"1 {noun}"
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}es" if noun.endswith(("ch", "ss")) else f"{noun}s"
    return f"{count:,} {many}"


def degrees_of(layout: ShardLayout) -> list[str]:
    """What splits the training state: "shard degree 8", "tensor degree 2"; those of 1 are left out."""
    degrees = {
        "shard": layout.shard_degree,
        "context": layout.context_parallel_degree,
        "tensor": layout.tensor_parallel_degree,
    }
    return [f"{name} degree {degree}" for name, degree in degrees.items() if degree > 1]


def group_name(index: int) -> str:
    """The letters of a shard group, as in a spreadsheet: A, B, … Z, AA, AB, …"""
    name = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, 26)
        name = chr(ord("A") + letter) + name
    return name


def ranks_text(ranks: Sequence[int]) -> str:
    """Ascending ranks in few characters: "0-7" when they are neighbours, else "0 8" or "0 2 ... 30"."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 1 and last - first == len(ranks) - 1:
        return f"{first}-{last}"
    if len(ranks) > 4:
        return f"{first} {ranks[1]} ... {last}"
    return " ".join(str(rank) for rank in ranks)


def nodes_text(gpus_per_node: Sequence[int], device: str = "GPU") -> str:
    """Node sizes in few words: "2 nodes of 8 GPUs" or "nodes of 2, 4 and 2 GPUs"."""
    sizes = set(gpus_per_node)
    if len(sizes) == 1:
        return f"{counted(len(gpus_per_node), 'node')} of {counted(gpus_per_node[0], device)}"
    if len(gpus_per_node) <= 4:
        return f"nodes of {', '.join(map(str, gpus_per_node[:-1]))} and {gpus_per_node[-1]} {device}s"
    return f"{len(gpus_per_node)} nodes of {min(sizes)} to {max(sizes)} {device}s"


def escaped(text: str, kept: str = "") -> str:
    """Words of a model or a file, which then steer no terminal; of those that would, `kept` stay."""
    return _STEERS.sub(lambda found: found[0] if found[0] in kept else ascii(found[0])[1:-1], text)
