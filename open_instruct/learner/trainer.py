"""OLMo-core's trainer is the record of a run: it holds the step, the random state, callbacks and checkpoints.

`fit` is never called: `learner/loop.py` drives it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from olmo_core.data.data_loader import DataLoaderBase
from olmo_core.train import Duration, LoadStrategy, Trainer, TrainerConfig
from olmo_core.train.callbacks import Callback, ConsoleLoggerCallback

from open_instruct.checkpoints.safe_checkpointer import SafeCheckpointerConfig
from open_instruct.learner.inner import SkipStepHistory
from open_instruct.learner.policy import Policy

NEVER = 10**12


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


def trainer_of(
    policy: Policy,
    place: Place,
    *,
    folder: Path,
    start_model: str,
    num_steps: int,
    max_tokens_per_step: int,
    callbacks: Mapping[str, Callback],
) -> Trainer:
    """A trainer of `num_steps` steps, over which the schedule stretches, with our checkpoints in `folder`.

    Bookkeeping is synchronous, since all ranks must stop after the same step when a signal comes.

    :param place: saved and loaded with every checkpoint.
    :param start_model: fingerprint of the start model, see `start_model_of`.
    """
    return TrainerConfig(
        save_folder=str(folder),
        save_overwrite=True,
        load_strategy=LoadStrategy.never,
        checkpointer=SafeCheckpointerConfig(start_model=start_model),
        max_duration=Duration.steps(num_steps),
        metrics_collect_interval=1,
        async_bookkeeping=False,
        # The loop decides when a checkpoint is written.
        no_checkpoints=True,
        device=str(policy.device),
        callbacks={
            **callbacks,
            "skip_step_history": SkipStepHistory(),
            # OLMo-core would add its own console where it finds none.
            "console_logger": ConsoleLoggerCallback(log_interval=NEVER, metrics_log_interval=NEVER),
        },
    ).build(
        policy.backend.train_module,
        PlaceInData(place, folder=folder, group=policy.dp_process_group, max_tokens_per_step=max_tokens_per_step),
    )
