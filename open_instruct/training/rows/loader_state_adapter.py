"""The loader that OLMo-core's `Trainer` is built with, of which it only saves and loads the state.

A `Trainer` cannot be built without a `DataLoaderBase`: it checks the ranks of one, and puts its
state into every checkpoint. Ours never iterates over it, as `training/loop.py` takes the steps in
place of `Trainer.fit`: GRPO's steps come from a fleet, and an offline run's are planned in
documents.
"""

from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from olmo_core.data.data_loader import DataLoaderBase
from torch.distributed.checkpoint.stateful import Stateful


class LoaderStateAdapter(DataLoaderBase):
    """A `DataLoaderBase` whose state is that of `place`, and which gives no batches.

    Args:
        place: the run's place in its data.
        work_dir: of the run; nothing is written there.
        dp_process_group: the ranks that see other rows.
    """

    def __init__(
        self, place: Stateful, *, work_dir: Path, dp_process_group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(
            work_dir=work_dir,
            global_batch_size=0,  # nothing asks for it: steps end the run, not tokens
            dp_world_size=dist.get_world_size(dp_process_group),
            dp_rank=dist.get_rank(dp_process_group),
        )
        self.place = place

    @property
    def total_batches(self) -> None:
        """Not known: the loop ends by the number of its steps."""

    def state_dict(self) -> dict[str, Any]:
        return self.place.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place.load_state_dict(state_dict)

    def reshuffle(self, epoch: int | None = None, **settings: Any) -> NoReturn:
        raise NotImplementedError(f"{__name__}: steps do not come from here")

    def _iter_batches(self) -> NoReturn:
        raise NotImplementedError(f"{__name__}: steps do not come from here")

    def get_mock_batch(self) -> NoReturn:
        raise NotImplementedError(f"{__name__}: steps do not come from here")
