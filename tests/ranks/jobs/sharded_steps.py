"""Steps of optimizers on weights in shards, of some of which there are none on some ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from open_instruct.models.shards import find_local_box, local_part
from open_instruct.training.optim.muon import MOMENTUM, MuonWithAdamW
from open_instruct.training.optim.sharded_adamw import ShardedAdamW

NUM_STEPS = 3
NUM_COLUMNS = 8
NUM_ALIKE = 4
TALL = (16, 4)  # larger, so that Muon takes it first
SETTINGS = {"lr": 0.1, "weight_decay": 0.1}


def muons(sharded: list[Any], others: list[Any]) -> tuple[torch.optim.Optimizer, ...]:
    return (
        MuonWithAdamW([{"params": sharded, "use_muon": True}], **SETTINGS),
        torch.optim.Muon(others, **SETTINGS, adjust_lr_fn="match_rms_adamw"),
    )


def adamws(sharded: list[Any], others: list[Any]) -> tuple[torch.optim.Optimizer, ...]:
    return (
        ShardedAdamW(sharded, **SETTINGS, fused=True),
        torch.optim.AdamW(others, **SETTINGS, fused=True),
    )


MAKE = {"muon": muons, "adamw": adamws}
MOMENTS = {"muon": [MOMENTUM], "adamw": ["exp_avg", "exp_avg_sq"]}


def take_steps(
    kind: str, num_rows: int, replicas: int, shards: int, tensor: int
) -> tuple[list[int], bool, bool]:
    """Rows that this rank holds of each matrix; whether weights and moments are torch's to the bit.

    torch's Muon has whole matrices, its AdamW the same shards, since its kernel rounds the last
    values of a tensor otherwise.

    Every other matrix is split by columns, where tensor parallelism splits them.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape in [(num_rows, NUM_COLUMNS)] * NUM_ALIKE + [TALL]]
    mesh = init_device_mesh(
        "cpu", (replicas, shards, tensor), mesh_dim_names=("replica", "shard", "tensor")
    )
    sharded = shard(starts, mesh)
    others = (
        shard(starts, mesh)
        if kind == "adamw"
        else [nn.Parameter(start.clone()) for start in starts]
    )
    ours, of_torch = MAKE[kind](sharded, others)
    for step in range(NUM_STEPS):
        torch.manual_seed(1 + step)
        for matrix, other in zip(sharded, others, strict=True):
            gradient = torch.randn(matrix.shape)
            for each in (matrix, other):
                each.grad = torch.zeros_like(each)
                local_part(each.grad).copy_(gradient[find_local_box(each)])
        if step == 1:  # one of which nothing was learned
            others[2].grad = sharded[2].grad = None
        of_torch.step()
        ours.step()
    same_weights = same_moments = True
    for matrix, other in zip(sharded, others, strict=True):
        same_weights &= torch.equal(matrix.to_local(), part_of(other, matrix))
        for name in MOMENTS[kind]:
            moment = ours.state[matrix][name]
            assert isinstance(moment, DTensor)
            assert moment.placements == matrix.placements  # as checkpoints save it
            theirs = part_of(of_torch.state[other][name], matrix)
            same_moments &= torch.equal(moment.to_local(), theirs)
    return [len(matrix.to_local()) for matrix in sharded], same_weights, same_moments


def part_of(tensor: torch.Tensor, matrix: DTensor) -> torch.Tensor:
    """What this rank holds of a tensor, or would if it were sharded as `matrix` is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor[find_local_box(matrix)]


def shard(starts: list[torch.Tensor], mesh: DeviceMesh) -> list[Any]:
    model = nn.Sequential(*[nn.Linear(*start.T.shape, bias=False) for start in starts])
    if mesh["tensor"].size() > 1:
        plan = {
            str(index): RowwiseParallel() if index % 2 else ColwiseParallel()
            for index in range(len(starts))
        }
        parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["replica", "shard"])
    sharded: list[Any] = list(model.parameters())
    for matrix, start in zip(sharded, starts, strict=True):
        matrix.to_local().data.copy_(start[find_local_box(matrix)])
    return sharded


def take_each(kind: str, cases: list[list[int]]) -> list[tuple[list[int], bool, bool]]:
    return [take_steps(kind, *case) for case in cases]
