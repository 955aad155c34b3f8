"""The moving reference of a policy on DeepSpeed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer

from open_instruct.training.deepspeed.shards import Masters
from open_instruct.training.reference import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedReference(Reference):
    """A reference that moves: its weights lie beside the trained ones, and swap places to compute.

    So there is no second model: a rank holds 4 bytes more for each weight that it steps. `model` is
    the policy's own, with the weights of the policy or, within `activated`, of the reference.
    """

    masters: Masters
    weights: Mapping[str, torch.Tensor]  # this rank's range of each parameter
    # Returns once no unfinished checkpoint reads the policy's weights.
    wait_for_copy: Callable[[], None]

    @torch.no_grad()
    def follow(self, policy: Transformer, *, step: int) -> None:
        del policy
        if self.update_freq is not None and step % self.update_freq == 0:
            for name, ours in self.weights.items():
                ours.lerp_(self.masters.parts[name].weights, self.alpha)

    @contextmanager
    def activated(self) -> Iterator[None]:
        self.wait_for_copy()
        self._swap()
        yield
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, ours in self.weights.items():
            theirs = self.masters.parts[name].weights
            before = theirs.clone()
            theirs.copy_(ours)
            ours.copy_(before)
        self.masters.refresh_computing_weights()

    def list_resident_tensors(self) -> Iterator[torch.Tensor]:
        yield from self.weights.values()

    def state(self) -> dict[str, Any]:
        return dict(self.masters.list_parts(self.weights))
