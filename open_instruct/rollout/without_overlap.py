"""Rollouts without overlap: ask, wait, judge. What the conductor does must come to the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from open_instruct.config.rollout_sections import PromptDataSection, RolloutSection
from open_instruct.engines.requests import GenerationRequest, SamplingSettings
from open_instruct.losses.advantages import has_signal
from open_instruct.records import Completion, Prompt, RolloutGroup, Verdict
from open_instruct.rollout.samples import RolloutStepBatch, is_right

if TYPE_CHECKING:
    from open_instruct.data.prompt_stream import PromptStream


class Generates(Protocol):
    """The engines, as far as rollouts know them. A future that fails carries a RunError."""

    def submit(self, request: GenerationRequest) -> Future[Completion]: ...


class Judges(Protocol):
    """The reward, as far as rollouts know it; called from several threads at once."""

    def judge(self, prompt: Prompt, completion: Completion) -> Verdict: ...


def plain_batches(
    prompts: PromptStream,
    pool: Generates,
    reward: Judges,
    *,
    config: RolloutSection,
    data: PromptDataSection,
    seed: int,
) -> Iterator[RolloutStepBatch]:
    """The batch of every step, one after the other."""
    while True:
        groups: list[RolloutGroup] = []
        rejected: list[RolloutGroup] = []
        while num_missing := config.num_unique_prompts_rollout - len(groups):
            asked = []
            for ticket, prompt in [prompts.next() for _ in range(num_missing)]:
                requests = requests_of(ticket, prompt, config=config, data=data, seed=seed)
                asked.append((ticket, prompt, [pool.submit(request) for request in requests]))
            for ticket, prompt, futures in asked:
                completions = tuple(future.result() for future in futures)
                verdicts = tuple(reward.judge(prompt, completion) for completion in completions)
                group = RolloutGroup(ticket=ticket, prompt=prompt, completions=completions, verdicts=verdicts)
                (rejected if is_rejected(group, config) else groups).append(group)
        batch = RolloutStepBatch(groups=tuple(groups), rejected=tuple(rejected))
        for row_id in solved_rows(batch, config):
            prompts.exclude(row_id)
        yield batch


def requests_of(
    ticket: int, prompt: Prompt, *, config: RolloutSection, data: PromptDataSection, seed: int
) -> list[GenerationRequest]:
    """One request a sample of the group, each with a seed that depends on nothing but its place in the run."""
    sampling = SamplingSettings(
        temperature=config.temperature,
        top_p=config.vllm_top_p,
        max_tokens=data.response_length,
        stop_strings=tuple(config.stop_strings),
    )
    return [
        GenerationRequest(
            request_id=f"{ticket}/{index}",
            prompt_token_ids=prompt.token_ids,
            seed=sampling_seed(seed, ticket, index),
            sampling=sampling,
        )
        for index in range(config.num_samples_per_prompt_rollout)
    ]


def sampling_seed(*parts: int | str) -> int:
    """63 bits that are the same on every machine and in every version of Python.

    Example: `sampling_seed(run_seed, ticket, sample_index)`.
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def is_rejected(group: RolloutGroup, config: RolloutSection) -> bool:
    """Whether active sampling asks another prompt in place of this group."""
    return config.active_sampling and not has_signal(group.rewards)


def solved_rows(batch: RolloutStepBatch, config: RolloutSection) -> Sequence[int]:
    """Rows never to be asked again, in ticket order."""
    rate = config.no_resampling_pass_rate
    if rate is None:
        return []
    groups = sorted((*batch.groups, *batch.rejected), key=lambda group: group.ticket)
    return [group.prompt.row_id for group in groups if sum(map(is_right, group.verdicts)) >= rate * len(group.verdicts)]
