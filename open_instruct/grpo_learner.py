"""One rank's learner of GRPO: the policy, the reference it is held to, and the step it takes on completions."""

from __future__ import annotations

from open_instruct.config.grpo import GRPOConfig
from open_instruct.learner.policy import build_policy
from open_instruct.learner.reference_policy import Reference, build_reference
from open_instruct.learner.stepwise import StepwiseTrainer
from open_instruct.olmo_core_train_modules import GRPOTrainModule
from open_instruct.packing.rollouts import RankStep, rollout_minibatches
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.run.start_model import start_model_of


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
            GRPOTrainModule,
            pretrained,
            run=run,
            config=config,
            num_steps=config.num_steps,
            loss=config.loss,
            temperature=config.rollout.temperature,
            response_length=config.data.response_length,
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
