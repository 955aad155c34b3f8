"""Steps from which nothing can be learned: what is said of them, and when that ends the run."""

from dataclasses import replace

import pytest

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import RunError
from open_instruct.core.records import RolloutGroup, Verdict
from open_instruct.rl.step_checks import MAX_SILENT_STEPS, SignalWatch, refuse_failed_verdicts
from tests.unit.fake_rollouts import completion, group_of, grpo_config

CONFIG = grpo_config("--apply_r1_style_format_reward")
CUT_ANSWERS = [completion(ends="length")] * 2

RIGHT, WRONG, MIXED = (
    group_of(rewards, format=1.0) for rewards in ([1.0, 1.0], [0.0, 0.0], [0.0, 1.0])
)
FORMLESS = group_of([0.0, 0.0], format=0.0)
CUT = group_of([0.0, 0.0], CUT_ANSWERS, format=0.0)
MIXED_CUT = group_of([0.0, 1.0], CUT_ANSWERS, format=1.0)


def new_watch(config: GRPOConfig) -> SignalWatch:
    return SignalWatch(
        has_critic=config.rollout.has_critic,
        judges_format=config.reward.apply_r1_style_format_reward,
        response_length=config.data.response_length,
    )


def warnings_of(steps: list[list[RolloutGroup]]) -> list[list[str]]:
    """By step."""
    watch = new_watch(CONFIG)
    return [watch.after_step(groups, num_samples=4) for groups in steps]


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([RIGHT], "every answer was right"),
        ([WRONG], "every answer was wrong"),
        ([CUT], "every completion was cut off at --response_length 256 tokens"),
        ([FORMLESS], "no completion had the form <think>"),
        ([FORMLESS, WRONG], "every answer was wrong"),
        ([RIGHT, WRONG], "the completions of each prompt all got the same reward"),
        (
            [group_of([0.5, 0.5], format=1.0)],
            "the completions of each prompt all got the same reward",
        ),
    ],
)
def test_silence_is_told_once_with_its_reason(groups: list[RolloutGroup], reason: str) -> None:
    *before, warnings = warnings_of([groups] * MAX_SILENT_STEPS)
    assert not any(before)
    assert f"last {MAX_SILENT_STEPS} steps" in warnings[0] and reason in warnings[0]
    assert sum(map(len, warnings_of([groups] * MAX_SILENT_STEPS * 3))) == len(warnings)


def test_reason_holds_for_all_of_the_steps() -> None:
    warnings = warnings_of([[CUT]] * (MAX_SILENT_STEPS - 1) + [[WRONG]])[-1]
    assert "every answer was wrong" in warnings[0]


def test_group_with_a_signal_starts_the_count_anew() -> None:
    silent = [[WRONG]] * (MAX_SILENT_STEPS - 1)
    assert not any(warnings_of([*silent, [WRONG, MIXED], *silent]))


def test_signal_of_completions_that_are_all_left_out_is_none() -> None:
    watch = new_watch(CONFIG)
    *_, warnings = [watch.after_step([MIXED_CUT], num_samples=0) for _ in range(MAX_SILENT_STEPS)]
    assert "no group" in warnings[0] and "cut off" in warnings[0]


def test_critic_compares_all_completions_of_a_step() -> None:
    watch = new_watch(grpo_config("--advantages", "gae"))
    steps = [[RIGHT, WRONG]] * MAX_SILENT_STEPS + [[RIGHT, RIGHT]] * MAX_SILENT_STEPS
    *before, warnings = [watch.after_step(groups, num_samples=4) for groups in steps]
    assert not any(before) and "every answer was right" in warnings[0]


def test_completions_that_are_mostly_cut_lead_to_one_warning() -> None:
    """Also where some are judged right, so that there is a signal."""
    *before, warnings = warnings_of([[MIXED_CUT, MIXED_CUT, MIXED_CUT, RIGHT]] * MAX_SILENT_STEPS)
    assert not any(before)
    (warning,) = warnings
    assert warning.startswith(
        "75% of the completions of the last 5 steps were cut off at --response_length 256 tokens"
    )
    assert "Raise it, or start from a model that has learned to end its answers" in warning
    assert sum(map(len, warnings_of([[MIXED_CUT]] * 20))) == 1


def test_few_cut_completions_give_no_warning() -> None:
    """Nor is a step of cut ones."""
    some = [[MIXED, MIXED, CUT]] * 8
    assert not any(warnings_of([[], [CUT], *some, [CUT], *some]))


def test_step_whose_verdicts_all_failed_ends_the_run() -> None:
    late = Verdict(reward=0.0, scores={"mine": 0.0}, problems=("mine: KeyError: 'x'",))
    broken = replace(WRONG, verdicts=(late, late))
    with pytest.raises(
        RunError, match=r"all 4 verdicts of a step failed.* The first: mine: KeyError: 'x'\. .*Mend"
    ):
        refuse_failed_verdicts([broken, broken])
    refuse_failed_verdicts([broken, WRONG])
    refuse_failed_verdicts([])
