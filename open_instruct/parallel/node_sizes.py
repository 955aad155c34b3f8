"""How many processes each node has, read from the launcher's environment or the command line."""

from collections.abc import Mapping, Sequence

from open_instruct.core.errors import InputError

MAX_GPUS = 10_000


def node_sizes_from_environment(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """GPUs per node by torchrun: `(1,)` without a launcher, None for unequal nodes.

    Reads WORLD_SIZE and LOCAL_WORLD_SIZE, and the number of nodes from GROUP_WORLD_SIZE (set by
    torchrun) or NUM_NODES (set by some launchers), where present. One process's environment does
    not give the sizes of nodes that differ; an all-gather over ranks does.

    Raises:
        InputError: a number is missing, or is none.
    """
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "NUM_NODES")
    counts = {name: _read_count(environ, name) for name in names}
    world_size, local_size, num_groups, num_nodes = counts.values()
    if world_size in (None, 1) and local_size is None:
        return (1,)
    num_nodes = num_groups or num_nodes
    if world_size is not None and num_nodes is not None:
        local_size = local_size or world_size // num_nodes
    if world_size is None or local_size is None:
        variables = " and ".join(
            f"{name}={count}" for name, count in counts.items() if count is not None
        )
        missing = "LOCAL_WORLD_SIZE, the processes of this node,"
        if world_size is None:
            missing = "WORLD_SIZE"
        raise InputError(
            f"{variables}, and {missing} is not set; start with torchrun, which sets both",
            kind="machine",
        )
    num_nodes = num_nodes or world_size // local_size
    if num_nodes * local_size != world_size:
        return None
    return (local_size,) * num_nodes


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
            raise InputError(
                f"--gpus_per_node {error}; 8 is a node of 8 GPUs, 4x8 four of them",
                kind="bad_value",
            ) from None
        if sum(sizes) + repeat * size > MAX_GPUS:
            raise InputError(
                f"--gpus_per_node {' '.join(words)} is more than the {MAX_GPUS} GPUs that can be "
                "laid out",
                kind="out_of_range",
            )
        sizes += [size] * repeat
    return sizes


def _count(text: str, what: str) -> int:
    if not (text.isdecimal() and len(text) <= 9 and int(text) >= 1):
        raise InputError(f"{what} is not a whole number of at least 1", kind="bad_value")
    return int(text)


def _read_count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    return _count(text, f"the environment variable {name}={text!r}")
