"""Parts of a checkpoint beside the train module, such as a critic: each has a name of its own."""

from collections.abc import Iterable
from typing import Any, Protocol

from torch.distributed.checkpoint.metadata import Metadata


class CheckpointPart(Protocol):
    """What a checkpoint has beside the train module, under a name of its own."""

    def state_to_save(self) -> dict[str, Any]: ...

    def state_to_load(self, saved: Metadata) -> dict[str, Any] | None:
        """The state to be filled in place; None if this part does without.

        :param saved: the names of this part in the checkpoint; empty where it has none.
        """

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a state that was filled."""


def as_metadata(names: Iterable[str]) -> Metadata:
    """The names in a checkpoint, in the form that OLMo-core's train modules read them from."""
    return Metadata(state_dict_metadata=dict.fromkeys(names))  # type: ignore[arg-type]


def names_of_part(part: str, names: Iterable[str]) -> list[str]:
    start = f"{part}."
    return [name.removeprefix(start) for name in names if name.startswith(start)]
