"""The critic of PPO: a second model beside the policy, which says at each sampled token what reward
is still to come.

It is a `Policy` of its own: a start model with the head of a score, an optimizer, and a loss over
the same packed rows.

Legend: N labelled tokens of a microbatch, M those of them that were sampled; R those of the step
that were sampled on this rank, A on all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from open_instruct.batching.documents import on_device
from open_instruct.checkpoints.resume import check_weights
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.lora import LoRASection
from open_instruct.config.rollout_sections import CriticSection
from open_instruct.config.training import backend_named
from open_instruct.core.records import Batch, Metric, StepBatch, mean_metrics
from open_instruct.losses.values import gae, value_losses, whitened
from open_instruct.models.shards import reshard
from open_instruct.objectives.objective import BoundLoss, LossOutputs, TokenLogprobs
from open_instruct.objectives.policy_gradient import Stream
from open_instruct.objectives.reward_model import fields_of_class
from open_instruct.parallel.data_parallel import keep_mesh
from open_instruct.parallel.reduce import gather_rows
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.loop import TakeUpdates
from open_instruct.training.policy import Policy

ADVANTAGES, RETURNS, OLD_VALUES = "advantages_N", "returns_N", "old_values_N"
EXPLAINED = "explained_variance"
LEAST_VARIANCE = 1e-8


class Critic:
    """One rank's critic. Usable once constructed; every method is collective.

    Args:
        pretrained: as `open_beside` opens it.
        run: the run that this process has joined.
        config: the flags of the run.
    """

    def __init__(self, pretrained: Pretrained, *, run: Run, config: GRPOConfig) -> None:
        self.flags = config.critic
        optim = replace(config.optim, learning_rate=self.flags.critic_learning_rate)
        # OLMo-core's train module makes a mesh of its own: no model is built after this one.
        keep_mesh(None)
        backend = backend_named(config.parallel.backend).build(
            pretrained,
            run=run,
            config=replace(config, optim=optim, lora=LoRASection()),
            num_steps=config.num_steps,
        )
        self.pretrained = pretrained
        self.policy = Policy(backend, BoundLoss(function=partial(value_loss, flags=self.flags)))
        self.policy.rate_flag = "--critic_learning_rate"

    @torch.no_grad()
    def with_advantages(self, updates: Sequence[StepBatch]) -> tuple[StepBatch, ...]:
        """The updates of a step with advantages, returns and present values of all labels, 0 where
        none was sampled.

        They come with rewards, as the advantages of their completions. Written conversations stay
        as they are.
        """
        policy = self.policy
        policy.backend.set_mode("eval")
        valued = [self._valued(batch) for update in updates for batch in sampled(update)]
        reshard(policy.model)
        own_R2 = torch.cat([valued_M2 for _, valued_M2 in valued])
        advantages_A, values_A = gather_rows(own_R2, group=policy.dp_process_group).unbind(1)
        shown_R = (
            whitened(own_R2[:, 0], advantages_A) if self.flags.whiten_advantages else own_R2[:, 0]
        )
        told = {}
        if len(values_A):
            rest = advantages_A.var(correction=0) / (advantages_A + values_A).var(
                correction=0
            ).clamp(LEAST_VARIANCE)
            told = {EXPLAINED: 1 - rest}
        shown = shown_R.split([len(valued_M2) for _, valued_M2 in valued])
        made = iter(
            [
                self._filled(*each, shown_M, told)
                for each, shown_M in zip(valued, shown, strict=True)
            ]
        )
        return tuple(
            replace(each, microbatches=(*islice(made, len(sampled(each))), *given(each)))
            for each in updates
        )

    def _valued(self, batch: Batch) -> tuple[Batch, torch.Tensor]:
        """The microbatch, and (M, 2): the advantage of each sampled token, not yet whitened, and
        its value.
        """
        batch = replace(batch, values=on_device(batch.values, self.policy.device))
        scores = self.policy.scores(unrouted(batch))
        rl = Stream.of("rl", batch.values)
        values_M, sequence_ids_M = rl.take(scores.logprobs_N), rl.take(scores.sequence_ids_N)
        is_last_M = sequence_ids_M.diff(append=sequence_ids_M.new_full((1,), -1)) != 0
        rewards_M = rl.take(batch.values[ADVANTAGES]) * is_last_M
        advantages_M = gae(
            values_M, rewards_M, sequence_ids_M, gamma=self.flags.gamma, lam=self.flags.gae_lambda
        )
        return batch, torch.stack([advantages_M, values_M], dim=1)

    def _filled(
        self,
        batch: Batch,
        valued_M2: torch.Tensor,
        shown_M: torch.Tensor,
        told: Mapping[str, torch.Tensor],
    ) -> Batch:
        advantages_M, values_M = valued_M2.unbind(1)
        rl, num_labels = Stream.of("rl", batch.values), len(batch.packed.sequence_ids_N)
        of_sampled = {ADVANTAGES: shown_M, RETURNS: advantages_M + values_M, OLD_VALUES: values_M}
        added = {name: rl.put(each_M, num_labels) for name, each_M in of_sampled.items()}
        return replace(batch, values={**batch.values, **added, **told})

    def export(self, *, run: Run, config: GRPOConfig) -> None:
        """Write OUT/critic, for --critic_model_name_or_path and as transformers' class with a
        score. Collective.
        """
        dtype, folder = self.pretrained.dtype_named(config.run.export_dtype), run.directory.critic
        check_weights(self.policy.model, what="the critic", folder=run.directory.path, dtype=dtype)
        fields = fields_of_class(self.pretrained.hf_config)
        self.pretrained.export(self.policy.model, folder, dtype=dtype, more_config=fields)
        run.console.say(f"the critic is in {folder}", style="green")

    def learn(self, updates: Sequence[StepBatch], take: TakeUpdates) -> dict[str, float]:
        """One optimizer update for each of the `updates`, which have their returns; gives the
        metrics of the step.
        """
        row = take(self.policy, list(map(of_critic, updates)))
        spent_s = sum(value for name, value in row.items() if name.startswith("time/"))
        return {f"critic/{name}": value for name, value in row.items() if name in TOLD} | {
            "time/critic": spent_s
        }


# Of the metrics of an update, those that are told beside the policy's.
TOLD = ("loss", "grad_norm", "lr", "step_skipped", "value", "return", "clip_fraction", EXPLAINED)


def value_loss(
    scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int], *, flags: CriticSection
) -> LossOutputs:
    """The microbatch's share of the mean over the sampled tokens of an update."""
    rl = Stream.of("rl", batch.values)
    values_M, old_M, returns_M = map(
        rl.take, (scores.logprobs_N, batch.values[OLD_VALUES], batch.values[RETURNS])
    )
    losses_M, is_clipped_M = value_losses(values_M, old_M, returns_M, flags.value_clip)
    loss = losses_M.sum() / max(counts["rl_labels"], 1)
    metrics = {"loss": Metric(value=loss.detach(), reduction="sum")}
    if EXPLAINED in batch.values:  # the same on all ranks
        metrics[EXPLAINED] = Metric(value=batch.values[EXPLAINED], reduction="max")
    if counts["rl_rows"] > 0:
        metrics |= mean_metrics(
            {"value": values_M.detach(), "return": returns_M, "clip_fraction": is_clipped_M}
        )
    return LossOutputs(loss=loss, metrics=metrics)


def sampled(update: StepBatch) -> tuple[Batch, ...]:
    """The microbatches that have completions on some rank: as many on all, so that ranks meet in
    collectives.
    """
    return update.microbatches[: update.counts["rl_microbatches"]]


def given(update: StepBatch) -> tuple[Batch, ...]:
    """The SFT microbatches, which stand behind those of completions."""
    return update.microbatches[update.counts["rl_microbatches"] :]


def unrouted(batch: Batch) -> Batch:
    """The microbatch without the experts that an engine chose, which are the policy's."""
    return replace(batch, packed=replace(batch.packed, routes_TR=None))


def of_critic(update: StepBatch) -> StepBatch:
    """The update as the critic learns it: nothing, where no completion is among its rows."""
    counts = {**update.counts, "rows": update.counts["rl_rows"]}
    return replace(update, microbatches=tuple(map(unrouted, sampled(update))), counts=counts)
