"""Checkpoints of a run: writing them, choosing the one to go on from, and refusing damaged ones.

A model may be written only if all of its weights are finite, and small enough to compute with.
"""

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from olmo_core.distributed.utils import all_reduce_value, barrier, get_rank, get_world_size
from olmo_core.nn.transformer import Transformer
from olmo_core.train import Trainer

from open_instruct.checkpoints import step_folder
from open_instruct.checkpoints.background import in_background
from open_instruct.core.errors import InputError, RunError
from open_instruct.models.shards import find_local_shards
from open_instruct.parallel.process import gather_objects, run_on_main_process

log = logging.getLogger(__name__)

LARGEST_WEIGHT = math.sqrt(torch.finfo(torch.float32).max)
"""About 2e19. The square of a larger one is no float32, and norms are computed from squares."""


@torch.no_grad()
def check_weights(
    model: Transformer,
    *,
    what: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Check that all weights are finite and not too large, before `what` is written in `dtype`.

    Collective: all ranks raise, or none.

    Args:
        folder: of the run's checkpoints.

    Raises:
        RunError: a weight is not finite, is not finite in `dtype`, or exceeds `LARGEST_WEIGHT`.
    """
    limit = min(LARGEST_WEIGHT, torch.finfo(dtype).max)
    held = [
        *find_local_shards(model).values(),
        *find_local_shards(model, adapters_only=True).values(),
    ]
    shards = [each.values_to_check for each in held if each.values_to_check.numel()]
    # A NaN is passed on by each of these, and is not at most the limit. None makes a temporary of a
    # shard's size.
    bounds = torch.zeros(1)
    if shards:
        bounds = torch.stack([torch.stack([*shard.aminmax()]).float() for shard in shards])
    is_broken = (~(bounds.abs().max() <= limit)).float()
    if all_reduce_value(is_broken, next(model.parameters()).device).item():
        raise RunError(
            f"some weights are not finite, or larger than {limit:.0e}, so {what} was not written: "
            "start again with a lower --learning_rate in another --output_dir. "
            f"{last_checkpoint(folder)}"
        )


def save_checkpoint(trainer: Trainer, model: Transformer, *, waits: bool = True) -> None:
    """Write a checkpoint of the trainer's step; collective.

    Nothing is written if a weight of `model` is not finite.

    Args:
        waits: if false it only begins, and `SafeCheckpointer.finish` ends the save.

    Raises:
        RunError: this checkpoint, or the previous one, cannot be written.
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
    folder: Path,
    *,
    keep_last_n: int,
    lasting_interval: int = 1,
    best_step: int | None = None,
) -> Future[None]:
    """Have a thread remove old checkpoints: all but the newest `keep_last_n` and the best.

    Collective: rank 0 removes, once all ranks have called. With a `keep_last_n` of 0 all stay.

    A checkpoint whose step is no multiple of `lasting_interval` stays only while it is the newest
    or the best, and is not counted.
    """
    barrier()
    checkpoints = step_folder.find_checkpoints(folder) if get_rank() == 0 else []
    lasting = [path for path in checkpoints if step_folder.step_of(path) % lasting_interval == 0]
    best = [path for path in checkpoints if step_folder.step_of(path) == best_step]
    needed = {*checkpoints[-1:], *lasting[-keep_last_n:], *best}
    old = [path for path in checkpoints if path not in needed]

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
    """Load the checkpoint in `folder` into the trainer; collective.

    Raises:
        InputError: it belongs to a run with another start model.
        RunError: it cannot be read.
    """
    damage = _find_damage(folder)
    if damage:
        raise RunError(f"the checkpoint {folder} is damaged: {damage[0]}")
    _load(trainer, folder)


def resume(trainer: Trainer, *, warn: Callable[[str], None]) -> int | None:
    """Load the newest whole checkpoint of the run, and return its step; None if there is none.

    Collective. Newer checkpoints that are damaged get another name, and `warn` is called for each.

    Raises:
        InputError: the checkpoint belongs to a run with another start model.
        RunError: there are checkpoints, but none can be read; the message says how to go on.
    """
    folder = Path(trainer.save_folder)
    run_on_main_process(partial(step_folder.tidy, folder))
    reasons: dict[Path, str] = {}
    for path in run_on_main_process(partial(step_folder.find_candidates, folder)):
        damage = _find_damage(path)
        if damage:
            reasons[path] = damage[0]
            continue
        _load(trainer, path)
        for damaged, reason in reasons.items():
            set_aside = partial(step_folder.set_aside, damaged, step_folder.DAMAGED)
            aside = run_on_main_process(set_aside)
            warn(
                f"the checkpoint {damaged.name} is damaged: {reason}. Going on from {path.name}, "
                f"the newest that is whole; the damaged one is kept as {aside}, to be looked at "
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


def _find_damage(folder: Path) -> list[str]:
    """The problems of a checkpoint's files: each rank reads a share, and all return the same."""
    problems = step_folder.find_damage(folder, share=get_rank(), num_shares=get_world_size())
    return list(chain.from_iterable(gather_objects(problems)))
