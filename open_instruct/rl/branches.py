"""The samples of an episode: of its completion, and of its branches where an agent has some.

`--agent_branches` says what is learned of an episode whose agent rewrote its history or asked
several times from one point, and how its advantage is dealt:

    last               the branch of the last reply
    all                every sampled token once, each with the episode's advantage
    advantage_shared   every branch, with the episode's advantage divided by their number; so a
                       reply that all of them go on from has all of it

Where agents have names and rewards of their own, an agent's branches have the advantage of its
reward among those that it has in the other episodes of the group.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean

from open_instruct.config.rollout_sections import AgentBranches
from open_instruct.core.records import (
    Completion,
    Document,
    EpisodeBranch,
    RolloutGroup,
    RolloutSample,
    Span,
    Verdict,
)


def make_samples(
    group: RolloutGroup,
    completion: Completion,
    advantages: Mapping[str, float],
    agent_branches: AgentBranches = "last",
) -> list[RolloutSample]:
    """The samples of a completion, its own first; none where it has no sampled tokens.

    Args:
        group: of the completion.
        completion: that is learned.
        advantages: by the name of the agent, with that of the whole episode under "".
        agent_branches: as the flag says.
    """
    branches = [make_main_branch(group, completion), *list_branches(completion)]
    if agent_branches == "last":
        branches = branches[:1]
    share = 1.0
    if agent_branches == "advantage_shared":
        share = 1.0 / len(branches)
    samples: list[RolloutSample] = []
    for branch in branches:
        advantage = share * advantages.get(branch.agent, advantages[""])
        if branch.logprobs:
            samples.append(
                _make_sample(branch, advantage, learns_once=agent_branches == "all"),
            )
    return samples


def find_agent_names(groups: Iterable[RolloutGroup]) -> list[str]:
    """The names of agents that have a reward of their own."""
    names: set[str] = set()
    for group in groups:
        for completion in group.completions:
            if completion.episode is not None:
                names |= completion.episode.agent_rewards.keys()
    return sorted(names)


def judge_agent(group: RolloutGroup, name: str) -> RolloutGroup:
    """The group with the rewards of one of its agents, in place of the mean over its agents."""
    verdicts: list[Verdict] = []
    for completion, verdict in zip(group.completions, group.verdicts, strict=True):
        rewards: Mapping[str, float] = {}
        if completion.episode is not None:
            rewards = completion.episode.agent_rewards
        difference = rewards[name] - mean(rewards.values()) if name in rewards else 0.0
        verdicts.append(replace(verdict, reward=verdict.reward + difference))
    return replace(group, verdicts=tuple(verdicts))


def list_branches(completion: Completion) -> tuple[EpisodeBranch, ...]:
    """The branches beside the completion's own tokens."""
    if completion.episode is None:
        return ()
    return completion.episode.branches


def make_main_branch(group: RolloutGroup, completion: Completion) -> EpisodeBranch:
    """The completion's own tokens as a branch."""
    prompt_token_ids = group.prompt.token_ids
    agent = ""
    if completion.episode is not None:
        prompt_token_ids = completion.episode.prompt_token_ids or prompt_token_ids
        agent = completion.episode.agent
    return EpisodeBranch(
        prompt_token_ids=prompt_token_ids,
        token_ids=completion.token_ids,
        replies=completion.replies,
        logprobs=completion.logprobs,
        versions=completion.versions,
        agent=agent,
        routes=completion.routes,
    )


def list_versions(completion: Completion) -> Iterator[int]:
    """The version of every sampled token of a completion and its branches, each once."""
    yield from completion.versions
    for branch in list_branches(completion):
        yield from branch.versions[branch.num_shared_tokens :]


def group_by_prompt(samples: Sequence[RolloutSample]) -> list[RolloutSample]:
    """The samples of a group with those of one prompt side by side, so that rows can share it."""
    by_prompt: dict[tuple[int, ...], list[RolloutSample]] = {}
    for sample in samples:
        prompt = sample.document.token_ids[: sample.document.responses[0].start]
        by_prompt.setdefault(prompt, []).append(sample)
    return [sample for of_prompt in by_prompt.values() for sample in of_prompt]


def _make_sample(branch: EpisodeBranch, advantage: float, *, learns_once: bool) -> RolloutSample:
    start = len(branch.prompt_token_ids)
    responses = tuple(
        Span(start=start + reply.start, stop=start + reply.stop)
        for reply in branch.replies
        if reply
    )
    weights: dict[str, tuple[float, ...]] = {}
    num_shared = branch.num_shared_tokens
    if learns_once and num_shared:
        num_tokens = len(branch.logprobs)
        is_new = (0.0,) * num_shared + (1.0,) * (num_tokens - num_shared)
        weights = {
            "rl": is_new,
            "kl": is_new,
            "ce": (0.0,) * num_tokens,
        }
    return RolloutSample(
        document=Document(
            token_ids=branch.prompt_token_ids + branch.token_ids, responses=responses
        ),
        engine_logprobs=branch.logprobs,
        advantage=advantage,
        weights=weights,
        routes=branch.routes,
    )
