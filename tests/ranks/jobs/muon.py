"""Muon's steps with matrices in shards, of some of which there are none on some ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from open_instruct.models.shards import find_local_box
from open_instruct.training.optim.muon import MOMENTUM, MuonWithAdamW

NUM_STEPS = 3
NUM_COLUMNS = 8
NUM_ALIKE = 4
TALL = (16, 4)  # larger, so that it is taken first


def take_steps(
    num_rows: int, replicas: int, shards: int, tensor: int
) -> tuple[list[int], bool, bool]:
    """Rows that this rank holds of each matrix; whether weights, and momenta, are the bits of torch
    on whole ones.

    Every other matrix is split by columns, where tensor parallelism splits them.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape in [(num_rows, NUM_COLUMNS)] * NUM_ALIKE + [TALL]]
    alone = [nn.Parameter(start.clone()) for start in starts]
    model = nn.Sequential(*[nn.Linear(*start.T.shape, bias=False) for start in starts])
    mesh = init_device_mesh(
        "cpu", (replicas, shards, tensor), mesh_dim_names=("replica", "shard", "tensor")
    )
    if tensor > 1:
        plan = {
            str(index): RowwiseParallel() if index % 2 else ColwiseParallel()
            for index in range(len(starts))
        }
        parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["replica", "shard"])
    sharded: list[Any] = list(model.parameters())
    for matrix, start in zip(sharded, starts, strict=True):
        matrix.to_local().data.copy_(start[find_local_box(matrix)])
    settings = {"lr": 0.1, "weight_decay": 0.1}
    of_torch = torch.optim.Muon(alone, **settings, adjust_lr_fn="match_rms_adamw")
    ours = MuonWithAdamW([{"params": sharded, "use_muon": True}], **settings)
    for step in range(NUM_STEPS):
        torch.manual_seed(1 + step)
        for matrix, whole in zip(sharded, alone, strict=True):
            whole.grad, matrix.grad = torch.randn_like(whole), torch.zeros_like(matrix)
            matrix.grad.to_local().copy_(whole.grad[find_local_box(matrix)])
        if step == 1:  # one of which nothing was learned
            alone[2].grad = sharded[2].grad = None
        of_torch.step()
        ours.step()
    same_weights = same_momenta = True
    for matrix, whole in zip(sharded, alone, strict=True):
        momentum = ours.state[matrix][MOMENTUM]
        assert isinstance(momentum, DTensor)
        assert momentum.placements == matrix.placements  # as checkpoints save it
        box = find_local_box(matrix)
        same_weights &= torch.equal(matrix.to_local(), whole[box])
        same_momenta &= torch.equal(momentum.to_local(), of_torch.state[whole][MOMENTUM][box])
    return [len(matrix.to_local()) for matrix in sharded], same_weights, same_momenta


def each(cases: list[list[int]]) -> list[tuple[list[int], bool, bool]]:
    return [take_steps(*case) for case in cases]
