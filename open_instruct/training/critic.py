"""The critic of PPO: a second model, which says at each sampled token what reward is to come.

It is a `Policy` of its own: a start model with the head of a score, an optimizer, and a loss over
the same packed rows.

Legend: N labelled tokens of a microbatch, M those of them that were sampled; R those of the step
that were sampled on this rank, A on all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch

from open_instruct.batching.documents import move_to_device
from open_instruct.checkpoints.resume import check_weights
from open_instruct.config.lora import LoRASection
from open_instruct.config.policy_sections import CriticSection
from open_instruct.config.training import LearnerConfig
from open_instruct.core.batch_values import RLValues
from open_instruct.core.records import Batch, Metric, StepBatch, mean_metrics
from open_instruct.losses.values import gae, value_losses, whiten
from open_instruct.models.shards import reshard
from open_instruct.objectives.objective import BoundLoss, LossOutputs, TokenLogprobs
from open_instruct.objectives.reward_model import find_class_fields
from open_instruct.parallel.reduce import gather_rows
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.loop import TakeUpdates
from open_instruct.training.policy import Policy

EXPLAINED = "explained_variance"
LEAST_VARIANCE = 1e-8


class ValuedBatch(NamedTuple):
    """A microbatch, and of each sampled token its advantage (not yet whitened) and its value."""

    batch: Batch
    advantages_and_values_M2: torch.Tensor


class Critic:
    """One rank's critic. Usable once constructed; every method is collective.

    Args:
        pretrained: as `open_companion_model` opens it.
        flags: the critic's own.
        run: the run that this process has joined.
        config: the flags of the run.
        num_steps: of the run; the schedule stretches over them.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        *,
        flags: CriticSection,
        run: Run,
        config: LearnerConfig,
        num_steps: int,
    ) -> None:
        self.flags = flags
        optim = replace(config.optim, learning_rate=flags.critic_learning_rate)
        backend = config.backend.build(
            pretrained,
            run=run,
            config=replace(config, optim=optim, lora=LoRASection()),
            num_steps=num_steps,
        )
        self.pretrained = pretrained
        loss = ValueLoss(clip=self.flags.value_clip)
        self.policy = Policy(backend, loss, rate_flag="--critic_learning_rate")

    @torch.no_grad()
    def add_advantages(self, updates: Sequence[StepBatch]) -> tuple[StepBatch, ...]:
        """The updates of a step with advantages, returns and present values of all labels.

        They are 0 where no token was sampled. The updates come with rewards, as the advantages of
        their completions. Written conversations stay as they are.
        """
        policy = self.policy
        policy.backend.set_mode("eval")
        valued_updates: list[list[ValuedBatch]] = []
        for update in updates:
            valued_updates.append([self._value(batch) for batch in rl_microbatches(update)])
        reshard(policy.model)
        valued_batches = chain.from_iterable(valued_updates)
        values_R2 = torch.cat([each.advantages_and_values_M2 for each in valued_batches])
        values_A2 = gather_rows(values_R2, group=policy.dp_process_group)
        explained_fraction: torch.Tensor | None = None
        if len(values_A2):
            explained_fraction = explained_variance(values_A2)
        filled_updates: list[StepBatch] = []
        for update, update_batches in zip(updates, valued_updates, strict=True):
            filled_batches = [
                self._fill(each, values_A2, explained_fraction) for each in update_batches
            ]
            microbatches = (*filled_batches, *sft_microbatches(update))
            filled_updates.append(replace(update, microbatches=microbatches))
        return tuple(filled_updates)

    def _value(self, batch: Batch) -> ValuedBatch:
        batch = replace(batch, values=move_to_device(batch.values, self.policy.device))
        scores = self.policy.score(drop_routes(batch))
        values = RLValues.read(batch.values)
        values_M = values.rl.take(scores.logprobs_N)
        sequence_ids_M = values.rl.take(scores.sequence_ids_N)
        is_last_M = sequence_ids_M.diff(append=sequence_ids_M.new_full((1,), -1)) != 0
        rewards_M = values.rl.take(values.advantages_N) * is_last_M
        advantages_M = gae(
            values_M, rewards_M, sequence_ids_M, gamma=self.flags.gamma, lam=self.flags.gae_lambda
        )
        return ValuedBatch(batch, torch.stack([advantages_M, values_M], dim=1))

    def _fill(
        self,
        valued_batches: ValuedBatch,
        values_A2: torch.Tensor,
        explained_fraction: torch.Tensor | None,
    ) -> Batch:
        """The microbatch with its advantages (whitened over the step), returns and old values."""
        batch = valued_batches.batch
        advantages_M, values_M = valued_batches.advantages_and_values_M2.unbind(1)
        returns_M = advantages_M + values_M
        if self.flags.whiten_advantages:
            advantages_M = whiten(advantages_M, values_A2[:, 0])
        values = RLValues.read(batch.values)
        num_labels = len(batch.packed.sequence_ids_N)
        values = replace(
            values,
            advantages_N=values.rl.scatter(advantages_M, num_labels),
            returns_N=values.rl.scatter(returns_M, num_labels),
            old_values_N=values.rl.scatter(values_M, num_labels),
            explained_variance=explained_fraction,
        )
        return replace(batch, values=values)

    def export(self, *, run: Run, export_dtype: str) -> None:
        """Write OUT/critic, as transformers' class with a score. Collective.

        A later run takes it by --critic_model_name_or_path.
        """
        dtype = self.pretrained.find_dtype(export_dtype)
        folder = run.directory.critic
        check_weights(self.policy.model, what="the critic", folder=run.directory.path, dtype=dtype)
        fields = find_class_fields(self.pretrained.hf_config)
        self.pretrained.export(self.policy.model, folder, dtype=dtype, more_config=fields)
        run.console.say(f"the critic is in {folder}", style="green")

    def learn(self, updates: Sequence[StepBatch], take: TakeUpdates) -> dict[str, float]:
        """One optimizer update for each of the `updates`; returns the metrics of the step.

        The updates have their returns already.
        """
        row = take(self.policy, [select_critic_part(each) for each in updates])
        spent_s = sum(value for name, value in row.items() if name.startswith("time/"))
        shown_metrics = {f"critic/{name}": row[name] for name in row if name in SHOWN_METRICS}
        return shown_metrics | {"time/critic": spent_s}


# The metrics of a critic's update that stand beside the policy's in a row.
SHOWN_METRICS = (
    "loss",
    "grad_norm",
    "lr",
    "step_skipped",
    "value",
    "return",
    "clip_fraction",
    EXPLAINED,
)


@dataclass(frozen=True, kw_only=True)
class ValueLoss(BoundLoss):
    """The critic's loss, a mean over the sampled tokens of an update, clipped as `value_losses`."""

    values_class = RLValues

    clip: float | None

    def compute(
        self, scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]
    ) -> LossOutputs:
        values = RLValues.read(batch.values)
        assert values.old_values_N is not None and values.returns_N is not None
        values_M = values.rl.take(scores.logprobs_N)
        old_M = values.rl.take(values.old_values_N)
        returns_M = values.rl.take(values.returns_N)
        losses_M, is_clipped_M = value_losses(values_M, old_M, returns_M, self.clip)
        loss = losses_M.sum() / max(counts["rl_labels"], 1)
        metrics = {"loss": Metric(value=loss.detach(), reduction="sum")}
        if values.explained_variance is not None:  # the same on all ranks
            metrics[EXPLAINED] = Metric(value=values.explained_variance, reduction="max")
        if counts["rl_rows"] > 0:
            metrics |= mean_metrics(
                {
                    "value": values_M.detach(),
                    "return": returns_M,
                    "clip_fraction": is_clipped_M,
                }
            )
        return LossOutputs(loss=loss, metrics=metrics)


def explained_variance(values_A2: torch.Tensor) -> torch.Tensor:
    """1 - var(returns - values) / var(returns), of the step's advantages and values, (A, 2)."""
    advantages_A, values_A = values_A2.unbind(1)
    returns_variance = (advantages_A + values_A).var(correction=0).clamp(LEAST_VARIANCE)
    return 1 - advantages_A.var(correction=0) / returns_variance


def rl_microbatches(update: StepBatch) -> tuple[Batch, ...]:
    """The microbatches that have completions on some rank.

    They are as many on all ranks, so that these meet in collectives.
    """
    return update.microbatches[: update.counts["rl_microbatches"]]


def sft_microbatches(update: StepBatch) -> tuple[Batch, ...]:
    """The microbatches of written conversations, which stand behind those of completions."""
    return update.microbatches[update.counts["rl_microbatches"] :]


def drop_routes(batch: Batch) -> Batch:
    """The microbatch without the experts that an engine chose, which are the policy's."""
    return replace(batch, packed=replace(batch.packed, routes_TR=None))


def select_critic_part(update: StepBatch) -> StepBatch:
    """The update as the critic learns it: nothing, where no completion is among its rows."""
    counts = {**update.counts, "rows": update.counts["rl_rows"]}
    microbatches = tuple(map(drop_routes, rl_microbatches(update)))
    return replace(update, microbatches=microbatches, counts=counts)
