"""The frozen policy that a KL penalty measures against: sharded as the policy is, never a full copy."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from open_instruct.models.shards import local_part, reshard

# The key of a moving reference policy in a checkpoint.
IN_CHECKPOINT = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference policy, sharded as the policy is. `update_freq` is None for one that is never updated.

    A reference that is never updated is the start model, and is built from its files again after a restart. A reference
    that moves is saved in the checkpoints, beside the policy and the optimizer.
    """

    model: Transformer
    update_freq: int | None = None
    alpha: float = 1.0

    def in_place(self) -> AbstractContextManager[None]:
        """Within, `model` computes with the reference's weights. Collective; take no step."""
        return nullcontext()

    @torch.no_grad()
    def follow(self, policy: Transformer, *, step: int) -> None:
        """Move towards the policy, if it is time to: reference <- alpha * policy + (1 - alpha) * reference.

        Every rank averages its own shards. Both models are resharded first: FSDP leaves the root's parameters gathered
        after a forward pass, and an average of the gathered copies would not reach the shards.
        """
        if self.update_freq is None or step % self.update_freq:
            return
        reshard(self.model)
        reshard(policy)
        for ours, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            local_part(ours).lerp_(local_part(theirs).to(ours.dtype), self.alpha)

    def state_to_save(self, options: StateDictOptions) -> dict[str, Any]:
        if self.update_freq is None:
            return {}
        return {IN_CHECKPOINT: get_model_state_dict(self.model, options=options)}

    def state_to_load(self, metadata: Metadata, options: StateDictOptions) -> dict[str, Any]:
        is_there = any(name.startswith(f"{IN_CHECKPOINT}.") for name in metadata.state_dict_metadata)
        return self.state_to_save(options) if is_there else {}

    def load(self, state: dict[str, Any], options: StateDictOptions) -> None:
        if self.update_freq is not None and IN_CHECKPOINT in state:
            set_model_state_dict(self.model, state[IN_CHECKPOINT], options=options)
