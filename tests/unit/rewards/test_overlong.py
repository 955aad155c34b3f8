"""--overlong_penalty, by the equation of the paper."""

import pytest

from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.records import Completion, Prompt, RolloutGroup
from open_instruct.rewards.verdict import build_verdict, overlong_penalty
from open_instruct.rl.samples import verdict_metrics


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0)],
)
def test_penalty_falls_over_the_buffer(num_tokens: int, expected: float) -> None:
    assert overlong_penalty(num_tokens, max_tokens=100, buffer=20) == pytest.approx(expected)


def test_penalty_is_added_to_the_reward_and_is_no_score() -> None:
    flags = RewardSection(overlong_penalty=4, verification_reward=2.0)
    prompt = Prompt(row_id=0, token_ids=(1,), text="?", checks=())
    completions = tuple(completion_of(num_tokens) for num_tokens in (3, 5, 8))
    verdicts = tuple(build_verdict(prompt, each, [], flags, max_tokens=8) for each in completions)
    assert [verdict.reward for verdict in verdicts] == [0.0, -0.25, -1.0]
    assert all(verdict.scores == {} for verdict in verdicts)
    group = RolloutGroup(ticket=0, prompt=prompt, completions=completions, verdicts=verdicts)
    assert verdict_metrics([group])["overlong_penalty"] == pytest.approx(-1.25 / 3)
    without = build_verdict(prompt, completions[-1], [], RewardSection(), max_tokens=8)
    group = RolloutGroup(ticket=0, prompt=prompt, completions=completions[:1], verdicts=(without,))
    assert without.reward == 0.0 and "overlong_penalty" not in verdict_metrics([group])


def completion_of(num_tokens: int) -> Completion:
    return Completion(
        token_ids=(5,) * num_tokens,
        logprobs=(-0.1,) * num_tokens,
        versions=(0,) * num_tokens,
        text="5",
        finish_reason="stop",
        seed=0,
    )
