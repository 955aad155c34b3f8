"""Held-out prompts, answered with the weights that the engines have."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from open_instruct.config.grpo import GRPOConfig
from open_instruct.engines.engine_pool import EnginePool
from open_instruct.engines.requests import SamplingSettings
from open_instruct.errors import RunError
from open_instruct.parallel.wording import counted
from open_instruct.records import Completion, Prompt, RolloutGroup, Verdict
from open_instruct.rollout.conductor import samples_of
from open_instruct.rollout.samples import length_metrics, mean, verdict_metrics
from open_instruct.verifiers.reward import RewardModel

NUM_JUDGING_THREADS = 16
NUM_SHOWN = 3


def evaluate(
    prompts: Iterable[Prompt], pool: EnginePool, reward: RewardModel, *, config: GRPOConfig
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Ask every prompt `config.evaluation.num_samples` times and judge the answers.

    The seed of a request depends on the run's seed, the prompt and the sample alone, so what changes from one
    evaluation to the next is the policy.

    Returns:
        `eval/reward`, `eval/pass_at_K`, `eval/verifier/NAME`, `eval/truncated_fraction`,
        `eval/sequence_length/mean` and their like; and the first few prompts with an answer each: the same ones every
        time.

    Raises:
        RunError: a completion could not be generated or judged, or `step_timeout_s` went by.
    """
    groups = _answered(prompts, pool, reward, config=config)
    num_right = [sum(verdict.is_right for verdict in group.verdicts) for group in groups]
    num_samples = config.evaluation.num_samples
    metrics = verdict_metrics(groups) | length_metrics(groups)
    for k in sorted({1, *config.evaluation.eval_pass_at_k}):
        metrics[f"pass_at_{k}"] = mean([pass_at_k(num_samples, right, k) for right in num_right])
    return {f"eval/{name}": value for name, value in metrics.items()}, [_shown(group) for group in groups[:NUM_SHOWN]]


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The chance that at least one of k samples, drawn without replacement, is right.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), section 2.1.

    Example: `pass_at_k(4, 2, 2)` is 1 - 1/6.
    """
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _answered(
    prompts: Iterable[Prompt], pool: EnginePool, reward: RewardModel, *, config: GRPOConfig
) -> list[RolloutGroup]:
    num_samples = config.evaluation.num_samples
    sampling = SamplingSettings(
        temperature=config.evaluation.eval_temperature,
        top_p=config.evaluation.eval_top_p,
        max_tokens=config.data.response_length,
        stop_strings=tuple(config.rollout.stop_strings),
    )
    deadline_s = time.monotonic() + config.fleet.step_timeout_s

    def left_s() -> float:
        return max(0.0, deadline_s - time.monotonic())

    asked = list(prompts)
    completions: dict[tuple[int, int], Future[Completion]] = {}
    verdicts: dict[tuple[int, int], Future[Verdict]] = {}
    judges = ThreadPoolExecutor(NUM_JUDGING_THREADS, thread_name_prefix="judge")
    try:
        for index, prompt in enumerate(asked):
            requests = samples_of(prompt, num_samples, sampling, seed=config.optim.seed, place=("eval", index))
            completions |= {(index, sample): pool.submit(request) for sample, request in enumerate(requests)}
        places = {future: place for place, future in completions.items()}
        for future in as_completed(places, timeout=left_s()):
            place = places[future]
            verdicts[place] = judges.submit(reward.judge, asked[place[0]], future.result())
        return [
            RolloutGroup(
                ticket=index,
                prompt=prompt,
                completions=tuple(completions[index, sample].result() for sample in range(num_samples)),
                verdicts=tuple(verdicts[index, sample].result(left_s()) for sample in range(num_samples)),
            )
            for index, prompt in enumerate(asked)
        ]
    except RunError:
        raise
    except TimeoutError as error:
        raise RunError(
            f"the evaluation was not done after --step_timeout_s {config.fleet.step_timeout_s}: {len(verdicts)} of "
            f"{counted(len(asked) * num_samples, 'completion')} had come back; raise it, or give fewer held-out prompts"
        ) from error
    except Exception as error:
        raise RunError(f"the evaluation failed: {type(error).__name__}: {error}") from error
    finally:
        for future in completions.values():
            future.cancel()
        judges.shutdown(wait=False, cancel_futures=True)


def _shown(group: RolloutGroup) -> dict[str, Any]:
    completion, verdict = group.completions[0], group.verdicts[0]
    return {
        "row_id": group.prompt.row_id,
        "prompt": group.prompt.text,
        "completion": completion.text,
        "ground_truth": [check.ground_truth for check in group.prompt.checks],
        "reward": verdict.reward,
        "scores": verdict.scores,
        "finish_reason": completion.finish_reason,
    }
