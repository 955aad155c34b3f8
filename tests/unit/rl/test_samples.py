"""What of a step's groups is trained on, with which advantage, and what the step's metrics say of
them.
"""

import math
from dataclasses import replace
from typing import Any

import pytest

from open_instruct.batching.rollouts import build_rollout_batch, count_denominators
from open_instruct.core.batch_values import RLValues
from open_instruct.core.records import (
    Completion,
    Document,
    Episode,
    RolloutGroup,
    RolloutSample,
    Span,
    Verdict,
)
from open_instruct.rl.samples import RolloutStepBatch, StepSamples, training_samples
from tests.unit.fake_rollouts import completion, group_of, grpo_config

CUT = completion(4, ends="length")
MIXED = group_of([1.0, 0.0], [completion(2), CUT])
SOLVED = group_of([1.0, 1.0], [completion(1), completion(3)], ticket=1)


def learned_of(
    *groups: RolloutGroup, rejected: tuple[RolloutGroup, ...] = (), flags: str = ""
) -> StepSamples:
    batch = RolloutStepBatch(groups=groups, rejected=rejected)
    return training_samples(batch, config=grpo_config(*flags.split()).rollout, version=4)


def test_sample_is_prompt_and_completion_with_the_engines_logprobs() -> None:
    learned = learned_of(MIXED)
    assert learned.samples[0] == RolloutSample(
        document=Document(token_ids=(1, 40, 2, 60, 61), responses=(Span(start=3, stop=5),)),
        engine_logprobs=(-0.0, -0.1),
        advantage=pytest.approx(1.0),
    )
    assert [sample.advantage for sample in learned.samples] == pytest.approx([1.0, -1.0])
    assert [len(sample.document) for sample in learned.samples] == [3 + 2, 3 + 4]


def test_advantages_are_centered_where_asked() -> None:
    assert learned_of(MIXED, flags="--advantage_normalization_type centered").advantages == (
        (0.5, -0.5),
    )


@pytest.mark.parametrize(
    ("flags", "is_used"),
    [
        ("", ((True, True), (False, False))),
        ("--no_filter_zero_std_samples", ((True, True), (True, True))),
        ("--mask_truncated_completions", ((True, False), (False, False))),
        (
            "--mask_truncated_completions --no_filter_zero_std_samples",
            ((True, False), (True, True)),
        ),
    ],
)
def test_samples_leave_groups_without_signal_out(
    flags: str, is_used: tuple[tuple[bool, ...], ...]
) -> None:
    learned = learned_of(MIXED, SOLVED, flags=flags)
    assert learned.is_used == is_used
    # A truncated completion that is left out still counts in the mean of its group.
    assert learned.advantages[0] == pytest.approx((1.0, -1.0))
    assert learned.advantages[1] == (0.0, 0.0)
    used = [
        (each.token_ids, advantage)
        for group, flags_of_group, advantages in zip(
            (MIXED, SOLVED), is_used, learned.advantages, strict=True
        )
        for each, flag, advantage in zip(group.completions, flags_of_group, advantages, strict=True)
        if flag
    ]
    assert [(sample.document.token_ids[3:], sample.advantage) for sample in learned.samples] == used
    assert learned.metrics["num_trained_completions"] == len(used)


def test_critic_keeps_groups_with_equal_rewards() -> None:
    """Rewards go to the learner as they are, also those of groups that all got 0."""
    failed = group_of([0.0], [completion(1)], ticket=2)
    learned = learned_of(MIXED, SOLVED, failed, flags="--advantages gae")
    assert learned.is_used == ((True, True), (True, True), (True,))
    assert [sample.advantage for sample in learned.samples] == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert "zero_std_fraction" not in learned.metrics


def test_completion_without_tokens_is_not_trained_on() -> None:
    assert learned_of(group_of([0.0, 1.0], [completion(0), completion(2)])).is_used == (
        (False, True),
    )


def test_metrics_of_a_step() -> None:
    rejected = group_of([0.0, 0.0], [completion(5, ends="length", versions=(4,) * 5)] * 2)
    learned = learned_of(MIXED, SOLVED, rejected=(rejected,))
    assert learned.metrics == {
        # Of all that the policy was asked, or the reward would rise by what active sampling throws
        # away.
        "reward": 3 / 6,
        "verifier/math": 3 / 6,
        "num_verifier_problems": 0,
        "sequence_length/mean": 20 / 6,
        "sequence_length/min": 1,
        "sequence_length/max": 5,
        "truncated_fraction": 3 / 6,
        "zero_std_fraction": 2 / 3,
        "staleness/mean": 4,
        "staleness/max": 4,
        "staleness/older_fraction": 1,
        "num_rejected_groups": 1,
        "num_trained_completions": 2,
        "num_generated_tokens": 20,
    }
    assert sum(len(sample.document) for sample in learned.samples) == 2 * 3 + 6


def test_each_verifier_is_averaged_over_what_it_judged() -> None:
    metrics = learned_of(
        group_of([1.0, 0.0]), group_of([0.5, 0.5], format=1.0, ifeval=0.25)
    ).metrics
    shown = {name: value for name, value in metrics.items() if name.startswith("verifier/")}
    assert shown == {"verifier/format": 1.0, "verifier/ifeval": 0.25, "verifier/math": 0.5}


def test_problems_of_verifiers_are_counted() -> None:
    late = Verdict(reward=0.0, scores={"math": 0.0}, problems=("math",))
    assert learned_of(replace(MIXED, verdicts=(late, late))).metrics["num_verifier_problems"] == 2


def test_staleness_is_of_tokens() -> None:
    versions = [completion(3, versions=(2, 2, 4)), completion(1, versions=(4,))]
    metrics = learned_of(group_of([1.0, 0.0], versions)).metrics
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (4 / 4, 2)
    assert metrics["staleness/older_fraction"] == 2 / 4


def test_batch_in_which_nothing_is_learned() -> None:
    learned = learned_of(SOLVED)
    assert learned.samples == ()
    assert learned.metrics["zero_std_fraction"] == 1
    assert all(map(math.isfinite, learned.metrics.values()))


@pytest.mark.parametrize(
    ("scores", "right"),
    [
        ({}, False),
        ({"a": 1.0}, True),
        ({"a": 1.0, "b": 0.9}, False),
        ({"a": 1.0, "b": 1.0}, True),
        ({"reward_model": 7.3}, False),
    ],
)
def test_right_is_what_every_verifier_accepts_in_full(scores: dict[str, Any], right: bool) -> None:
    assert Verdict(reward=5.0, scores=scores).is_right == right


def test_episodes_that_begin_with_one_turn_share_it_and_learn_it_twice() -> None:
    """A reply of 9 tokens and a tool's answer of 3 are common to two of three; each has its own
    advantage there.
    """

    def episode(turn: int, reply: int) -> Completion:
        replies = (Span(start=0, stop=9), Span(start=12, stop=14))
        ids = (*(turn,) * 9, 7, 7, 7, reply, 2)
        steps = Episode(status="done", replies=replies, turns=())
        return replace(completion(11), token_ids=ids, episode=steps)

    samples = learned_of(
        group_of([1.0, 0.0, 0.5], [episode(50, 60), episode(51, 61), episode(50, 62)])
    ).samples
    batch = build_rollout_batch(samples, prefix_sharing="auto")
    first, second, third = (sample.advantage for sample in samples)
    # Of the prompt (3 tokens) and the turn (12) all but the tool's last token; of the prompt alone
    # all but its last.
    assert batch.packed.prefix_lengths == (0, 14, 2)
    row = [1, 40, 2, *[50] * 9, 7, 7, 7, 60, 2]
    assert batch.packed.input_ids_BT.tolist() == [[*row, 7, 62, 2, 2, *[51] * 9, 7, 7, 7, 61, 2]]
    assert batch.packed.label_positions_N.tolist()[:22] == [
        *range(2, 11),
        14,
        15,
        *range(2, 11),
        17,
        18,
    ]
    assert RLValues.read(batch.values).advantages_N.tolist() == pytest.approx(
        [*[first] * 11, *[third] * 11, *[second] * 11]
    )


def test_answers_of_environments_may_be_learned() -> None:
    """By cross-entropy alone: the policy loss has the tokens, log-probs and counts that it has
    without.
    """
    replies = (Span(start=0, stop=2), Span(start=5, stop=6))
    steps = Episode(status="done", replies=replies, turns=(), answers=(Span(start=3, stop=4),))
    ids = (50, 51, 8, 7, 9, 60)  # the template's tokens are around the answer's
    episode = replace(completion(3), token_ids=ids, logprobs=(-0.1, -0.2, -0.3), episode=steps)
    group = group_of([1.0, 0.0], [episode, episode])
    (plain, _), (both, _) = (
        learned_of(group, flags=f"--answers_ce_coef {coef}").samples for coef in (0.0, 0.25)
    )
    assert (
        plain.document.responses == (Span(start=3, stop=5), Span(start=8, stop=9))
        and not plain.weights
    )
    assert both.document.responses == (Span(start=3, stop=9),) and both.advantage == plain.advantage
    assert both.engine_logprobs == (-0.1, -0.2, 0.0, 0.0, 0.0, -0.3)
    is_reply = (1, 1, 0, 0, 0, 1)
    assert both.weights == {"rl": is_reply, "kl": is_reply, "ce": (0, 0, 0, 0.25, 0, 0)}
    counts, plain_counts = count_denominators([both]), count_denominators([plain])
    assert (
        counts["rl_labels"] == plain_counts["rl_labels"] == 3
        and counts["rl_rows"] == plain_counts["rl_rows"] == 1
    )
    assert (counts["ce_labels"], plain_counts["ce_labels"]) == (1, 0)
