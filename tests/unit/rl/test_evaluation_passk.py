"""Evaluation on held-out prompts: what is asked, what is reported, and what goes wrong."""

import json
from concurrent.futures import Future
from itertools import combinations
from typing import Any

import pytest

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion, Prompt
from open_instruct.generation.requests import GenerationRequest
from open_instruct.rl.episodes.walk import Episodes
from open_instruct.rl.evaluation import evaluate, pass_at_k
from tests.unit.fake_rollouts import BusyPool, FakeDataset, FakePool, FakeReward, coin, grpo_config

PROMPTS = [FakeDataset(5)[i] for i in range(5)]


def config_of(*words: str) -> GRPOConfig:
    return grpo_config("--dataset_mixer_eval_list", "held_out.jsonl", "1.0", *words)


def evaluated(
    *words: str, reward: Any = coin, order: int = 0
) -> tuple[dict[str, float], list[dict[str, Any]], list[GenerationRequest]]:
    """Metrics, shown samples, and what was asked."""
    with BusyPool(order) as pool:
        metrics, samples = evaluate(
            PROMPTS, Episodes(pool, FakeReward(reward)), config=config_of(*words)
        )
    return metrics, samples, pool.requests


@pytest.mark.parametrize("num_right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(num_right: int, k: int) -> None:
    draws = list(combinations([True] * num_right + [False] * (5 - num_right), k))
    assert pass_at_k(5, num_right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_metrics() -> None:
    # Row 0: both samples right; row 1: the first; the others: none.
    def rule(prompt: Prompt, completion: Completion) -> float:
        return float(
            prompt.row_id == 0 or (prompt.row_id == 1 and completion.seed == first_of_row_1)
        )

    words = ("--eval_num_samples", "2", "--eval_pass_at_k", "1", "2")
    _, _, requests = evaluated(*words)
    first_of_row_1 = requests[2].seed
    metrics, _, _ = evaluated(*words, reward=rule)
    lengths = [request.seed % 3 + 1 for request in requests]
    assert metrics == {
        "eval/reward": 3 / 10,
        "eval/verifier/fake": 3 / 10,
        "eval/num_verifier_problems": 0,
        "eval/pass_at_1": pytest.approx((1 + 1 / 2) / 5),
        "eval/pass_at_2": 2 / 5,
        "eval/truncated_fraction": 0,
        "eval/sequence_length/mean": sum(lengths) / 10,
        "eval/sequence_length/min": min(lengths),
        "eval/sequence_length/max": max(lengths),
    }


@pytest.mark.parametrize(
    ("words", "num_samples"),
    [("--eval_pass_at_k 8", 8), ("--eval_num_samples 9 --eval_pass_at_k 8", 9)],
)
def test_number_of_completions_and_pass_at_1_need_no_flags(words: str, num_samples: int) -> None:
    metrics, _, requests = evaluated(*words.split())
    assert len(requests) == num_samples * len(PROMPTS)
    assert metrics["eval/pass_at_1"] == pytest.approx(metrics["eval/reward"])
    assert metrics["eval/pass_at_8"] > metrics["eval/pass_at_1"]


def test_every_evaluation_asks_the_same_whatever_comes_back_first() -> None:
    words = [
        "--eval_num_samples",
        "3",
        "--eval_temperature",
        "0.5",
        "--eval_top_p",
        "0.95",
        "--response_length",
        "9",
        "--stop_strings",
        "##",
    ]
    assert evaluated(*words, order=1) == evaluated(*words, order=2)
    _, _, requests = evaluated(*words)
    assert (
        len({request.seed for request in requests})
        == len({request.request_id for request in requests})
        == 15
    )
    sampling = requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.95, 9)
    assert sampling.stop_strings == ("##",)
    others = evaluated(*words, "--seed", "7")[2]
    assert not {request.seed for request in requests} & {request.seed for request in others}


def test_samples_to_show_are_those_of_the_first_prompts() -> None:
    _, samples, requests = evaluated()
    assert [sample["prompt"] for sample in samples] == ["prompt 0", "prompt 1", "prompt 2"]
    assert samples[0]["completion"] == f"answer {requests[0].seed}"
    assert samples[0]["ground_truth"] == ["0"]
    assert json.loads(json.dumps(samples)) == samples


class FailingPool(FakePool):
    """Answers at once, but for one request."""

    def submit(self, request: GenerationRequest, home: object = None) -> Future[Completion]:
        future = super().submit(request)
        self.finish(error=RunError("no engine is left") if len(self.requests) == 3 else None)
        return future


def test_failure_of_the_engines_is_passed_on() -> None:
    with pytest.raises(RunError, match="no engine is left"):
        evaluate(PROMPTS, Episodes(FailingPool(), FakeReward(coin)), config=config_of())


def test_failure_of_a_verifier_is_a_failure_of_the_run() -> None:
    def broken(prompt: Prompt, completion: Completion) -> float:
        raise ValueError("bad")

    with pytest.raises(
        RunError, match=r"completion eval/\d+/0 \(row \d+\) could not be judged: ValueError: bad"
    ):
        evaluated(reward=broken)


def test_lost_completion_is_counted_and_given_up() -> None:
    pool = FakePool()
    with pytest.raises(RunError, match="--step_timeout_s 1: 0 of 5 completions had come back"):
        evaluate(
            PROMPTS, Episodes(pool, FakeReward(coin)), config=config_of("--step_timeout_s", "1")
        )
    assert all(future.cancelled() for _, _, future in pool.pending)
