"""What DTensor works out about an operator is found faster: nothing is built to be dropped, and alike is remembered.

To place the tensors of an operator, PyTorch goes through all ways to shard each of them, in Python, when a process
meets them for the first time: most of what a small run does where matrices are split. It then takes the way in which
all inputs lie already, if there is one, which can be seen before the others are built; else, of ten ways it builds nine
that it then drops. And it has fake tensors go through each operator. What it takes is the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import Partial, Placement
from torch.utils._pytree import tree_map_only

Way = list[Placement | None]
"""Where the outputs and then the inputs of an operator may lie, on one axis of the mesh."""

_work_out = utils.expand_to_full_mesh_op_strategy
_worked_out: dict[Any, tuple[Any, Any]] = {}
_look_at_results = ShardingPropagator._propagate_tensor_meta_non_cached
_results: dict[Any, Any] = {}


def remember_rules() -> None:
    utils.expand_to_full_mesh_op_strategy = _remember
    utils.itertools = SimpleNamespace(product=_combinations)  # type: ignore[assignment]  # all that is used there
    ShardingPropagator._propagate_tensor_meta_non_cached = _remember_results  # type: ignore[assignment, method-assign]


@functools.wraps(_work_out)
def _remember(mesh: Any, op_schema: OpSchema, single_mesh_dim_strategies: list[Way], **given: Any) -> Any:
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
        return _find(mesh, op_schema, single_mesh_dim_strategies, given)
    if known is None:
        known = _worked_out[key] = mesh, _find(mesh, op_schema, single_mesh_dim_strategies, given)
    return known[1]


def _find(mesh: Any, op_schema: OpSchema, ways: list[Way], given: dict[str, Any]) -> OpStrategy:
    """The way in which nothing is moved; where there is none, all of them."""
    with suppress(RuntimeError):  # an operator that changes its input in place finds no way
        found = _work_out(mesh, op_schema, Ways(ways, op_schema, given, moves_nothing=True), **given)
        if found.strategies:
            return found
    return _work_out(mesh, op_schema, Ways(ways, op_schema, given), **given)


def _specs_of(argument: Any) -> Any:
    if not isinstance(argument, OpStrategy):
        return argument
    return tuple(strategy.output_specs for strategy in argument.strategies)


def _remember_results(propagator: ShardingPropagator, op_schema: OpSchema) -> Any:
    """Shapes, strides and dtypes of what an operator gives, which hang on no mesh."""
    key = op_schema.op, *map(_without_mesh, (op_schema.args_schema, *sorted(op_schema.kwargs_schema.items())))
    try:
        if key not in _results:
            _results[key] = _results_of(propagator, op_schema)
        return _results[key]
    except TypeError:  # something in it has no hash
        return _results_of(propagator, op_schema)


def _results_of(propagator: ShardingPropagator, op_schema: OpSchema) -> Any:
    """Of a CPU's tensors the meta device tells at once; PyTorch asks it through fake ones, in a new mode each time."""
    with suppress(NotImplementedError, RuntimeError):  # not everything can be told there
        given = op_schema.args_schema, op_schema.kwargs_schema
        args, kwargs = tree_map_only(DTensorSpec, _on_meta, given, is_leaf=_is_spec)
        results = op_schema.op(*args, **kwargs)
        if isinstance(results, torch.Tensor):
            return _meta_of(results)
        if isinstance(results, tuple | list) and all(isinstance(each, torch.Tensor) for each in results):
            return type(results)(map(_meta_of, results))
    return _look_at_results(propagator, op_schema)


def _is_spec(argument: Any) -> bool:
    return isinstance(argument, DTensorSpec)


def _on_meta(spec: DTensorSpec) -> torch.Tensor:
    if spec.mesh.device_type != "cpu":
        raise NotImplementedError
    assert spec.tensor_meta is not None
    shape, stride, dtype = spec.tensor_meta
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype)


def _without_mesh(argument: Any) -> Any:
    if isinstance(argument, DTensorSpec):
        return argument.tensor_meta
    if isinstance(argument, list | tuple):
        return tuple(map(_without_mesh, argument))
    return type(argument), argument  # 1 is not 1.0


class Ways(list[Way]):
    """The ways on one axis, and what `expand_to_full_mesh_op_strategy` asks of their combinations over all axes."""

    def __init__(
        self, ways: list[Way], op_schema: OpSchema, given: dict[str, Any], *, moves_nothing: bool = False
    ) -> None:
        super().__init__(ways)
        self._num_outputs = given.get("input_index", 1)
        inputs = op_schema.args_strategy + op_schema.kwargs_strategy
        assert all(len(each.strategies) == 1 for each in inputs), "each lies in one way when DTensor asks"
        self._inputs = [each.strategies[0].output_spec.placements for each in inputs]
        self._in_place = self._inputs[0] if given.get("inplace_op") else None
        self._moves_nothing = moves_nothing

    def combined(self, num_axes: int) -> Iterator[tuple[Way, ...]]:
        fits = self._is_as_it_lies if self._moves_nothing else self._stays
        of_axes = [[way for way in self if fits(way, axis)] for axis in range(num_axes)]
        if not all(of_axes) and not self._moves_nothing:
            of_axes = [self] * num_axes  # PyTorch says of which it is that none stays
        for ways in itertools.product(*of_axes):
            if not any(map(_is_mixed, zip(*ways, strict=True))):
                yield ways

    def _is_as_it_lies(self, way: Way, axis: int) -> bool:
        """Whether no input has to be moved on this axis."""
        of_inputs = [placement for placement in way[self._num_outputs :] if placement is not None]
        return of_inputs == [lies[axis] for lies in self._inputs if axis < len(lies)]

    def _stays(self, way: Way, axis: int) -> bool:
        """What an operator changes in place lies before and after where it does."""
        if self._in_place is None:
            return True
        first_input = next(placement for placement in way[self._num_outputs :] if placement is not None)
        return all(each is None or each == self._in_place[axis] for each in (first_input, way[0]))


def _is_mixed(placements: tuple[Placement | None, ...]) -> bool:
    """Whether a tensor would have to be added up in different ways; only sum and mean go together."""
    kinds = {(type(each), each.reduce_op) for each in placements if isinstance(each, Partial)}
    if len(kinds) < 2:
        return False
    return len({kind for kind, _ in kinds}) > 1 or {operation for _, operation in kinds} != {"sum", "avg"}


def _combinations(*of_axes: Any) -> Iterator[tuple[Any, ...]]:
    if of_axes and isinstance(of_axes[0], Ways):
        return of_axes[0].combined(len(of_axes))
    return itertools.product(*of_axes)
