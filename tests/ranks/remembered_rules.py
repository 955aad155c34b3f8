"""What DTensor has worked out about an operator on a tensor is remembered for the next tensor that is like it.

PyTorch goes through all ways to shard each tensor of a list by itself, in Python: in a step with tensor parallelism the
gradients that are clipped take longer than everything else, though most are alike. What it finds is the same.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor._op_schema import OpStrategy
from torch.distributed.tensor._ops import utils

_work_out = utils.expand_to_full_mesh_op_strategy
_worked_out: dict[Any, tuple[Any, Any]] = {}


@functools.wraps(_work_out)
def _remember(mesh: Any, op_schema: Any, single_mesh_dim_strategies: Any, **given: Any) -> Any:
    arguments = (*op_schema.args_schema, *sorted(op_schema.kwargs_schema.items()))
    key = (
        id(mesh),  # one that is equal may have groups that are gone
        op_schema.op,
        tuple(_specs_of(argument) for argument in arguments),
        tuple(map(tuple, single_mesh_dim_strategies)),
        tuple(sorted(given.items())),
    )
    try:
        known = _worked_out.get(key)
    except TypeError:  # something in it has no hash
        return _work_out(mesh, op_schema, single_mesh_dim_strategies, **given)
    if known is None:
        known = _worked_out[key] = mesh, _work_out(mesh, op_schema, single_mesh_dim_strategies, **given)
    return known[1]


def _specs_of(argument: Any) -> Any:
    if not isinstance(argument, OpStrategy):
        return argument
    return tuple(strategy.output_specs for strategy in argument.strategies)


def remember_rules() -> None:
    utils.expand_to_full_mesh_op_strategy = _remember
