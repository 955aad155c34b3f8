"""DTensor takes for an operator what it takes without `remembered_rules`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor._sharding_prop import _select_min_cost_strategy

from tests.ranks import remembered_rules
from tests.ranks.remembered_rules import Ways, _look_at_results, _work_out
from tests.unit.conftest import JoinAs

PLACEMENTS = {
    "sharded": (Shard(0), Shard(0)),
    "split": (Replicate(), Shard(1)),
    "in parts": (Partial("sum"), Partial("avg")),
    "whole": (Replicate(), Replicate()),
}


@pytest.fixture
def found(join_as: JoinAs, monkeypatch: pytest.MonkeyPatch) -> list[tuple[OpSchema, OpStrategy, OpStrategy]]:
    """Of each operator, what is found with and without."""
    join_as(0, 8)
    both: list[tuple[OpSchema, OpStrategy, OpStrategy]] = []
    remembered = utils.expand_to_full_mesh_op_strategy

    def compare(mesh: Any, op_schema: Any, ways: Any, **given: Any) -> Any:
        assert not isinstance(ways, Ways)
        strategy = remembered(mesh, op_schema, ways, **given)
        both.append((op_schema, strategy, _work_out(mesh, op_schema, ways, **given)))
        return strategy

    monkeypatch.setattr(utils, "expand_to_full_mesh_op_strategy", compare)
    return both


def laid(mesh: DeviceMesh, lies: str, dtype: torch.dtype = torch.float32) -> DTensor:
    """Ones of (8, 12)."""
    shape = [8, 12]
    for axis, placement in enumerate(PLACEMENTS[lies]):
        if isinstance(placement, Shard):
            shape[placement.dim] //= mesh.size(axis)
    return DTensor.from_local(torch.ones(shape, dtype=dtype), mesh, PLACEMENTS[lies])


@pytest.mark.parametrize("lies", PLACEMENTS)
def test_it_is_the_same(found: list[tuple[OpSchema, OpStrategy, OpStrategy]], lies: str) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    ours, other, third = laid(mesh, lies), laid(mesh, "split"), laid(mesh, "whole")
    _ = ours / other, ours @ other.T, ours + 1, ours.sqrt(), ours.sum(0), torch.stack([ours, ours])
    if lies != "in parts":  # nothing of those is changed in place
        torch._foreach_mul_([ours, ours.clone()], 2.0)
        ours.lerp_(other.redistribute(mesh, ours.placements), 0.5)
        if lies != "sharded":
            ours.addcmul_(third, third).mul_(3)
    assert len(found) > 3
    if lies == "sharded":  # the others are moved, or have one way
        assert any(len(with_it.strategies) < len(without.strategies) for _, with_it, without in found)
    for op_schema, with_it, without in found:
        is_one_of_many = op_schema.op.name().startswith("aten::_foreach")
        ours_taken, taken = (
            _select_min_cost_strategy(each, None if is_one_of_many else op_schema) for each in (with_it, without)
        )
        assert (ours_taken.output_specs, ours_taken.input_specs) == (taken.output_specs, taken.input_specs)
        assert ours_taken.redistribute_cost == taken.redistribute_cost


def test_what_cannot_be_is_refused_in_the_same_words(found: list[Any]) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(RuntimeError, match="in-place operations that require placement changes"):
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
