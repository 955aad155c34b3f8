"""Experts split over ranks (expert parallelism; Lepikhin et al. 2020, GShard, arXiv:2006.16668, section 3.2).

Each of the R ranks of a shard group has E / R whole experts. Tokens travel to the ranks of their experts, and what
these make of them travels back. So no expert is gathered, and each rank computes a part of every rank's tokens.

Legend: R ranks of the group, E experts, S pairs of a token and an expert that this rank sends, N that it receives,
D width of the model.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

Products = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class ExpertGroup:
    """The group of ranks that split experts, as seen from one of its ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.degree = mesh.size()

    def own(self, stack: torch.Tensor) -> torch.Tensor:
        """This rank's matrices of a stack that FSDP has gathered from the replicas.

        Their gradient is of the whole group's tokens, and FSDP averages it over the replicas alone; so the average over
        the group is taken here.
        """
        assert isinstance(stack, DTensor)
        own = stack.to_local()
        if own.requires_grad:
            own.register_hook(lambda gradient: gradient / self.degree)
        return own

    def at_experts(self, products: Products, x_SD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """What all experts make of this rank's rows, expert e of those from `ends_E[e - 1]` to `ends_E[e]`.

        :param products: what this rank's own experts make of rows in their order, given the end of each one's rows.
        """
        sent_RE = ends_E.diff(prepend=ends_E.new_zeros(1)).view(self.degree, -1)
        received_RE = all_to_all_single(sent_RE, None, None, self.group)
        num_sent, num_received = torch.stack((sent_RE, received_RE)).sum(dim=-1).tolist()
        x_ND = all_to_all_single_autograd(x_SD, num_received, num_sent, self.group)
        # Rows come rank by rank, and go on expert by expert.
        experts_RE = torch.arange(sent_RE.shape[1], device=x_SD.device).expand(sent_RE.shape)
        experts_N = experts_RE.flatten().repeat_interleave(received_RE.flatten(), output_size=sum(num_received))
        order_N = experts_N.argsort(stable=True)
        y_ND = products(x_ND.index_select(0, order_N), received_RE.sum(dim=0).cumsum(0).int())
        y_ND = y_ND.index_select(0, order_N.argsort())
        return all_to_all_single_autograd(y_ND, num_sent, num_received, self.group)


def split_stacks(module: nn.Module, dp_mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> ExpertGroup:
    """Leave each rank of a shard group its part of the stacks of `module`; FSDP shards that over the replicas alone."""
    mesh = dp_mesh["dp_shard"]
    for name, stack in list(module.named_parameters()):
        own = distribute_tensor(stack.detach(), mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(own, requires_grad=stack.requires_grad))
    fully_shard(module, mesh=dp_mesh["dp_replicate"], mp_policy=policy)
    return ExpertGroup(mesh)
