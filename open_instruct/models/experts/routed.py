"""A sparse MLP in the place of a block's `feed_forward`.

OLMo-core's own has kernels in Triton alone, and its blocks are of another kind. Here blocks stay ordinary ones: the
config builds another module, which any split of dim 0 of its parameters suits.

Legend: T tokens, K experts of each token, S = T * K pairs of both in the order of experts, E experts, D width of the
model, H width of an expert.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from olmo_core.nn.feed_forward import FeedForward, FeedForwardConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from open_instruct.models.experts.exchange import ExpertGroup, split_stacks

Routing = tuple[torch.Tensor, torch.Tensor]
"""Of tokens: the probabilities of all experts (T, E), float32, and the numbers of the K chosen ones (T, K)."""


@dataclass(kw_only=True)
class ExpertsConfig(FeedForwardConfig):
    """Builds a `RoutedFeedForward`; `hidden_size` is the width of one expert.

    :param normalized: whether the weights of a token's experts add up to 1.
    """

    num_experts: int
    top_k: int
    normalized: bool

    def num_params(self, d_model: int) -> int:
        return self.num_experts * (super().num_params(d_model) + d_model)

    def build(self, d_model: int, *, dtype: torch.dtype | None = None, init_device: str = "cpu") -> FeedForward:
        dtype = dtype if self.dtype is None else self.dtype.as_pt()
        return RoutedFeedForward(self, d_model=d_model, dtype=dtype, device=init_device)  # type: ignore[return-value]


class RoutedFeedForward(nn.Module):
    """Each token's MLP is the weighted sum of K experts' MLPs, those whose probability the router finds highest."""

    def __init__(self, config: ExpertsConfig, *, d_model: int, dtype: torch.dtype | None, device: str) -> None:
        super().__init__()
        self.top_k, self.normalized = config.top_k, config.normalized
        self.is_noted = False  # whether what the router decides is kept for `taken`
        self._noted: list[Routing] = []
        self.router = nn.Linear(d_model, config.num_experts, bias=False, dtype=dtype, device=device)
        self.experts = Experts(config.num_experts, d_model, config.hidden_size, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to shape (..., D)."""
        x_TD = x.flatten(0, -2)
        logits_TE = self.router(x_TD)
        probs_TE = logits_TE.softmax(dim=-1, dtype=torch.float32)
        weights_TK, experts_TK = self.route(probs_TE)
        if self.is_noted and torch.is_grad_enabled():  # a teacher without gradient may be the policy itself
            self._note(probs_TE, experts_TK)
        weights_TK = weights_TK.to(logits_TE.dtype)
        in_order_S, order_S = experts_TK.flatten().sort(stable=True)
        experts_E = torch.arange(logits_TE.shape[-1], device=x.device)
        ends_E = torch.searchsorted(in_order_S, experts_E, right=True).int()
        # Tokens are repeated before they are sorted: so every gradient is a sum in one order, the same each time.
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

    def num_flops_per_token(self, seq_len: int) -> int:
        """As OLMo-core counts them: 6 for each parameter that a token meets."""
        del seq_len
        of_experts = sum(each.numel() for each in self.experts.parameters())
        return 6 * (self.router.weight.numel() + of_experts * self.top_k // self.router.out_features)

    @torch.compiler.disable  # a compiled block would be another one for every list
    def _note(self, probs_TE: torch.Tensor, experts_TK: torch.Tensor) -> None:
        self._noted.append((probs_TE, experts_TK))

    def taken(self) -> list[Routing]:
        """What was noted since the last call, with the gradient of the probabilities."""
        noted, self._noted = self._noted, []
        return noted


class Experts(nn.Module):
    """The experts' matrices, stacked: those of gates and of what they multiply (E, H, D), and the last (E, D, H)."""

    def __init__(self, num_experts: int, d_model: int, width: int, *, dtype: torch.dtype | None, device: str) -> None:
        super().__init__()
        self.group: ExpertGroup | None = None  # of ranks that split them
        self.w1, self.w3 = (
            nn.Parameter(torch.empty(num_experts, width, d_model, dtype=dtype, device=device)) for _ in range(2)
        )
        self.w2 = nn.Parameter(torch.empty(num_experts, d_model, width, dtype=dtype, device=device))

    def forward(self, x_SD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Expert by expert: expert e has the rows from `ends_E[e - 1]` to `ends_E[e]`."""
        if self.group is None:
            return _mlps(self.w1, self.w3, self.w2, x_SD, ends_E)
        return self._at_experts(self.group, x_SD, ends_E)

    # PyTorch's compiler would give up a whole block with an all-to-all in it.
    @torch.compiler.disable
    def _at_experts(self, group: ExpertGroup, x_SD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        own = (group.own(stack) for stack in (self.w1, self.w3, self.w2))
        return group.at_experts(partial(_mlps, *own), x_SD, ends_E)

    def split(self, dp_mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        """Split the experts over the ranks of each shard group, to which tokens are then sent."""
        self.group = split_stacks(self, dp_mesh, policy)


def _mlps(
    w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor, x_SD: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    gate_SH, up_SH = (_products(x_SD, weight, ends_E) for weight in (w1, w3))
    return _products(F.silu(gate_SH) * up_SH, w2, ends_E)


# PyTorch 2.13 compiles it in bfloat16 alone.
_uncompiled_grouped_mm = torch.compiler.disable(F.grouped_mm)


def _products(x: torch.Tensor, weight: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    grouped_mm = F.grouped_mm if x.dtype == torch.bfloat16 else _uncompiled_grouped_mm
    return grouped_mm(x, weight.transpose(-2, -1), offs=ends_E)
