"""What of a step's groups is trained on, with which advantage, and what the step's metrics say of them."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest

from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.parser import parse
from open_instruct.config.rollout_sections import RolloutSection
from open_instruct.records import Completion, Document, Prompt, RolloutGroup, RolloutSample, Span, Verdict
from open_instruct.rollout.samples import RolloutStepBatch, training_samples

PROMPT = Prompt(row_id=7, token_ids=(1, 40, 2), text="?", checks=())


def config_of(*words: str) -> RolloutSection:
    required = ["--model_name_or_path", "m", "--dataset_mixer_list", "prompts.jsonl", "1.0", "--output_dir", "out"]
    return parse(GRPOConfig, [*required, *words]).rollout


def completion(
    num_tokens: int, *, versions: tuple[int, ...] | None = None, ends: Literal["stop", "length"] = "stop"
) -> Completion:
    return Completion(
        token_ids=tuple(range(60, 60 + num_tokens)),
        logprobs=tuple(-0.1 * i for i in range(num_tokens)),
        versions=versions or (0,) * num_tokens,
        text="",
        finish_reason=ends,
        seed=0,
    )


def group(ticket: int, *answers: tuple[float, Completion], **scores: float) -> RolloutGroup:
    return RolloutGroup(
        ticket=ticket,
        prompt=PROMPT,
        completions=tuple(each for _, each in answers),
        verdicts=tuple(Verdict(reward=reward, scores=scores or {"math": reward}) for reward, _ in answers),
    )


def batch_of(*groups: RolloutGroup, rejected: tuple[RolloutGroup, ...] = ()) -> RolloutStepBatch:
    return RolloutStepBatch(groups=groups, rejected=rejected)


MIXED = group(0, (1.0, completion(2)), (0.0, completion(4, ends="length")))
SOLVED = group(1, (1.0, completion(1)), (1.0, completion(3)))


def test_a_sample_is_prompt_and_completion_with_the_engines_logprobs() -> None:
    learned = training_samples(batch_of(MIXED), config=config_of(), version=0)
    assert learned.samples[0] == RolloutSample(
        document=Document(token_ids=(1, 40, 2, 60, 61), responses=(Span(start=3, stop=5),)),
        engine_logprobs=(-0.0, -0.1),
        advantage=pytest.approx(1.0),
    )
    assert [sample.advantage for sample in learned.samples] == pytest.approx([1.0, -1.0])
    assert [len(sample.document) for sample in learned.samples] == [3 + 2, 3 + 4]


def test_advantages_are_centered_where_asked() -> None:
    config = config_of("--advantage_normalization_type", "centered")
    assert training_samples(batch_of(MIXED), config=config, version=0).advantages == ((0.5, -0.5),)


@pytest.mark.parametrize(
    ("words", "is_used"),
    [
        ([], ((True, True), (False, False))),
        (["--no_filter_zero_std_samples"], ((True, True), (True, True))),
        (["--mask_truncated_completions"], ((True, False), (False, False))),
        (["--mask_truncated_completions", "--no_filter_zero_std_samples"], ((True, False), (True, True))),
    ],
    ids=["filter", "keep", "mask", "mask_and_keep"],
)
def test_what_is_left_out(words: list[str], is_used: tuple[tuple[bool, ...], ...]) -> None:
    learned = training_samples(batch_of(MIXED, SOLVED), config=config_of(*words), version=0)
    assert learned.is_used == is_used
    # A truncated completion that is left out still counts in the mean of its group.
    assert learned.advantages[0] == pytest.approx((1.0, -1.0))
    assert learned.advantages[1] == (0.0, 0.0)
    used = [
        (each.token_ids, advantage)
        for of_group, flags, advantages in zip((MIXED, SOLVED), learned.is_used, learned.advantages, strict=True)
        for each, flag, advantage in zip(of_group.completions, flags, advantages, strict=True)
        if flag
    ]
    assert [(sample.document.token_ids[3:], sample.advantage) for sample in learned.samples] == used
    assert learned.metrics["num_trained_completions"] == len(used)


def test_a_completion_without_tokens_is_not_trained_on() -> None:
    nothing = group(0, (0.0, completion(0)), (1.0, completion(2)))
    learned = training_samples(batch_of(nothing), config=config_of(), version=0)
    assert learned.is_used == ((False, True),)


def test_metrics_of_a_step() -> None:
    rejected = group(2, (0.0, completion(5, ends="length")), (0.0, completion(5, ends="length")))
    learned = training_samples(batch_of(MIXED, SOLVED, rejected=(rejected,)), config=config_of(), version=0)
    assert learned.metrics == {
        # Of all that the policy was asked, or the reward would rise by what active sampling throws away.
        "reward": 3 / 6,
        "verifier/math": 3 / 6,
        "num_verifier_problems": 0,
        "sequence_length/mean": 20 / 6,
        "sequence_length/min": 1,
        "sequence_length/max": 5,
        "truncated_fraction": 3 / 6,
        "zero_std_fraction": 2 / 3,
        "staleness/mean": 0,
        "staleness/max": 0,
        "num_rejected_groups": 1,
        "num_trained_completions": 2,
        "num_generated_tokens": 20,
    }
    assert sum(len(sample.document) for sample in learned.samples) == 2 * 3 + 6


def test_each_verifier_is_averaged_over_what_it_judged() -> None:
    words = group(0, (0.5, completion(1)), (0.5, completion(1)), format=1.0, ifeval=0.25)
    learned = training_samples(batch_of(MIXED, words), config=config_of(), version=0)
    shown = {name: value for name, value in learned.metrics.items() if name.startswith("verifier/")}
    assert shown == {"verifier/format": 1.0, "verifier/ifeval": 0.25, "verifier/math": 0.5}


def test_problems_of_verifiers_are_counted() -> None:
    late = Verdict(reward=0.0, scores={"math": 0.0}, problems=("math",))
    troubled = RolloutGroup(ticket=0, prompt=PROMPT, completions=(completion(1),) * 2, verdicts=(late, late))
    assert training_samples(batch_of(troubled), config=config_of(), version=0).metrics["num_verifier_problems"] == 2


def test_staleness_is_of_tokens() -> None:
    mixed = group(0, (1.0, completion(3, versions=(2, 2, 4))), (0.0, completion(1, versions=(4,))))
    metrics = training_samples(batch_of(mixed), config=config_of(), version=4).metrics
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (4 / 4, 2)


def test_a_batch_in_which_nothing_is_learned() -> None:
    learned = training_samples(batch_of(SOLVED), config=config_of(), version=0)
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
