"""Every collective that a rank issues, with its bytes and its group: FSDP2's and DTensor's, forward
and backward.

torch's CommDebugMode counts calls by the same means, a dispatch mode, but no bytes.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group, _world
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

OUTPUT = -1
# Name of the operator -> (collective, which argument's bytes count). An all-gather is as large as
# what comes out of it, everything else as large as what goes in.
OPERATORS: dict[str, tuple[str, int]] = {
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", OUTPUT),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_dtensor::shard_dim_alltoall": ("all_to_all", 0),
}
SENDS_NOTHING = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


class Issued(NamedTuple):
    """One kind of call: what, its bytes, and the global ranks that take part."""

    collective: str
    num_bytes: int
    ranks: tuple[int, ...]


class RecordCollectives(TorchDispatchMode):
    """Within, counts what this rank issues, each kind by itself; an operator that it does not know
    is an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.issued: Counter[Issued] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # It goes on with what the rank holds, and that comes by here again.
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if (
            name.startswith(("c10d::", "_c10d_functional::", "_dtensor::"))
            and name not in SENDS_NOTHING
        ):
            collective, counted = OPERATORS[name]
            tensors = output if counted == OUTPUT else args[counted]
            self.issued[Issued(collective, _num_bytes(tensors), _ranks_of(args))] += 1
        return output


def calls_by_group() -> Counter[tuple[int, ...]]:
    """How many collectives every group of this process has seen, by the group's own count: global
    ranks to calls.
    """
    calls: Counter[tuple[int, ...]] = Counter()
    for group in _world.pg_map:
        calls[tuple(dist.get_process_group_ranks(group))] += group._get_sequence_number_for_group()
    return calls


def _num_bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_num_bytes(tensor) for tensor in tensors)


def _ranks_of(args: Any) -> tuple[int, ...]:
    """Of the group among the arguments: an object to c10d's own operators, a name to the functional
    ones.
    """
    for argument in reversed(args):
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
        if isinstance(argument, str):
            return tuple(dist.get_process_group_ranks(_resolve_process_group(argument)))
    raise AssertionError(f"no process group among {args}")
