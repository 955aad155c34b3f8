"""One rank's learner of GRPO; a driver brings its steps."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch

from open_instruct.batching.rollouts import RankStep, rollout_minibatches
from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.batch_values import RLValues
from open_instruct.core.records import Batch
from open_instruct.objectives.policy_gradient import GRPO
from open_instruct.run.cadence import cadence_of
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained, fingerprint_start_model
from open_instruct.training.critic import Critic
from open_instruct.training.loop import Before, Loop
from open_instruct.training.policy import Policy
from open_instruct.training.reference import Reference, build_reference, build_teacher, open_beside


class GRPOLearner:
    """Policy, reference, critic and loop of one rank. Usable once constructed; every method is
    collective.

    Args:
        pretrained: the checkpoint that the policy starts from.
        reference: the checkpoint of the reference policy; not built with `--beta 0`. Default:
            `pretrained`.
        run: the run that this process has joined.
        config: the flags of the run.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        *,
        reference: Pretrained | None = None,
        run: Run,
        config: GRPOConfig,
    ) -> None:
        self.config = config
        self.run = run
        self.pretrained = pretrained
        self.drivers_state: dict[str, Any] = {}
        held = config.backend.build(pretrained, run=run, config=config, num_steps=config.num_steps)
        self.policy = Policy(held, GRPO.bind(config), balance_scope=config.model.router_balance)
        start, flags = reference or pretrained, config.loss
        if flags.beta > 0 and config.adapters is not None:
            held.reference = Reference(model=self.policy.computing_model)  # with its adapters off
        elif flags.beta > 0 and flags.ref_policy_update_freq is None:
            held.reference = Reference(model=build_reference(start, run=run, config=config))
        elif flags.beta > 0:
            moves = {"update_freq": flags.ref_policy_update_freq, "alpha": flags.alpha}
            held.reference = held.moving_reference(start, run=run, config=config, **moves)
        if (name := flags.teacher_model_name_or_path) is not None:
            beside = open_beside("teacher", name, pretrained, config=config, layout=run.layout)
            self.policy.teacher = build_teacher(
                beside, pretrained, self.policy.computing_model, run=run, config=config
            )
        self.critic: Critic | None = None
        if config.rollout.has_critic:
            name = config.critic.critic_model_name_or_path
            critics = open_beside("critic", name, start, config=config, layout=run.layout)
            self.critic = Critic(critics, run=run, config=config)
            held.critic = self.critic.policy.backend
        self.loop = Loop(
            self.policy,
            self,
            run=run,
            config=config,
            start_model=fingerprint_start_model(pretrained, run),
            cadence=cadence_of(config),
        )

    def step(self, work: RankStep) -> dict[str, float]:
        """Learn from the completions of one step; returns its metrics, the same on every rank."""
        num_epochs = self.config.loss.num_epochs
        minibatches = rollout_minibatches(
            work, pad_to_multiple_of=self.run.layout.model_parallel_degree
        )
        before: Before | None = None
        if self.critic is not None:
            minibatches = self.critic.with_advantages(minibatches)
            before = partial(self.critic.learn, minibatches * num_epochs)
        is_warm = self.loop.step >= self.config.critic.critic_warmup_steps
        updates = (
            self.policy.with_frozen_logprobs(minibatches, num_epochs=num_epochs) if is_warm else ()
        )
        row = self.loop.take_step(
            updates * num_epochs, num_tokens=work.num_tokens_global, before=before
        )
        # Sending the weights comes next and would wait for the optimizer; waiting here counts its
        # time as training.
        self.loop.wait_for_device()
        return row

    def compare_with_engine(self, work: RankStep) -> dict[str, float]:
        """How far this policy's log-probs of `work` are from the engine's, in nats; nothing is
        learned.

        Returns the mean and the maximum over the sampled tokens of this data-parallel rank.
        """
        updates = rollout_minibatches(
            work, pad_to_multiple_of=self.run.layout.model_parallel_degree
        )
        scored = self.policy.add_logprobs({"old_logprobs_N": self.policy.computing_model}, updates)
        batches = chain.from_iterable(update.microbatches for update in scored)
        differences_N = torch.cat([_engine_differences(batch) for batch in batches])
        return {
            "logprob_diff/probe_mean": differences_N.mean().item(),
            "logprob_diff/probe_max": differences_N.max().item(),
        }

    def save(
        self, drivers_state: dict[str, Any], *, waits: bool = True, best_step: int | None = None
    ) -> None:
        """Write a checkpoint of this step, with `drivers_state`, an object of JSON.

        :param waits: whether it is written on return.
        :param best_step: its checkpoint is not removed.
        :raises RunError: it cannot be written; earlier checkpoints are unharmed.
        """
        self.drivers_state = drivers_state
        self.loop.save(waits=waits, best_step=best_step)

    def resume(self, *, warn: Callable[[str], None]) -> dict[str, Any] | None:
        """Load the newest checkpoint that is whole, if there is one, and return the driver's state
        with it.
        """
        return self.drivers_state if self.loop.resume(warn=warn) else None

    def state_dict(self) -> dict[str, Any]:
        """The driver's place among its prompts, which the loop keeps in its checkpoints."""
        return {"drivers_state": self.drivers_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.drivers_state = state_dict["drivers_state"]


def _engine_differences(batch: Batch) -> torch.Tensor:
    """How far the policy's log-prob of each labelled token is from the engine's, (N,) on the
    CPU.
    """
    values = RLValues.read(batch.values)
    assert values.old_logprobs_N is not None
    return (values.old_logprobs_N.cpu() - values.engine_logprobs_N.cpu()).abs()
