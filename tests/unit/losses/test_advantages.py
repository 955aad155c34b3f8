"""Every way from rewards to advantages against its paper's equation, on random groups and on those
without a signal.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import pytest

from open_instruct.config.rollout_sections import RolloutSection
from open_instruct.core.records import Check, Completion, Prompt, RolloutGroup, Verdict
from open_instruct.losses.advantages import (
    ADVANTAGES,
    compute_advantages,
    group_advantages,
    has_signal,
)
from open_instruct.rl.samples import RolloutStepBatch, training_samples
from tests.refusals import refused

PASS_K = 3
FLAGS = RolloutSection(advantage_pass_k=PASS_K)
WEIGHTS = {"math": 2.0, "form": 0.5}


def group(scores: Sequence[dict[str, float]], rewards: Sequence[float]) -> RolloutGroup:
    checks = tuple(
        Check(verifier=name, ground_truth="", weight=weight) for name, weight in WEIGHTS.items()
    )
    return RolloutGroup(
        ticket=0,
        prompt=Prompt(row_id=0, token_ids=(1, 2), text="", checks=checks),
        completions=tuple(
            Completion(
                token_ids=(3,),
                logprobs=(-1.0,),
                versions=(0,),
                text="",
                finish_reason="stop",
                seed=0,
            )
            for _ in rewards
        ),
        verdicts=tuple(Verdict(reward=r, scores=s) for r, s in zip(rewards, scores, strict=True)),
    )


def random_groups(seed: int) -> list[RolloutGroup]:
    chance = random.Random(seed)
    groups = []
    for _ in range(4):
        size = chance.randint(PASS_K, 6)
        scores = [{name: float(chance.random() < 0.6) for name in WEIGHTS} for _ in range(size)]
        groups.append(group(scores, [chance.choice([0.0, 0.3, 1.0, 2.0]) for _ in range(size)]))
    return groups


def same(size: int, reward: float, score: float) -> RolloutGroup:
    return group([dict.fromkeys(WEIGHTS, score)] * size, [reward] * size)


def normalised(values: list[float]) -> list[float]:
    std = statistics.pstdev(values)
    return [(v - statistics.fmean(values)) / std if std > 1e-9 else 0.0 for v in values]


def flat(
    groups: Sequence[RolloutGroup], of_group: Callable[[list[float]], list[float]]
) -> list[float]:
    return [value for each in groups for value in of_group(list(each.rewards))]


def centered(rewards: list[float]) -> list[float]:
    return [r - statistics.fmean(rewards) for r in rewards]


def batch(groups: Sequence[RolloutGroup]) -> list[float]:
    std = statistics.pstdev([r for each in groups for r in each.rewards])
    return [value / std for value in flat(groups, centered)]


def rloo(rewards: list[float]) -> list[float]:
    return [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def maxrl(rewards: list[float]) -> list[float]:
    mean = statistics.fmean(rewards)
    return [(r - mean) / mean if mean > 0 else 0.0 for r in rewards]


def gdpo(groups: Sequence[RolloutGroup]) -> list[float]:
    sums = []
    for each in groups:
        of_verifiers = [
            [
                weight * value
                for value in normalised([verdict.scores[name] for verdict in each.verdicts])
            ]
            for name, weight in WEIGHTS.items()
        ]
        sums += [sum(parts) for parts in zip(*of_verifiers, strict=True)]
    return normalised(sums)


def pass_at_k(groups: Sequence[RolloutGroup]) -> list[float]:
    """By enumeration: the reward of every set of k is whether one is right; a completion has the
    mean of its sets'.
    """
    values = []
    for each in groups:
        right = [all(score == 1 for score in verdict.scores.values()) for verdict in each.verdicts]
        sets = [
            (chosen, float(any(right[i] for i in chosen)))
            for chosen in combinations(range(len(right)), PASS_K)
        ]
        of_sets = [reward for _, reward in sets]
        mean, std = statistics.fmean(of_sets), statistics.pstdev(of_sets)
        for i in range(len(right)):
            own = statistics.fmean(reward for chosen, reward in sets if i in chosen)
            values.append((own - mean) / std if std > 0 else 0.0)
    return values


FORMULAS: dict[str, Callable[[Sequence[RolloutGroup]], list[float]]] = {
    "standard": lambda groups: flat(groups, normalised),
    "centered": lambda groups: flat(groups, centered),
    "batch": batch,
    "rloo": lambda groups: flat(groups, rloo),
    "maxrl": lambda groups: flat(groups, maxrl),
    "reinforce_pp": lambda groups: normalised(flat(groups, centered)),
    "gdpo": gdpo,
    "gae": lambda groups: flat(groups, list),
    "pass_at_k": pass_at_k,
}


def test_every_way_has_a_formula() -> None:
    assert FORMULAS.keys() == ADVANTAGES.keys()


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str) -> None:
    for seed in range(8):
        groups = [*random_groups(seed), same(4, 1.0, 1.0), same(3, 0.0, 0.0)]
        ours = compute_advantages(groups, name, FLAGS)
        assert [len(of_group) for of_group in ours] == [len(each.completions) for each in groups]
        assert [a for of_group in ours for a in of_group] == pytest.approx(
            FORMULAS[name](groups), abs=1e-6
        )


@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "gae"])
def test_advantages_are_zero_when_rewards_are_equal(name: str) -> None:
    for groups in (
        [],
        [same(1, 1.0, 1.0)],
        [same(4, 0.0, 0.0), same(3, 0.0, 0.0)],
        [same(3, 0.1 * 3, 1.0)],
    ):
        ours = compute_advantages(groups, name, FLAGS)
        assert all(value == 0.0 for of_group in ours for value in of_group)


@pytest.mark.parametrize("normalization", ["standard", "centered"])
def test_rounding_error_is_no_signal(normalization: Literal["standard", "centered"]) -> None:
    """0.1 * 3 is not 0.3 in floating point, and the difference must not be divided by itself."""
    for rewards in ([], [1.0], [0.0, 0.0], [0.1 * 3, 0.3]):
        assert not has_signal(rewards)
        assert group_advantages(rewards, normalization) == (0.0,) * len(rewards)
    assert has_signal([0.0, 0.1])


def test_verifiers_that_cancel_have_a_signal_for_gdpo_alone() -> None:
    """One completion has the right form and the other the right answer, for the same reward."""
    scores = [{"math": 1.0, "form": 0.0}, {"math": 0.0, "form": 1.0}]
    step = RolloutStepBatch(groups=(group(scores, [1.0, 1.0]),))
    for name, num_used in (("standard", 0), ("gdpo", 2)):
        config = RolloutSection(advantage_normalization_type=name)
        assert len(training_samples(step, config=config, version=0).samples) == num_used


def own(folder: Path, body: str) -> str:
    file = folder / "own_advantages.py"
    file.write_text(f"def mine(groups):\n    return {body}\n")
    return f"{file}:mine"


def test_advantages_of_ones_own(tmp_path: Path) -> None:
    word = own(tmp_path, "[[reward - 0.25 for reward in group.rewards] for group in groups]")
    step = RolloutStepBatch(groups=(same(2, 0.25, 1.0), same(2, 1.0, 1.0)))
    learned = training_samples(
        step, config=RolloutSection(advantage_normalization_type=word), version=0
    )
    assert learned.advantages == ((0.0, 0.0), (0.75, 0.75))
    assert [sample.advantage for sample in learned.samples] == [0.75, 0.75]  # what is 0 is left out


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("[[1.0] for group in groups]", ("own_code", "advantages", "for every")),
        (
            "[[float('nan')] * len(group.rewards) for group in groups]",
            ("own_code", "advantages", "not finite"),
        ),
    ],
)
def test_numbers_that_are_no_advantages(body: str, told: tuple[Any, ...], tmp_path: Path) -> None:
    config: Any = RolloutSection(advantage_normalization_type=own(tmp_path, body))
    with refused(*told):
        training_samples(RolloutStepBatch(groups=(same(2, 0.0, 1.0),)), config=config, version=0)
