"""A sparse MLP in the place of a block's `feed_forward`: a router and its experts.

OLMo-core's own has kernels in Triton alone, and its blocks are of another kind. Here blocks stay
ordinary ones: the config builds another module, which any split of dim 0 of its parameters suits.

Experts may be split over ranks (expert parallelism; Lepikhin et al. 2020, GShard, arXiv:2006.16668,
section 3.2). Each of the R ranks of a shard group has E / R whole experts. Tokens travel to the
ranks of their experts, and what these make of them travels back. So no expert is gathered, and each
rank computes a part of every rank's tokens.

Legend: T tokens, K experts of each token, S = T * K pairs of both in the order of experts, N pairs
that a rank gets, E experts, R ranks that split them, D width of the model, H width of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from olmo_core.nn.feed_forward import FeedForward, FeedForwardConfig
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

Routing = tuple[torch.Tensor, torch.Tensor]
"""Of tokens: the probabilities of all experts (T, E), float32, and the numbers of the K chosen ones
(T, K).
"""


@dataclass(kw_only=True)
class ExpertsConfig(FeedForwardConfig):
    """Builds a `RoutedFeedForward`; `hidden_size` is the width of one expert.

    :param normalized: whether the weights of a token's experts add up to 1.
    """

    num_experts: int
    top_k: int
    normalized: bool

    def build(self, d_model: int, *, init_device: str = "cpu", **_: object) -> FeedForward:
        return RoutedFeedForward(self, d_model=d_model, device=init_device)  # type: ignore[return-value]


class RoutedFeedForward(nn.Module):
    """A token's MLP: the weighted sum of the K experts' that the router finds most probable."""

    def __init__(self, config: ExpertsConfig, *, d_model: int, device: str) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.normalized = config.normalized
        self.records_routing = False  # whether `take_routing` returns what the router decides
        self.records_with_gradient = True  # of passes with gradient; else of those without
        self._recorded: list[Routing] = []
        # Experts that are chosen in place of its own; -1: its own.
        self.forced_experts_TK: torch.Tensor | None = None
        # Whether there are any; compiled code does not look at them.
        self.has_forced_experts = False
        self.router = nn.Linear(d_model, config.num_experts, bias=False, device=device)
        self.experts = Experts(config.num_experts, d_model, config.hidden_size, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to shape (..., D)."""
        x_TD = x.flatten(0, -2)
        logits_TE = self.router(x_TD)
        probs_TE = logits_TE.softmax(dim=-1, dtype=torch.float32)
        allowed_TE = probs_TE
        if self.has_forced_experts:
            allowed_TE = self.mask_unforced(probs_TE)
        weights_TK, experts_TK = self.route(allowed_TE)
        # A teacher without gradient may be the policy itself.
        if self.records_routing and torch.is_grad_enabled() == self.records_with_gradient:
            self._record_routing(probs_TE, experts_TK)
        weights_TK = weights_TK.to(logits_TE.dtype)
        in_order_S, order_S = experts_TK.flatten().sort(stable=True)
        experts_E = torch.arange(logits_TE.shape[-1], device=x.device)
        ends_E = torch.searchsorted(in_order_S, experts_E, right=True).int()
        # Tokens are repeated before they are sorted: so every gradient is a sum in one order, the
        # same each time.
        x_SD = x_TD.repeat_interleave(self.top_k, dim=0).index_select(0, order_S)
        y_SD = self.experts(x_SD, ends_E)
        y_TKD = y_SD.index_select(0, order_S.argsort()).unflatten(0, weights_TK.shape)
        return torch.bmm(weights_TK.unsqueeze(1), y_TKD).view_as(x)

    def route(self, probs_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and the numbers of each token's experts, (T, K)."""
        weights_TK, experts_TK = probs_TE.topk(self.top_k, dim=-1)
        if self.normalized:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK, experts_TK

    @torch.compiler.disable
    def mask_unforced(self, probs_TE: torch.Tensor) -> torch.Tensor:
        """The probabilities, with -inf for the other experts of a token that has forced ones.

        The router's gradient comes through forced experts, as it comes through those that it
        chooses itself.
        """
        assert self.forced_experts_TK is not None
        forced_experts_TK = self.forced_experts_TK.long()
        is_forced_TE = torch.zeros_like(probs_TE, dtype=torch.bool)
        is_forced_TE.scatter_(1, forced_experts_TK.clamp(min=0), True)
        has_forced_T1 = forced_experts_TK[:, :1] >= 0
        return probs_TE.masked_fill(~is_forced_TE & has_forced_T1, -torch.inf)

    def num_flops_per_token(self, seq_len: int) -> int:
        """As OLMo-core counts them: 6 for each parameter that a token meets."""
        del seq_len
        num_values = sum(each.numel() for each in self.experts.parameters())
        active = num_values * self.top_k // self.router.out_features
        return 6 * (self.router.weight.numel() + active)

    @torch.compiler.disable  # a compiled block would be another one for every list
    def _record_routing(self, probs_TE: torch.Tensor, experts_TK: torch.Tensor) -> None:
        self._recorded.append((probs_TE, experts_TK))

    def take_routing(self) -> list[Routing]:
        """The routing recorded since the last call, with the gradient of the probabilities."""
        recorded = self._recorded
        self._recorded = []
        return recorded


class ExpertGroup:
    """The group of ranks that split experts, as seen from one of its ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.degree = mesh.size()

    def select_local(self, stack: torch.Tensor) -> torch.Tensor:
        """This rank's matrices of a stack that FSDP has gathered from the replicas.

        Their gradient is of the whole group's tokens, and FSDP averages it over the replicas alone;
        so the average over the group is taken here.
        """
        assert isinstance(stack, DTensor)
        local = stack.to_local()
        if local.requires_grad:
            local.register_hook(lambda gradient: gradient / self.degree)
        return local

    # PyTorch's compiler would give up a whole block with an all-to-all in it.
    @torch.compiler.disable
    def dispatch(
        self, stacks: Sequence[torch.Tensor], x_SD: torch.Tensor, ends_E: torch.Tensor
    ) -> torch.Tensor:
        """The experts' output for this rank's rows; expert e has `ends_E[e - 1]` to `ends_E[e]`.

        :param stacks: see `_mlps`.
        """
        local_stacks = [self.select_local(stack) for stack in stacks]
        sent_RE = ends_E.diff(prepend=ends_E.new_zeros(1)).view(self.degree, -1)
        received_RE = all_to_all_single(sent_RE, None, None, self.group)
        num_sent, num_received = torch.stack((sent_RE, received_RE)).sum(dim=-1).tolist()
        x_ND = all_to_all_single_autograd(x_SD, num_received, num_sent, self.group)
        # Rows come rank by rank, and go on expert by expert.
        experts_RE = torch.arange(sent_RE.shape[1], device=x_SD.device).expand(sent_RE.shape)
        experts_N = experts_RE.flatten().repeat_interleave(
            received_RE.flatten(), output_size=sum(num_received)
        )
        order_N = experts_N.argsort(stable=True)
        received_ends_E = received_RE.sum(dim=0).cumsum(0).int()
        y_ND = _mlps(local_stacks, x_ND.index_select(0, order_N), received_ends_E)
        y_ND = y_ND.index_select(0, order_N.argsort())
        return all_to_all_single_autograd(y_ND, num_sent, num_received, self.group)


class Experts(nn.Module):
    """The experts' matrices, stacked.

    `w1`, of gates, and `w3`, of what these multiply, have shape (E, H, D), and `w2`, the last, has
    shape (E, D, H).
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        width: int,
        *,
        device: str,
    ) -> None:
        super().__init__()
        self.group: ExpertGroup | None = None  # of ranks that split them
        self.w1 = nn.Parameter(torch.empty(num_experts, width, d_model, device=device))
        self.w3 = nn.Parameter(torch.empty(num_experts, width, d_model, device=device))
        self.w2 = nn.Parameter(torch.empty(num_experts, d_model, width, device=device))

    def forward(self, x_SD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Expert by expert: expert e has the rows from `ends_E[e - 1]` to `ends_E[e]`."""
        products = _mlps if self.group is None else self.group.dispatch
        return products((self.w1, self.w3, self.w2), x_SD, ends_E)

    def split(self, dp_mesh: DeviceMesh, **style: Any) -> None:
        """Leave each rank of a shard group its part of the stacks, to which tokens are then sent.

        FSDP shards that over the replicas alone, in this `style` (arguments of `fully_shard`).
        """
        mesh = dp_mesh["dp_shard"]
        for name, stack in list(self.named_parameters()):
            part = distribute_tensor(stack.detach(), mesh, [Shard(0)], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(part, requires_grad=stack.requires_grad))
        fully_shard(self, mesh=dp_mesh["dp_replicate"], **style)
        self.group = ExpertGroup(mesh)


def _mlps(stacks: Sequence[torch.Tensor], x_SD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """The experts' output for rows in the order of experts.

    :param stacks: those of gates, of what these multiply, and the last.
    """
    w1, w3, w2 = stacks
    gate_SH = _multiply_by_expert(x_SD, w1, ends_E)
    up_SH = _multiply_by_expert(x_SD, w3, ends_E)
    return _multiply_by_expert(F.silu(gate_SH) * up_SH, w2, ends_E)


# PyTorch 2.13 compiles it in bfloat16 alone.
_uncompiled_grouped_mm = torch.compiler.disable(F.grouped_mm)


def _multiply_by_expert(
    x: torch.Tensor, weight: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    grouped_mm = F.grouped_mm if x.dtype == torch.bfloat16 else _uncompiled_grouped_mm
    return grouped_mm(x, weight.transpose(-2, -1), offs=ends_E)
