"""When engines and learners are said to disagree."""

import math

import pytest

from open_instruct.errors import RunError
from open_instruct.rollout.step_checks import check_agreement
from tests.unit.fake_rollouts import grpo_config


def agrees(mean: float, largest: float, dtypes: tuple[str, str]) -> bool:
    metrics = {"loss": 0.0, "logprob_diff/mean": mean, "logprob_diff/max": largest}
    return check_agreement(metrics, grpo_config("--param_dtype", dtypes[0], "--vllm_dtype", dtypes[1]))


@pytest.mark.parametrize(
    ("dtypes", "mean", "largest"),
    [
        (("float32", "float32"), 1e-6, 7e-6),
        (("bfloat16", "bfloat16"), 0.01, 0.3),
        (("float32", "bfloat16"), 0.01, 0.3),
        (("bfloat16", "bfloat16"), 0.01, 1.2),  # a rare token
    ],
)
def test_rounding_is_no_disagreement(dtypes: tuple[str, str], mean: float, largest: float) -> None:
    assert agrees(mean, largest, dtypes)


@pytest.mark.parametrize(
    ("dtypes", "mean", "largest"),
    [
        (("float32", "float32"), 0.01, 0.3),
        (("bfloat16", "bfloat16"), 0.5, 3.4),  # what a temperature that one side ignores comes to
        (("float32", "bfloat16"), 0.5, 3.4),
        (("float32", "float32"), math.nan, math.nan),
    ],
)
def test_more_than_rounding_is(dtypes: tuple[str, str], mean: float, largest: float) -> None:
    with pytest.raises(
        RunError, match=f"by {mean:.2g} on average and {largest:.2g} at most.*--tokenizer_name_or_path.*--vllm_runner"
    ):
        agrees(mean, largest, dtypes)


def test_a_step_without_a_signal_proves_nothing() -> None:
    assert not check_agreement({"loss": 0.0}, grpo_config())
