"""One rank's learner of GRPO, and under it OLMo-core's trainer for a caller that brings the batches.

The trainer keeps the step count, the schedule, the random state and the checkpoints; what a step is made of, and when
the next one comes, is the caller's business.
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
from open_instruct.config.grpo import GRPOConfig
from open_instruct.learner.policy import build_policy
from open_instruct.learner.reference_policy import Reference, build_reference
from open_instruct.learner.train_module import ObjectiveTrainModule
from open_instruct.learner.trainer import trainer_of
from open_instruct.objectives.policy_gradient import bind
from open_instruct.packing.rollouts import RankStep, rollout_minibatches
from open_instruct.parallel.peers import doing
from open_instruct.run.metrics_log import row_of
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.run.start_model import start_model_of


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


class GRPOLearner:
    """Policy, reference and trainer of one rank. Usable once constructed; every method is collective.

    Args:
        pretrained: what the policy starts from.
        reference: what the reference policy starts from; not built with `--beta 0`. Default: `pretrained`.
        run: that the process has joined.
        config: of the run.
    """

    def __init__(
        self, pretrained: Pretrained, *, reference: Pretrained | None = None, run: Run, config: GRPOConfig
    ) -> None:
        self.config = config
        self.run = run
        self.pretrained = pretrained
        self.policy = build_policy(
            ObjectiveTrainModule,
            pretrained,
            run=run,
            config=config,
            num_steps=config.num_steps,
            loss=bind(config.loss, temperature=config.rollout.temperature, response_length=config.data.response_length),
        )
        if config.loss.beta > 0:
            self.policy.reference = Reference(
                model=build_reference(reference or pretrained, run=run, config=config),
                update_freq=config.loss.ref_policy_update_freq,
                alpha=config.loss.alpha,
            )
        self.trainer = StepwiseTrainer(
            self.policy,
            folder=run.directory.path,
            start_model=start_model_of(pretrained, run),
            num_steps=config.num_steps,
            max_tokens_per_step=config.num_completions_per_step * config.data.max_seq_length,
        )

    def step(self, work: RankStep) -> dict[str, float]:
        """Learn from the completions of one step; returns its metrics, the same on every rank."""
        num_epochs = self.config.loss.num_epochs
        updates = self.policy.with_frozen_logprobs(
            rollout_minibatches(
                work,
                pad_token_id=self.pretrained.pad_token_id,
                pad_to_multiple_of=self.run.layout.model_parallel_degree,
            ),
            num_epochs=num_epochs,
        )
        return self.trainer.take_step(updates * num_epochs, num_tokens=work.num_tokens_global)


def merged(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several updates as those of one: means, but the maximum of what is called `…/max` or peak."""
    assert rows, "a step has at least one update"
    return {
        name: max(row[name] for row in rows)
        if name.endswith("/max") or name.startswith("peak_")
        else sum(row[name] for row in rows) / len(rows)
        for name in rows[0]
    }
