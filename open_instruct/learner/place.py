"""A run's place in its data, as OLMo-core's trainer holds and saves it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from olmo_core.data.data_loader import DataLoaderBase


class Place(Protocol):
    """A run's place in its data, saved in every checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class PlaceInData(DataLoaderBase):
    """The loader that OLMo-core's trainer holds. It has no batches: those come from the loop's caller."""

    def __init__(
        self, place: Place, *, folder: Path, group: dist.ProcessGroup | None, max_tokens_per_step: int
    ) -> None:
        super().__init__(
            work_dir=folder,
            global_batch_size=max_tokens_per_step,
            dp_world_size=dist.get_world_size(group),
            dp_rank=dist.get_rank(group),
        )
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return self.place.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place.load_state_dict(state_dict)

    @property
    def total_batches(self) -> int | None:
        return None

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int | None:
        return None

    def reshuffle(self, epoch: int | None = None, **kwargs: Any) -> None:
        raise NotImplementedError

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def get_mock_batch(self) -> dict[str, Any]:
        raise NotImplementedError
