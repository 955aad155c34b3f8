"""The number of processes on each node, read from the launcher's environment or from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from open_instruct.errors import InputError
from open_instruct.wording import counted

MAX_GPUS = 10_000


class UnequalNodesError(InputError):
    """The nodes differ in size, so one process's environment does not give all sizes; an all-gather over ranks does."""


def node_sizes_from_environment(environ: Mapping[str, str]) -> tuple[int, ...]:
    """GPUs per node as torchrun tells every process, for nodes of equal size; `(1,)` when not under torchrun.

    Reads WORLD_SIZE and LOCAL_WORLD_SIZE, and the number of nodes from NUM_NODES (set by some
    launchers) or GROUP_WORLD_SIZE (set by torchrun), where present.

    Raises:
        UnequalNodesError: the numbers are possible, but only for nodes of different sizes.
        InputError: the numbers contradict each other.
    """
    world_size = _read_count(environ, "WORLD_SIZE")
    local_world_size = _read_count(environ, "LOCAL_WORLD_SIZE")
    if world_size is None:
        if local_world_size is not None:
            raise InputError(
                f"LOCAL_WORLD_SIZE={local_world_size} is set without WORLD_SIZE; start with torchrun, which sets both"
            )
        return (1,)
    num_nodes = _read_count(environ, "NUM_NODES")
    num_groups = _read_count(environ, "GROUP_WORLD_SIZE")
    if num_nodes is not None and num_groups is not None and num_nodes != num_groups:
        raise InputError(
            f"NUM_NODES={num_nodes}, but torchrun counts {counted(num_groups, 'node')} (GROUP_WORLD_SIZE); "
            f"unset NUM_NODES, or start torchrun with --nnodes {num_nodes}"
        )
    num_nodes = num_groups if num_nodes is None else num_nodes
    nodes_variable = "NUM_NODES" if num_groups is None else "GROUP_WORLD_SIZE"
    if local_world_size is None:
        if num_nodes is None and world_size == 1:
            return (1,)
        if num_nodes is None or world_size % num_nodes:
            raise InputError(
                f"WORLD_SIZE={world_size} is set, but LOCAL_WORLD_SIZE is not; start with torchrun, or set it to the "
                "number of processes on this node"
            )
        local_world_size = world_size // num_nodes
    if local_world_size > world_size:
        raise InputError(
            f"LOCAL_WORLD_SIZE={local_world_size} is more than WORLD_SIZE={world_size}; WORLD_SIZE counts the "
            "processes of all nodes together"
        )
    if num_nodes is None:
        if world_size % local_world_size:
            raise UnequalNodesError(
                f"WORLD_SIZE={world_size} is no multiple of LOCAL_WORLD_SIZE={local_world_size}: nodes of unequal "
                "size, or a wrong variable; with the same --nproc_per_node on every node it would be"
            )
        num_nodes = world_size // local_world_size
    if num_nodes * local_world_size != world_size:
        # The other nodes hold at least one process each; this one cannot hold more than what they leave.
        possible = num_nodes > 1 and local_world_size + num_nodes - 1 <= world_size
        raise (UnequalNodesError if possible else InputError)(
            f"WORLD_SIZE={world_size} is not {nodes_variable}={num_nodes} times LOCAL_WORLD_SIZE={local_world_size}"
            + (": nodes of unequal size, or a wrong variable" if possible else "")
            + f"; with the same --nproc_per_node on every node WORLD_SIZE would be {num_nodes * local_world_size}"
        )
    return (local_world_size,) * num_nodes


def read_node_sizes(words: Sequence[str]) -> list[int]:
    """The node sizes that the words of --gpus_per_node spell: `["8", "2x4"]` gives `[8, 4, 4]`.

    Raises:
        InputError: the words are of another form, or the sum is above `MAX_GPUS`.
    """
    sizes: list[int] = []
    for word in words:
        num_nodes, times, num_gpus = word.rpartition("x")
        try:
            repeat, size = _count(num_nodes, repr(num_nodes)) if times else 1, _count(num_gpus, repr(num_gpus))
        except InputError as error:
            raise InputError(f"--gpus_per_node {error}; 8 is a node of 8 GPUs, 4x8 four of them") from None
        if sum(sizes) + repeat * size > MAX_GPUS:
            raise InputError(f"--gpus_per_node {' '.join(words)} is more than the {MAX_GPUS} GPUs that can be laid out")
        sizes += [size] * repeat
    return sizes


def _count(text: str, what: str) -> int:
    if not (text.isdecimal() and len(text) <= 9 and int(text) >= 1):
        raise InputError(f"{what} is not a whole number of at least 1")
    return int(text)


def _read_count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return _count(text, f"the environment variable {name}={text!r}") if text else None
