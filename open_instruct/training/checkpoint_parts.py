"""What a checkpoint has beside the policy: a reference that moves, and a critic.

They are parts of every checkpoint, whichever backend has the policy, and no backend knows of them.
"""

from dataclasses import dataclass
from typing import Any

from olmo_core.train.train_module import TrainModule
from torch.distributed.checkpoint.metadata import Metadata

from open_instruct.checkpoints.parts import CheckpointPart
from open_instruct.training.backend import require_same_setting
from open_instruct.training.policy import Policy
from open_instruct.training.reference import Reference


@dataclass(frozen=True, slots=True)
class ReferencePart:
    """A `CheckpointPart`: the weights of a reference that moves, read in place."""

    reference: Reference

    def state_to_save(self) -> dict[str, Any]:
        return self.reference.state()

    def state_to_load(self, metadata: Metadata) -> dict[str, Any] | None:
        """The state to load; None where no reference moved yet, which then is the start model."""
        if not metadata.state_dict_metadata:
            return None
        return self.reference.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """The tensors of `state` are the reference's own."""


@dataclass(frozen=True, slots=True)
class CriticPart:
    """A `CheckpointPart`: a critic's weights and its optimizer."""

    train_module: TrainModule

    def state_to_save(self) -> dict[str, Any]:
        return self.train_module.state_dict_to_save()

    def state_to_load(self, metadata: Metadata) -> dict[str, Any]:
        """:raises InputError: the checkpoint has no critic."""
        require_same_setting("--advantages", "gae", bool(metadata.state_dict_metadata))
        return self.train_module.state_dict_to_load(metadata)

    def load_state(self, state: dict[str, Any]) -> None:
        self.train_module.load_state_dict(state)


def list_checkpoint_parts(policy: Policy, critic: Policy | None) -> dict[str, CheckpointPart]:
    """What a checkpoint has beside the policy, by the names of the parts."""
    parts: dict[str, CheckpointPart] = {}
    reference = policy.reference
    if reference is not None and reference.update_freq is not None:
        parts["reference"] = ReferencePart(reference)
    if critic is not None:
        parts["critic"] = CriticPart(critic.backend.train_module)
    return parts
