"""OLMo-core's trainer for a caller that brings the batches: it keeps the step count, the schedule, the random
state and the checkpoints; what a step is made of, and when the next one comes, is the caller's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from olmo_core.data.data_loader import DataLoaderBase
from olmo_core.train.callbacks import Callback

from open_instruct.checkpoints.resume import (
    load_checkpoint,
    remove_old_checkpoints,
    resume,
    save_checkpoint,
)
from open_instruct.learner.train_module import ObjectiveTrainModule
from open_instruct.learner.trainer import trainer_of
from open_instruct.parallel.peers import doing
from open_instruct.run.metrics_log import row_of


class BroughtBatches(DataLoaderBase):
    """Stands where the trainer expects a loader: batches come from outside, so there is no order to keep."""

    @property
    def total_batches(self) -> int | None:
        return None

    def reshuffle(self, epoch: int | None = None, **kwargs: Any) -> None:
        self._epoch = epoch

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError("batches are brought by `StepwiseTrainer.take_step`")

    def get_mock_batch(self) -> dict[str, Any]:
        raise NotImplementedError("batches are brought by `StepwiseTrainer.take_step`")

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        return batch["step"].counts["tokens"]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict


@dataclass
class CallersState(Callback):
    """What the caller wants to find again with a checkpoint, as JSON."""

    value: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(self.value)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = json.loads(state_dict["json"])


class StepwiseTrainer:
    """Takes optimisation steps on `policy` and keeps its checkpoints in `folder`. Every method is collective.

    `start_model` is the fingerprint of what the policy began as, see `start_model_of`.
    """

    def __init__(
        self, policy: ObjectiveTrainModule, *, folder: Path, start_model: str, num_steps: int, max_tokens_per_step: int
    ) -> None:
        group = policy.dp_process_group
        self.policy = policy
        self.folder = folder
        self._callers_state = CallersState()
        loader = BroughtBatches(
            work_dir=folder,
            global_batch_size=max_tokens_per_step,
            dp_world_size=dist.get_world_size(group),
            dp_rank=dist.get_rank(group),
        )
        # The schedule stretches over its steps; nobody calls fit().
        self.trainer = trainer_of(
            policy,
            loader,
            folder=folder,
            start_model=start_model,
            num_steps=num_steps,
            callbacks={"callers_state": self._callers_state},
        )

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return self.trainer.global_step

    def take_step(self, minibatches: Iterable[Any], *, num_tokens: int) -> dict[str, float]:
        """One optimizer update for each of `minibatches`, and at last the policy's `end_step`.

        Returns the metrics of the step, the same on every rank: means over the updates, maxima of what is called
        `…/max`. `num_tokens` is what the whole step counts, on all ranks.
        """
        self.trainer.global_step += 1
        doing(f"training step {self.trainer.global_step}")
        self.trainer.global_train_tokens_seen += num_tokens
        of_updates: list[dict[str, float]] = []
        for minibatch in minibatches:
            self.policy.zero_grads()
            self.policy.train_batch({"step": minibatch})
            self.policy.optim_step()
            # Reduced over ranks already by the train module: nothing is left for the trainer to reduce.
            recorded = self.trainer._metrics.pop(self.trainer.global_step)
            of_updates.append({name: float(value) for name, value in recorded.items()})
        self.policy.zero_grads()
        self.policy.end_step()
        return row_of(merged(of_updates))

    def save(self, callers_state: dict[str, Any], *, keep_last_n: int) -> None:
        """Write a checkpoint of this step, and remove those before the last `keep_last_n` (0 keeps all).

        :raises RunError: if it cannot be written; those written before are unharmed.
        """
        self._callers_state.value = callers_state
        save_checkpoint(self.trainer)
        if keep_last_n:
            remove_old_checkpoints(self.folder, keep_last_n=keep_last_n)

    def resume(self, *, warn: Callable[[str], None]) -> dict[str, Any] | None:
        """Load the newest checkpoint that is whole, if there is one, and return what the caller had saved with it."""
        return self._callers_state.value if resume(self.trainer, warn=warn) is not None else None

    def stand_before(self, step: int, *, checkpoint: Path | None) -> None:
        """Be about to take `step`, with weights and optimizer of `checkpoint`, or as they are.

        :raises RunError: if the checkpoint cannot be read.
        """
        if checkpoint is not None:
            load_checkpoint(self.trainer, checkpoint)
        self.trainer.global_step = step - 1


def merged(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several updates as those of one: means, but the maximum of what is called `…/max` or peak."""
    assert rows, "a step has at least one update"
    return {
        name: max(row[name] for row in rows)
        if name.endswith("/max") or name.startswith("peak_")
        else sum(row[name] for row in rows) / len(rows)
        for name in rows[0]
    }
