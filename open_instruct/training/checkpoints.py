"""Checkpoints that a crash cannot harm: written beside, renamed into place, the last N kept."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from olmo_core.distributed.utils import barrier, broadcast_object, get_rank
from olmo_core.optim import SkipStepOptimizer
from olmo_core.train import Trainer
from olmo_core.train.callbacks import Callback, CheckpointerCallback
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.train_module import TransformerTrainModule
from torch.distributed.checkpoint.api import CheckpointException

from open_instruct.errors import InputError, RunError
from open_instruct.training.finite import check_weights

log = logging.getLogger(__name__)


@dataclass
class RunCheckpointer(CheckpointerCallback):
    """OLMo-core's checkpointer, which also counts the checkpoints of earlier runs in the same folder."""

    def pre_train(self) -> None:
        super().pre_train()
        if self.step > 0:
            # What was just loaded is on disk already: a run that has nothing left to do must not
            # clear it to write it again.
            self._latest_checkpoint_step = self.step
        self._checkpoints = broadcast_object(find_checkpoints(Path(self.save_folder)))

    def post_train(self) -> None:
        super().post_train()
        self._remove_old_checkpoints()

    def _save_checkpoint(self, save_async: bool | None = None, ephemeral: bool = False) -> str:
        with explained(self.trainer):
            return super()._save_checkpoint(save_async=save_async, ephemeral=ephemeral)


@contextmanager
def explained(trainer: Trainer) -> Iterator[None]:
    """Turn what goes wrong while a checkpoint is written into one sentence. Weights that are broken are not written."""
    assert isinstance(trainer.train_module, TransformerTrainModule)
    check_weights(
        trainer.train_module.model,
        what=f"the checkpoint of step {trainer.global_step}",
        last_checkpoint=last_checkpoint(Path(trainer.save_folder)),
    )
    try:
        yield
    except (OSError, CheckpointException) as error:
        log.exception("the checkpoint cannot be written")
        raise RunError(
            f"the checkpoint of step {trainer.global_step} cannot be written to {trainer.save_folder} "
            f"({_cause(error)}). Those written before are unharmed: make room, then give the same command again to go "
            "on from the newest"
        ) from error


def save_checkpoint(trainer: Trainer) -> None:
    """Write a checkpoint of the trainer's step now. Collective.

    :raises RunError: if it cannot be written.
    """
    with explained(trainer):
        trainer.save_checkpoint()


def remove_old_checkpoints(folder: Path, *, keep_last_n: int) -> None:
    """Remove all but the newest `keep_last_n` checkpoints. Collective: rank 0 removes, once all are past the newest."""
    barrier()
    if get_rank() == 0:
        for path in find_checkpoints(folder)[:-keep_last_n]:
            shutil.rmtree(path, ignore_errors=True)


def _cause(error: BaseException) -> str:
    """One line. What torch raises for a failed checkpoint holds the traceback of every rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return " ".join(f"{type(error).__name__}: {error}".split())


def find_checkpoints(folder: Path) -> list[str]:
    """Paths of the complete checkpoints in `folder`, oldest step first."""
    if not folder.is_dir():
        return []
    return [path for _, path in sorted(Checkpointer.find_checkpoints(folder))]


def latest_step(folder: Path) -> int | None:
    """Step of the newest complete checkpoint, or None."""
    paths = find_checkpoints(folder)
    return int(Path(paths[-1]).name.removeprefix("step")) if paths else None


def last_checkpoint(folder: Path) -> str:
    """What an error of a run can say of its newest checkpoint."""
    step = latest_step(folder)
    if step is None:
        return "This run has no checkpoint"
    return f"The newest checkpoint, {folder / f'step{step}'}, is from before that, and all of its weights are finite"


@dataclass
class SkipStepHistory(Callback):
    """Carries a skip-step optimizer's rolling window over a restart; OLMo-core leaves it out of its state."""

    def _optimizer(self) -> SkipStepOptimizer | None:
        optimizer = getattr(self.trainer.train_module, "optim", None)
        return optimizer if isinstance(optimizer, SkipStepOptimizer) else None

    def state_dict(self) -> dict[str, Any]:
        optimizer = self._optimizer()
        if optimizer is None:
            return {}
        return {
            "losses": [float(loss) for loss in optimizer._losses],
            "grad_norms": [float(norm) for norm in optimizer._grad_norms],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        optimizer = self._optimizer()
        if optimizer is None or not state_dict:
            return
        optimizer._losses = [torch.tensor(loss, device=optimizer.device) for loss in state_dict["losses"]]
        optimizer._grad_norms = [torch.tensor(norm, device=optimizer.device) for norm in state_dict["grad_norms"]]


def load_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Put the trainer where the checkpoint in `folder` was written. Collective.

    :raises RunError: if it cannot be read.
    """
    try:
        trainer.load_checkpoint(folder, load_trainer_state=True, load_optim_state=True)
    except (Exception, CheckpointException) as error:
        log.exception("the checkpoint cannot be read")
        raise RunError(f"the checkpoint {folder} cannot be read ({_cause(error)})") from error


def resume(trainer: Trainer) -> int | None:
    """Load the newest checkpoint of the run directory, if there is one, and return its step.

    :raises RunError: if that checkpoint cannot be read; it names the way back.
    """
    folder = Path(trainer.save_folder)
    try:
        loaded = trainer.maybe_load_checkpoint(load_trainer_state=True, load_optim_state=True)
    except InputError:
        raise
    except (Exception, CheckpointException) as error:
        log.exception("the checkpoint cannot be read")
        raise RunError(
            f"the newest checkpoint, {folder / f'step{latest_step(folder)}'}, cannot be read ({_cause(error)}). "
            "Remove that folder to go on from the one before it, or give --overwrite_output_dir to start afresh"
        ) from error
    return trainer.global_step if loaded else None
