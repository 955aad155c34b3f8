"""The reward of a completion, from the scores of its prompt's verifiers."""

from collections.abc import Sequence
from dataclasses import dataclass

from open_instruct.config.rollout_sections import RewardSection
from open_instruct.records import Completion, Prompt, Verdict
from open_instruct.verifiers.answers import has_r1_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A score; where it is 0 because of a problem, that problem."""

    score: float
    problem: str | None = None


def verdict_of(prompt: Prompt, completion: Completion, outcomes: Sequence[Outcome], config: RewardSection) -> Verdict:
    """The verdict on a completion, from the outcomes of its prompt's checks.

    The reward is `verification_reward` times the mean (or the sum: `several_verifiers`) of the scores, weighted by the
    checks' weights. With the format reward, `r1_style_format_reward` is added where the form is right; elsewhere the
    verifiers' part does not count, unless `additive_format_reward`. An environment's rewards are added. With the
    non-stop penalty a completion that was cut gets `non_stop_penalty_value` instead. Scores of a verifier that appears
    twice are averaged.
    """
    judged = list(zip(prompt.checks, outcomes, strict=True))
    by_name: dict[str, list[float]] = {}
    for check, outcome in judged:
        by_name.setdefault(check.verifier, []).append(outcome.score)
    scores = {name: sum(values) / len(values) for name, values in by_name.items()}
    total_weight = 1.0 if config.several_verifiers == "sum" else sum(check.weight for check in prompt.checks)
    reward = config.verification_reward * sum(check.weight * outcome.score for check, outcome in judged)
    reward = reward / total_weight if total_weight else 0.0
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    if (episode := completion.episode) is not None:
        scores |= episode.rewards
        reward += sum(episode.rewards.values())
        problems += [episode.problem] if episode.problem else []
    if config.apply_r1_style_format_reward:
        scores["format"] = float(has_r1_format(completion.text))
        if scores["format"]:
            reward += config.r1_style_format_reward
        elif not config.additive_format_reward:
            reward = 0.0
    if config.non_stop_penalty and completion.is_truncated:
        reward = config.non_stop_penalty_value
    return Verdict(reward=reward, scores=scores, problems=tuple(problems))
