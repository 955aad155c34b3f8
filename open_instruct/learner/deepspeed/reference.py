"""A reference that follows the policy keeps its weights beside the trained ones, and swaps places with them to compute.

So there is no second model: a rank holds 4 bytes more for each weight that it steps.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer

from open_instruct.learner.deepspeed.shards import Masters
from open_instruct.learner.reference import IN_CHECKPOINT, Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldReference(Reference):
    """`model` is the policy's own model, with the weights of the policy or, within `in_place`, of the reference."""

    masters: Masters
    weights: Mapping[str, torch.Tensor]  # this rank's range of each parameter
    wait_for_copy: Callable[[], None]  # returns once no unfinished checkpoint reads the policy's weights

    @torch.no_grad()
    def follow(self, policy: Transformer, *, step: int) -> None:
        del policy
        if self.update_freq is not None and step % self.update_freq == 0:
            for name, ours in self.weights.items():
                ours.lerp_(self.masters.own[name].weights, self.alpha)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self.wait_for_copy()
        self._swap()
        yield
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, ours in self.weights.items():
            theirs = self.masters.own[name].weights
            kept = theirs.clone()
            theirs.copy_(ours)
            ours.copy_(kept)
        self.masters.changed()

    def state_to_save(self, options: Any) -> dict[str, Any]:
        del options
        return {} if self.update_freq is None else {IN_CHECKPOINT: self.masters.parts(self.weights)}

    def load(self, state: dict[str, Any], options: Any) -> None:
        """Nothing is left to do: a checkpoint is read into the parts in place."""
