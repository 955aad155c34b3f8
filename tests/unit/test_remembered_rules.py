"""DTensor takes for an operator what it takes without `remembered_rules`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from tests.ranks import remembered_rules
from tests.ranks.remembered_rules import _find, _look_at_results, _work_out
from tests.unit.conftest import JoinAs

PLACEMENTS = {
    "sharded": (Shard(0), Shard(0)),
    "split": (Replicate(), Shard(1)),
    "in parts": (Partial("sum"), Partial("avg")),
    "whole": (Replicate(), Replicate()),
}

Placed = list[tuple[str, OutputSharding, OutputSharding]]


@pytest.fixture
def placed(join_as: JoinAs, monkeypatch: pytest.MonkeyPatch) -> Placed:
    """Of each operator, where its tensors are to lie with and without."""
    join_as(0, 8)
    both: Placed = []
    place = ShardingPropagator.propagate_op_sharding_non_cached

    def compare(propagator: ShardingPropagator, op_schema: OpSchema) -> OutputSharding:
        with_it = place(propagator, op_schema)
        with patch.object(utils, "expand_to_full_mesh_op_strategy", _work_out):
            both.append((op_schema.op.name(), with_it, place(propagator, op_schema)))
        return with_it

    monkeypatch.setattr(ShardingPropagator, "propagate_op_sharding_non_cached", compare)
    return both


def laid(mesh: DeviceMesh, lies: str, dtype: torch.dtype = torch.float32) -> DTensor:
    """Ones of (8, 12)."""
    shape = [8, 12]
    for axis, placement in enumerate(PLACEMENTS[lies]):
        if isinstance(placement, Shard):
            shape[placement.dim] //= mesh.size(axis)
    return DTensor.from_local(torch.ones(shape, dtype=dtype), mesh, PLACEMENTS[lies])


@pytest.mark.parametrize("lies", PLACEMENTS)
def test_it_is_the_same(placed: Placed, lies: str) -> None:
    # A mesh that no other test has: of what PyTorch remembers itself, it would not ask.
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("placed", lies))
    ours, other, third = laid(mesh, lies), laid(mesh, "split"), laid(mesh, "whole")
    _ = ours / other, ours @ other.T, ours + 1, ours.sqrt(), ours.sum(0), torch.stack([ours, ours])
    torch._foreach_norm([ours, other])
    if lies != "in parts":  # nothing of those is changed in place
        torch._foreach_mul_([ours, ours.clone()], 2.0)
        ours.lerp_(other.redistribute(mesh, ours.placements), 0.5)
        if lies != "sharded":
            ours.addcmul_(third, third).mul_(3)
    assert len(placed) > 6
    assert any(with_it.needs_redistribute for _, with_it, _ in placed)
    assert not all(with_it.needs_redistribute for _, with_it, _ in placed)
    for name, with_it, without in placed:
        assert with_it.output_spec == without.output_spec, name
        assert with_it.needs_redistribute == without.needs_redistribute, name
        moved, theirs = with_it.redistribute_schema, without.redistribute_schema
        assert (moved and moved.args_schema) == (theirs and theirs.args_schema), name


def test_of_ways_that_move_nothing_others_are_not_built(join_as: JoinAs) -> None:
    join_as(0, 8)
    found: list[tuple[int, int]] = []

    def count(mesh: Any, op_schema: Any, ways: Any, **given: Any) -> Any:
        strategy = _find(mesh, op_schema, ways, given)
        found.append((len(strategy.strategies), len(_work_out(mesh, op_schema, ways, **given).strategies)))
        return strategy

    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("few", "ways"))
    ours = laid(mesh, "sharded")
    with patch.object(utils, "expand_to_full_mesh_op_strategy", count):
        _ = ours * ours
    ((ours_built, all_built),) = found
    assert ours_built == 1 < all_built


@pytest.mark.parametrize("is_remembered", [True, False])
def test_what_cannot_be_is_refused_in_the_same_words(join_as: JoinAs, is_remembered: bool) -> None:
    join_as(0, 8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    found_by = utils.expand_to_full_mesh_op_strategy if is_remembered else _work_out
    with (
        patch.object(utils, "expand_to_full_mesh_op_strategy", found_by),
        pytest.raises(RuntimeError, match="in-place operations that require placement changes"),
    ):
        laid(mesh, "in parts").sqrt_()


def test_one_is_not_one_point_zero(join_as: JoinAs) -> None:
    join_as(0, 8)
    integers = laid(init_device_mesh("cpu", (4, 2)), "whole", torch.long)
    assert [(integers * number).dtype for number in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]


def test_results_are_those_of_fake_tensors(join_as: JoinAs, monkeypatch: pytest.MonkeyPatch) -> None:
    join_as(0, 8)
    both: dict[str, tuple[Any, Any]] = {}
    results_of = remembered_rules._results_of

    def compare(propagator: Any, op_schema: Any) -> Any:
        results = results_of(propagator, op_schema)
        both[op_schema.op.name()] = results, _look_at_results(propagator, op_schema)
        return results

    monkeypatch.setattr(remembered_rules, "_results_of", compare)
    monkeypatch.setattr(remembered_rules, "_results", {})
    # A mesh that no other test has: of what PyTorch remembers itself, it would not ask.
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("of", "results"))
    ours, other = laid(mesh, "whole"), laid(mesh, "split")
    _ = ours.T @ other, ours.sum(0), ours.permute(1, 0).clone(), ours.to(torch.bfloat16), torch.zeros_like(other.T)
    _ = ours.max(1), ours.split([5, 3]), torch.stack([ours, other]), torch.equal(ours, ours)
    torch._foreach_norm([ours, other.T])
    ours.lerp_(ours.clone(), 0.5)
    assert len(both) > 10
    for name, (with_it, without) in both.items():
        assert with_it == without and type(with_it) is type(without), name
