"""Splits rows over ranks, so that none computes a long row alone.

It is the way of DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509, section 3). Each of the C
ranks of a context group has T / C neighbouring tokens of a row, and computes everything outside
attention on them alone. Around attention one all-to-all turns a part of the tokens with all heads
into all tokens with a part of the heads, and another turns them back; so they do around what the
gated delta rule remembers.

Legend: T tokens of a row, C ranks of the context group, H heads, D features of a head.
"""

import torch
import torch.distributed as dist
from olmo_core.distributed.nn import all_to_all_single


class ContextGroup:
    """The group of ranks that split rows, as seen from one of its ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.degree = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def local_slice(self, num_tokens: int) -> slice:
        """This rank's tokens of a row of `num_tokens`, a multiple of the degree."""
        num_local = num_tokens // self.degree
        assert num_local * self.degree == num_tokens, (
            f"{num_tokens} tokens over {self.degree} ranks"
        )
        return slice(self.rank * num_local, (self.rank + 1) * num_local)

    def gather_row(self, values: torch.Tensor) -> torch.Tensor:
        """Gather the values of all ranks' tokens (T, ...) from this rank's own (T / C, ...).

        Every rank then computes the same from them, so each gradient is passed to its owner
        unchanged.
        """
        row = values.new_empty(len(values) * self.degree, *values.shape[1:])
        dist.all_gather_into_tensor(row, values.detach().contiguous(), group=self.group)
        local = self.local_slice(len(row))
        return torch.cat([row[: local.start], values, row[local.stop :]])

    # PyTorch's compiler would give up a whole block with an all-to-all in it, so the all-to-alls
    # are left out.
    @torch.compiler.disable
    def scatter_heads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Turn each (T / C, H, ...) into (T, H / C, ...).

        Heads may be laid end to end, with their features.
        """
        per_rank = [tensor.unflatten(1, (self.degree, -1)).transpose(0, 1) for tensor in tensors]
        received = all_to_all_single(self.group, torch.cat(per_rank, dim=2))
        return received.flatten(0, 1).split([tensor.shape[2] for tensor in per_rank], dim=1)

    @torch.compiler.disable
    def gather_heads(self, attended: torch.Tensor) -> torch.Tensor:
        """Turn (T, H / C, D) into (T / C, H, D)."""
        received = all_to_all_single(self.group, attended.unflatten(0, (self.degree, -1)))
        return received.transpose(0, 1).flatten(1, 2)
