"""Rollouts without overlap: ask, wait, judge. What the conductor does must come to the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from open_instruct.config.grpo import GRPOConfig
from open_instruct.records import RolloutGroup
from open_instruct.rollout.conductor import is_rejected, requests_of, solved_rows
from open_instruct.rollout.samples import RolloutStepBatch

if TYPE_CHECKING:
    from open_instruct.data.prompts import PromptStream
    from open_instruct.engines.engine_pool import EnginePool
    from open_instruct.verifiers.reward import RewardManager


def plain_batches(
    prompts: PromptStream, pool: EnginePool, reward: RewardManager, *, config: GRPOConfig
) -> Iterator[RolloutStepBatch]:
    """The batch of every step, one after the other."""
    while True:
        groups: list[RolloutGroup] = []
        rejected: list[RolloutGroup] = []
        while num_missing := config.rollout.num_unique_prompts_rollout - len(groups):
            asked = []
            for ticket, prompt in [prompts.next() for _ in range(num_missing)]:
                requests = requests_of(ticket, prompt, config=config)
                asked.append((ticket, prompt, [pool.submit(request) for request in requests]))
            for ticket, prompt, futures in asked:
                completions = tuple(future.result() for future in futures)
                verdicts = tuple(reward.judge(prompt, completions))
                group = RolloutGroup(ticket=ticket, prompt=prompt, completions=completions, verdicts=verdicts)
                (rejected if is_rejected(group, config.rollout) else groups).append(group)
        batch = RolloutStepBatch(groups=tuple(groups), rejected=tuple(rejected))
        for row_id in solved_rows(batch, config.rollout):
            prompts.exclude(row_id)
        yield batch
