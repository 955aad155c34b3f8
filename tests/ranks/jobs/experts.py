"""Experts that ranks split, beside the same experts on one rank."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from open_instruct.models.experts.routed import Experts

WIDTH, HIDDEN = 16, 8


def stacks(num_experts: int) -> Experts:
    generator = torch.Generator().manual_seed(0)
    experts = Experts(num_experts, WIDTH, HIDDEN, device="cpu")
    for stack in experts.parameters():
        stack.data.normal_(generator=generator)
    return experts


def differences(ends: list[list[int]], replicas: int) -> dict[str, float]:
    """How far this rank's output, its input's gradient and the experts' gradients are from those of
    one rank.

    :param ends: of each rank, the ends of the rows of each expert.
    """
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(ends_E[-1], WIDTH, generator=generator) for ends_E in ends]
    axes = ("dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", (replicas, num_ranks // replicas), mesh_dim_names=axes)
    whole, split = stacks(len(ends[0])), stacks(len(ends[0]))
    split.split(mesh)
    found: dict[str, list[torch.Tensor]] = {"whole": [], "split": []}
    for which, experts in (("whole", whole), ("split", split)):
        for each in range(num_ranks) if which == "whole" else (rank,):
            x_SD = rows[each].clone().requires_grad_()
            y_SD = experts(x_SD, torch.tensor(ends[each], dtype=torch.int32))
            y_SD.square().sum().backward()
            if each == rank:
                assert x_SD.grad is not None
                found[which] += [y_SD.detach(), x_SD.grad]
    for stack in split.parameters():
        assert isinstance(stack.grad, DTensor)
        found["split"].append(stack.grad.full_tensor())
    found["whole"] += [stack.grad / num_ranks for stack in whole.parameters()]  # type: ignore[operator]
    names = ("output", "input", *(name for name, _ in whole.named_parameters()))
    pairs = zip(names, found["whole"], found["split"], strict=True)
    return {name: float((a - b).norm() / a.norm()) if a.numel() else 0.0 for name, a, b in pairs}
