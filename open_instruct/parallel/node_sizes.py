"""The number of processes on each node, read from the launcher's environment or from the command line."""

from collections.abc import Mapping, Sequence

from open_instruct.errors import InputError

MAX_GPUS = 10_000


class UnequalNodesError(InputError):
    """The nodes differ in size, so one process's environment does not give all sizes; an all-gather over ranks does."""


def node_sizes_from_environment(environ: Mapping[str, str]) -> tuple[int, ...]:
    """GPUs per node as torchrun tells every process, for nodes of equal size; `(1,)` when not under torchrun.

    Reads WORLD_SIZE and LOCAL_WORLD_SIZE, and the number of nodes from NUM_NODES (set by some
    launchers) or GROUP_WORLD_SIZE (set by torchrun), where present.

    Raises:
        UnequalNodesError: the numbers are possible, but only for nodes of different sizes.
        InputError: a number is missing, or they contradict each other.
    """
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NUM_NODES", "GROUP_WORLD_SIZE")
    counts = {name: _read_count(environ, name) for name in names}
    world_size, local_size, num_nodes, num_groups = counts.values()
    if world_size is None and local_size is None:
        return (1,)
    given = " and ".join(f"{name}={count}" for name, count in counts.items() if count is not None)
    if world_size is None:
        raise InputError(f"{given}, and WORLD_SIZE is not set; start with torchrun, which sets both")
    if num_nodes is not None and num_groups not in (None, num_nodes):
        raise InputError(f"{given}, but torchrun counts nodes in GROUP_WORLD_SIZE; unset NUM_NODES")
    num_nodes = num_groups or num_nodes
    if local_size is None:
        # Without a launcher there is one process.
        num_nodes = num_nodes or (1 if world_size == 1 else None)
        if num_nodes is None or world_size % num_nodes:
            raise InputError(f"{given}, and LOCAL_WORLD_SIZE, the processes of this node, is not; start with torchrun")
        local_size = world_size // num_nodes
    num_nodes = num_nodes or -(-world_size // local_size)
    if num_nodes * local_size == world_size:
        return (local_size,) * num_nodes
    # The other nodes hold at least one process each; this one cannot hold more than the rest.
    if num_nodes > 1 and local_size + num_nodes - 1 <= world_size:
        raise UnequalNodesError(f"{given}: nodes of unequal size, or a wrong variable")
    raise InputError(f"{given} contradict each other; with torchrun WORLD_SIZE counts the processes of all nodes")


def read_node_sizes(words: Sequence[str]) -> list[int]:
    """The node sizes that the words of --gpus_per_node spell: `["8", "2x4"]` gives `[8, 4, 4]`.

    Raises:
        InputError: the words are of another form, or the sum is above `MAX_GPUS`.
    """
    sizes: list[int] = []
    for word in words:
        num_nodes, times, num_gpus = word.rpartition("x")
        try:
            repeat = _count(num_nodes, repr(num_nodes)) if times else 1
            size = _count(num_gpus, repr(num_gpus))
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
