"""When engines and learners are said to disagree, and when a sync is probed."""

import math
from concurrent.futures import Future

import pytest

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion
from open_instruct.rl.agreement import PROBE_EVERY, AgreementWatch, build_probe, plan_probe
from tests.unit.fake_rollouts import grpo_config

FLOAT32 = ("--param_dtype", "float32", "--vllm_dtype", "float32")


def measured(mean: float, largest: float | None = None, *, staleness: int = 0) -> dict[str, float]:
    largest = 10 * mean if largest is None else largest
    return {
        "logprob_diff/mean": mean,
        "logprob_diff/max": largest,
        "staleness/max": float(staleness),
    }


def probed(mean: float, largest: float | None = None) -> dict[str, float]:
    largest = 10 * mean if largest is None else largest
    return {"logprob_diff/probe_mean": mean, "logprob_diff/probe_max": largest}


def watch(*flags: str) -> AgreementWatch:
    config = grpo_config(*flags)
    return AgreementWatch(
        param_dtype=config.model.param_dtype,
        engine_dtype=config.engine_dtype,
        async_steps=config.rollout.async_steps,
    )


@pytest.mark.parametrize(
    ("dtypes", "mean", "largest", "agrees"),
    [
        (("float32", "float32"), 1e-6, 7e-6, True),
        (("bfloat16", "bfloat16"), 0.01, 0.3, True),
        (("float32", "bfloat16"), 0.01, 0.3, True),
        (("bfloat16", "bfloat16"), 0.01, 1.2, True),  # a rare token
        (("float32", "float32"), 0.01, 0.3, False),
        # What a temperature that one side ignores comes to.
        (("bfloat16", "bfloat16"), 0.5, 3.4, False),
        (("float32", "bfloat16"), 0.5, 3.4, False),
        (("float32", "float32"), math.nan, math.nan, False),
    ],
)
@pytest.mark.parametrize("step", [1, 2, 40])
def test_run_ends_when_a_step_differs_by_more_than_rounding(
    dtypes: tuple[str, str], mean: float, largest: float, agrees: bool, step: int
) -> None:
    watching = watch("--param_dtype", dtypes[0], "--vllm_dtype", dtypes[1])
    if agrees:
        watching.check(step, measured(mean, largest))
        return
    with pytest.raises(RunError) as error:
        watching.check(step, measured(mean, largest))
    assert f"{mean:.2g}" in str(error.value)
    remedy = "--vllm_runner" if step == 1 else "--weight_sync_backend"
    assert remedy in str(error.value)


def test_run_ends_when_a_probe_differs_by_more_than_rounding() -> None:
    watching = watch(*FLOAT32)
    watching.check(1, measured(1e-7) | probed(1e-7))
    with pytest.raises(RunError, match="step 20"):
        watching.check(20, measured(0.3, staleness=1) | probed(0.07))


def test_difference_of_older_weights_is_not_compared() -> None:
    watching = watch(*FLOAT32)
    assert watching.check(5, measured(0.3, staleness=1)) is None


def test_steps_without_completions_are_not_compared() -> None:
    assert watch(*FLOAT32).check(1, {"loss": 0.0, "staleness/max": 0.0}) is None


def test_growing_difference_is_warned_of_once() -> None:
    watching = watch("--param_dtype", "bfloat16", "--vllm_dtype", "bfloat16")
    warnings = [watching.check(step, measured(0.005 * step)) for step in range(1, 15)]
    (warning,) = [each for each in warnings if each is not None]
    assert "step 5" in warning  # the sixth: six times the first
    assert watch(*FLOAT32).check(1, measured(1e-6)) is None


def test_difference_that_grows_within_rounding_is_not_warned_of() -> None:
    watching = watch(*FLOAT32)
    assert [watching.check(step, measured(1e-7 * step)) for step in range(1, 100)] == [None] * 99


def test_syncs_are_probed_after_the_first_and_then_now_and_then() -> None:
    watching = watch("--async_steps", "1")
    due = []
    for step in range(1, 2 * PROBE_EVERY + 2):
        row = measured(1e-7, staleness=min(step - 1, 1))
        if watching.needs_probe(step, row):
            due.append(step)
            row |= probed(1e-7)
        watching.check(step, row)
    assert due == [1, PROBE_EVERY, 2 * PROBE_EVERY]


def test_syncs_of_an_on_policy_run_need_no_probe() -> None:
    watching = watch("--async_steps", "0")
    assert not any(watching.needs_probe(step, measured(1e-7)) for step in range(1, 3 * PROBE_EVERY))


def test_probe_gives_each_rank_the_same_tokens() -> None:
    config: GRPOConfig = grpo_config("--response_length", "8")
    request = build_probe(
        (5, 6, 7),
        step=20,
        rollout=config.rollout,
        response_length=config.data.response_length,
        seed=config.optim.seed,
    )
    answer: Future[Completion] = Future()
    answer.set_result(
        Completion(
            token_ids=(8, 2),
            logprobs=(-0.5, -0.25),
            versions=(20, 20),
            text="x",
            finish_reason="stop",
            seed=1,
        )
    )
    ranks = plan_probe(
        request,
        answer,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch,
        num_ranks=3,
    )
    assert request.sampling.max_tokens == 8
    assert len(ranks) == 3
    for rank in ranks:
        (sample,) = [
            sample for part in rank.minibatches for row in part.microbatches for sample in row
        ]
        assert sample.document.token_ids == (5, 6, 7, 8, 2)
        assert sample.engine_logprobs == (-0.5, -0.25)
