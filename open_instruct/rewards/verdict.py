"""Make the reward of a completion from the scores of its verifiers, its format and its length."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.records import Completion, Prompt, Verdict
from open_instruct.rewards.answers import has_r1_format
from open_instruct.rewards.finite import describe_unusable


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A score; if it is 0 because of a problem, that problem."""

    score: float
    problem: str | None = None


def build_verdict(
    prompt: Prompt,
    completion: Completion,
    outcomes: Sequence[Outcome],
    config: RewardSection,
    *,
    max_tokens: int = 0,
) -> Verdict:
    """The reward of a completion from the outcomes of its prompt's checks, in their order.

    It is `verification_reward` times the mean of the scores, weighted by the checks' weights, or
    their sum, see `several_verifiers`. An environment's rewards are added, and the mean of those
    that it gives agents by their names. With the format reward, `r1_style_format_reward` is added
    where the form is right; elsewhere the other rewards do not count, unless
    `additive_format_reward`. With the non-stop penalty a completion that was cut gets
    `non_stop_penalty_value` instead. At last `overlong_penalty` is added, of the tokens behind the
    first prompt.
    """
    reward = _weigh_scores(prompt, outcomes, config)
    scores = _average_by_name(prompt, outcomes)
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    episode = completion.episode
    if episode is not None:
        scores |= episode.rewards
        reward += sum(episode.rewards.values())
        if episode.agent_rewards:
            scores |= episode.agent_rewards
            reward += mean(episode.agent_rewards.values())
        if episode.problem:
            problems.append(episode.problem)
    if config.apply_r1_style_format_reward:
        scores["format"] = float(has_r1_format(completion.text))
        if scores["format"]:
            reward += config.r1_style_format_reward
        elif not config.additive_format_reward:
            reward = 0.0
    if config.non_stop_penalty and completion.is_truncated:
        reward = config.non_stop_penalty_value
    penalty = None
    if config.overlong_penalty is not None:
        penalty = overlong_penalty(
            len(completion.token_ids), max_tokens=max_tokens, buffer=config.overlong_penalty
        )
        reward += penalty
    unusable = describe_unusable(reward)
    if unusable:  # a sum or a product of numbers that each were usable
        problems.append(f"the reward is {unusable}")
        reward = 0.0
    return Verdict(
        reward=reward,
        scores=scores,
        problems=tuple(problems),
        overlong_penalty=penalty,
    )


def _weigh_scores(prompt: Prompt, outcomes: Sequence[Outcome], config: RewardSection) -> float:
    """The verifiers' part of the reward: the weighted sum of scores, or their weighted mean."""
    pairs = zip(prompt.checks, outcomes, strict=True)
    weighted_sum = sum(check.weight * outcome.score for check, outcome in pairs)
    reward = config.verification_reward * weighted_sum
    if config.several_verifiers == "sum":
        return reward
    total_weight = sum(check.weight for check in prompt.checks)
    if not total_weight:
        return 0.0
    return reward / total_weight


def _average_by_name(prompt: Prompt, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The mean score of each verifier, by name."""
    scores: dict[str, list[float]] = {}
    for check, outcome in zip(prompt.checks, outcomes, strict=True):
        scores.setdefault(check.verifier, []).append(outcome.score)
    return {name: sum(values) / len(values) for name, values in scores.items()}


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int) -> float:
    """The soft penalty of a long completion, from 0 to -1, which is added to its reward.

    Nothing up to `max_tokens - buffer` tokens, then less in proportion, and -1 at `max_tokens`: Yu
    et al. 2025, DAPO (arXiv 2503.14476), equation 13, with L_max = `max_tokens` and L_cache =
    `buffer`.

    Example: `overlong_penalty(90, max_tokens=100, buffer=20)` is -0.5.
    """
    excess = num_tokens - (max_tokens - buffer)
    return -min(max(excess / buffer, 0.0), 1.0)
