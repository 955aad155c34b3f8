"""Muon's steps with a matrix of which some ranks hold nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from open_instruct.learner.olmo_core.muon import MOMENTUM, MuonWithAdamW

NUM_STEPS = 3
NUM_COLUMNS = 8


def largest_difference(num_rows: int, mesh_shape: list[int]) -> tuple[int, float, float]:
    """Rows that this rank holds; how far weights, and momenta, are from those of one process after some steps."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    alone = nn.Linear(NUM_COLUMNS, num_rows, bias=False)
    sharded = nn.Linear(NUM_COLUMNS, num_rows, bias=False)
    sharded.load_state_dict(alone.state_dict())
    names = ("replicas", "shards")[-len(mesh_shape) :]
    fully_shard(sharded, mesh=init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names))
    optimizers = []
    for model in (alone, sharded):
        groups = [{"params": list(model.parameters()), "use_muon": True}]
        optimizer = MuonWithAdamW(groups, lr=0.1, weight_decay=0.1)
        optimizers.append(optimizer)
        for step in range(NUM_STEPS):
            torch.manual_seed(step)
            model(torch.randn(4, NUM_COLUMNS)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    wanted, found = (optimizer.state[optimizer.param_groups[0]["params"][0]][MOMENTUM] for optimizer in optimizers)
    weight: Any = sharded.weight
    assert isinstance(found, DTensor)
    assert found.placements == weight.placements  # as checkpoints save it
    differences = [
        float((whole.full_tensor() - own).detach().abs().max())
        for whole, own in ((weight, alone.weight), (found, wanted))
    ]
    return len(weight.to_local()), differences[0], differences[1]


def each(cases: list[list[Any]]) -> list[tuple[int, float, float]]:
    return [largest_difference(*case) for case in cases]
