"""Checkpoints of a run: writing them, choosing the one to go on from, and refusing damaged ones.

A model may be written only if all of its weights are finite, and small enough to compute with.
"""

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
from olmo_core.distributed.utils import all_reduce_value, barrier, get_rank, get_world_size
from olmo_core.nn.transformer import Transformer
from olmo_core.train import Trainer

from open_instruct.checkpoints import step_folder
from open_instruct.checkpoints.background import in_background
from open_instruct.core.errors import InputError, RunError
from open_instruct.models.shards import held_of
from open_instruct.parallel.process import gathered, on_main_process

log = logging.getLogger(__name__)

LARGEST_WEIGHT = math.sqrt(torch.finfo(torch.float32).max)
"""About 2e19. The square of a larger one is no float32, and norms are computed from squares."""


@torch.no_grad()
def check_weights(
    model: Transformer, *, what: str, folder: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Look at every weight once, before `what` is written in `dtype`. Collective: all ranks raise,
    or none.

    `folder` has the run's checkpoints.

    :raises RunError: if a weight is not finite, is not finite in `dtype`, or is larger than
        `LARGEST_WEIGHT`.
    """
    limit = min(LARGEST_WEIGHT, torch.finfo(dtype).max)
    held = [*held_of(model).values(), *held_of(model, adapters_only=True).values()]
    shards = [each.limits for each in held if each.limits.numel()]
    # A NaN is passed on by each of these, and is not at most the limit. No temporary of a shard's
    # size.
    bounds = (
        torch.stack([bound.float() for shard in shards for bound in shard.aminmax()])
        if shards
        else torch.zeros(1)
    )
    is_broken = (~(bounds.abs().max() <= limit)).float()
    if all_reduce_value(is_broken, next(model.parameters()).device).item():
        raise RunError(
            f"some weights are not finite, or larger than {limit:.0e}, so {what} was not written: "
            "start again with a lower --learning_rate in another --output_dir. "
            f"{last_checkpoint(folder)}"
        )


def save_checkpoint(trainer: Trainer, model: Transformer, *, waits: bool = True) -> None:
    """Write a checkpoint of the trainer's step, or begin to, to be ended by
    `SafeCheckpointer.finish`. Collective.

    Nothing is written if a weight of `model` is not finite.

    :raises RunError: this checkpoint, or the one under way, cannot be written.
    """
    check_weights(
        model,
        what=f"the checkpoint of step {trainer.global_step}",
        folder=Path(trainer.save_folder),
    )
    if waits:
        trainer.save_checkpoint()
    else:
        trainer.save_checkpoint_async()


def remove_old_checkpoints(
    folder: Path, *, keep_last_n: int, lasting_interval: int = 1, best_step: int | None = None
) -> Future[None]:
    """Have a thread remove all but the newest `keep_last_n` checkpoints (0 keeps all) and that of
    `best_step`.

    Collective: rank 0 removes, once all are past it.

    A checkpoint whose step is no multiple of `lasting_interval` stays only while it is the newest
    or the best, and is not counted.
    """
    barrier()
    checkpoints = step_folder.find_checkpoints(folder) if get_rank() == 0 else []
    lasting = [path for path in checkpoints if step_folder.step_of(path) % lasting_interval == 0]
    best = [path for path in checkpoints if step_folder.step_of(path) == best_step]
    kept = {*checkpoints[-1:], *lasting[-keep_last_n:], *best}
    old = [path for path in checkpoints if path not in kept]

    def remove_each() -> None:
        for path in old:
            try:
                step_folder.remove(path)
            except OSError as error:
                log.warning("%s cannot be removed: %s", path, error)

    return in_background(remove_each)


def last_checkpoint(folder: Path) -> str:
    """A sentence about the newest checkpoint, for the error that ends a run."""
    step = step_folder.latest_step(folder)
    if step is None:
        return "This run has no checkpoint"
    return (
        f"The newest checkpoint, {folder / f'step{step}'}, is from before that, and all of its "
        "weights are finite"
    )


def load_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Load the checkpoint in `folder` into the trainer. Collective.

    :raises InputError: it belongs to a run with another start model.
    :raises RunError: it cannot be read.
    """
    if damage := _damage_on_any_rank(folder):
        raise RunError(f"the checkpoint {folder} is damaged: {damage[0]}")
    _load(trainer, folder)


def resume(trainer: Trainer, *, warn: Callable[[str], None]) -> int | None:
    """Load the newest checkpoint of the run directory that is whole, if there is one, and return
    its step. Collective.

    Newer checkpoints that are not whole are kept under another name, and `warn` is called for each.

    :raises InputError: it belongs to a run with another start model.
    :raises RunError: there are checkpoints, but none can be read; the message says how to go on.
    """
    folder = Path(trainer.save_folder)
    on_main_process(lambda: step_folder.tidy(folder))
    reasons: dict[Path, str] = {}
    for path in on_main_process(lambda: step_folder.candidates(folder)):
        if damage := _damage_on_any_rank(path):
            reasons[path] = damage[0]
            continue
        _load(trainer, path)
        for damaged, reason in reasons.items():
            kept = on_main_process(partial(step_folder.set_aside, damaged, step_folder.DAMAGED))
            warn(
                f"the checkpoint {damaged.name} is damaged: {reason}. Going on from {path.name}, "
                f"the newest that is whole; the damaged one is kept as {kept}, to be looked at "
                "and removed"
            )
        return trainer.global_step
    if reasons:
        raise RunError(
            f"no checkpoint in {folder} can be gone on from: {'; '.join(reasons.values())}. Put "
            "back what was there, or start afresh with another --output_dir or "
            "--overwrite_output_dir"
        )
    return None


def _load(trainer: Trainer, folder: Path) -> None:
    try:
        trainer.load_checkpoint(folder, load_trainer_state=True, load_optim_state=True)
    except InputError:
        raise
    except Exception as error:
        log.exception("the checkpoint cannot be read")
        raise RunError(
            f"the checkpoint {folder} cannot be read ({error}). Remove that folder to go on from "
            "the one before it, or start afresh with another --output_dir or "
            "--overwrite_output_dir"
        ) from error


def _damage_on_any_rank(folder: Path) -> list[str]:
    """The problems of a checkpoint's files.

    Each rank reads a share of the files, and all ranks return the same.
    """
    own = step_folder.damage_of(folder, share=get_rank(), num_shares=get_world_size())
    return [problem for problems in gathered(own) for problem in problems]
