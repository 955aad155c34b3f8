"""One rank's learner of GRPO; a driver brings its steps."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch

from open_instruct.batching.rollouts import RankStep, build_rollout_minibatches
from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.batch_values import RLValues
from open_instruct.core.records import Batch, StepBatch
from open_instruct.objectives.policy_gradient import GRPO
from open_instruct.run.cadence import build_cadence
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import Pretrained, fingerprint_start_model
from open_instruct.training.learner_state import CompanionModels, build_learner_state
from open_instruct.training.loop import LearnBefore
from open_instruct.training.open_companion import open_companion_model
from open_instruct.training.state_mover import Move, StateMover


def open_companions(
    config: GRPOConfig,
    pretrained: Pretrained,
    reference: Pretrained,
    *,
    run: Run,
) -> CompanionModels:
    """The models beside a policy of GRPO, as the flags ask for them.

    :raises InputError: one cannot be opened, or its vocabulary is not the policy's.
    """
    flags = config.loss
    moves: dict[str, Any] = {}
    if flags.ref_policy_update_freq is not None:
        moves = {"update_freq": flags.ref_policy_update_freq, "alpha": flags.alpha}
    teacher: Pretrained | None = None
    if flags.teacher_model_name_or_path is not None:
        name = flags.teacher_model_name_or_path
        teacher = open_companion_model(
            "teacher", name, pretrained, config=config, layout=run.layout
        )
    critic: Pretrained | None = None
    if config.rollout.has_critic:
        critic = open_companion_model(
            "critic",
            config.critic.critic_model_name_or_path,
            reference,
            config=config,
            layout=run.layout,
        )
    has_penalty = flags.beta > 0
    return CompanionModels(
        reference=reference if has_penalty else None,
        reference_moves=moves,
        teacher=teacher,
        critic=critic,
        critic_flags=config.critic,
    )


class GRPOLearner:
    """One rank's learner, which takes the steps that a driver brings. Every method is collective.

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
        state = build_learner_state(
            pretrained,
            run=run,
            config=config,
            loss=GRPO.bind(config),
            cadence=build_cadence(config),
            start_model=fingerprint_start_model(pretrained, run),
            companions=open_companions(config, pretrained, reference or pretrained, run=run),
        )
        self.policy = state.policy
        self.critic = state.critic
        self.loop = state.build_loop(self)
        self._mover = StateMover(self._list_resident_tensors, self.policy.device)

    def step(self, work: RankStep) -> dict[str, float]:
        """Learn from the completions of one step; returns its metrics, the same on every rank."""
        num_epochs = self.config.loss.num_epochs
        minibatches = build_rollout_minibatches(
            work, pad_to_multiple_of=self.run.layout.model_parallel_degree
        )
        before: LearnBefore | None = None
        if self.critic is not None:
            minibatches = self.critic.add_advantages(minibatches)
            before = partial(self.critic.learn, minibatches * num_epochs)
        updates: tuple[StepBatch, ...] = ()
        if self.loop.step >= self.config.critic.critic_warmup_steps:
            updates = self.policy.add_frozen_logprobs(minibatches, num_epochs=num_epochs)
        row = self.loop.take_step(
            updates * num_epochs, num_tokens=work.num_tokens_global, before=before
        )
        # Sending the weights comes next and would wait for the optimizer; waiting here counts its
        # time as training.
        self.loop.wait_for_device()
        return row

    def move_to_host(self) -> Move:
        """Free the device of all that stays from step to step, for an engine; see `StateMover`.

        Call `move_to_device` before any other method.
        """
        self.loop.wait_for_copy()
        return self._mover.move_to_host()

    def move_to_device(self) -> Move:
        """Bring back what `move_to_host` has taken, bit for bit."""
        return self._mover.move_to_device()

    def _list_resident_tensors(self) -> Iterator[torch.Tensor]:
        yield from self.policy.list_resident_tensors()
        if self.critic is not None:
            yield from self.critic.policy.list_resident_tensors()

    def compare_with_engine(self, work: RankStep) -> dict[str, float]:
        """How far this policy's log-probs of `work` are from the engine's, in nats.

        Nothing is learned. Returns the mean and the maximum over the sampled tokens of this
        data-parallel rank.
        """
        updates = build_rollout_minibatches(
            work, pad_to_multiple_of=self.run.layout.model_parallel_degree
        )
        scored_updates = self.policy.add_logprobs(
            {"old_logprobs_N": self.policy.computing_model}, updates
        )
        batches = chain.from_iterable(update.microbatches for update in scored_updates)
        differences_N = torch.cat([logprob_differences(batch) for batch in batches])
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
        """Load the newest whole checkpoint; returns the driver's state, None without one."""
        if not self.loop.resume(warn=warn):
            return None
        return self.drivers_state

    def state_dict(self) -> dict[str, Any]:
        """The driver's place among its prompts, which the loop keeps in its checkpoints."""
        return {"drivers_state": self.drivers_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.drivers_state = state_dict["drivers_state"]


def logprob_differences(batch: Batch) -> torch.Tensor:
    """Absolute differences of the policy's log-probs and the engine's, (N,), in nats."""
    values = RLValues.read(batch.values)
    assert values.old_logprobs_N is not None
    return (values.old_logprobs_N.cpu() - values.engine_logprobs_N.cpu()).abs()
