"""An evaluation: engines answer the held-out prompts with the weights that they have."""

import math
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import closing
from itertools import chain
from typing import Any

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import RunError
from open_instruct.core.records import Prompt, RolloutGroup
from open_instruct.core.text import spell_count
from open_instruct.generation.requests import SamplingSettings
from open_instruct.rl.episodes.walk import Episodes, PendingGroup, build_requests
from open_instruct.rl.samples import (
    episode_metrics,
    length_metrics,
    mean,
    num_right,
    verdict_metrics,
)

NUM_SHOWN = 3


def evaluate(
    prompts: Iterable[Prompt], episodes: Episodes, *, config: GRPOConfig
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Sample every prompt `config.evaluation.num_samples` times and judge; closes `episodes`.

    The seed of a request depends on the run's seed, the prompt and the sample alone, so what
    changes from one evaluation to the next is the policy.

    Returns:
        `eval/reward`, `eval/pass_at_K`, `eval/verifier/NAME`, `eval/truncated_fraction`,
        `eval/sequence_length/mean` and so on; and the first few prompts with an answer each, the
        same prompts every time.

    Raises:
        RunError: a completion could not be generated or judged, or `step_timeout_s` went by.
    """
    groups = _collect_groups(prompts, episodes, config=config)
    num_samples = config.evaluation.num_samples
    metrics = verdict_metrics(groups) | length_metrics(groups) | episode_metrics(groups)
    for k in sorted({1, *config.evaluation.eval_pass_at_k}):
        metrics[f"pass_at_{k}"] = mean(
            [pass_at_k(num_samples, num_right(group), k) for group in groups]
        )
    samples = [_describe_group(group) for group in groups[:NUM_SHOWN]]
    return {f"eval/{name}": value for name, value in metrics.items()}, samples


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The chance that at least one of k samples, drawn without replacement, is right.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374),
    section 2.1.

    Example: `pass_at_k(4, 2, 2)` is 1 - 1/6.
    """
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _collect_groups(
    prompts: Iterable[Prompt], episodes: Episodes, *, config: GRPOConfig
) -> list[RolloutGroup]:
    num_samples = config.evaluation.num_samples
    sampling = SamplingSettings(
        temperature=config.evaluation.eval_temperature,
        top_p=config.evaluation.eval_top_p,
        max_tokens=config.data.response_length,
        stop_strings=tuple(config.rollout.stop_strings),
    )
    timeout_s = config.fleet.step_timeout_s
    with closing(episodes):
        groups: list[PendingGroup] = []
        for index, prompt in enumerate(prompts):
            requests = build_requests(
                prompt, num_samples, sampling, seed=config.optim.seed, place=("eval", index)
            )
            groups.append(episodes.ask(index, prompt, requests))
        answers = list(chain.from_iterable(group.answers for group in groups))
        finished, pending = wait(answers, timeout_s, return_when=FIRST_EXCEPTION)
        for answer in finished:
            answer.result()  # raises what failed
        if pending:
            raise RunError(
                f"the evaluation was not done after --step_timeout_s {timeout_s}: {len(finished)} "
                "of "
                f"{spell_count(len(answers), 'completion')} had come back and were judged; raise "
                "it, or give fewer held-out prompts"
            )
        return [group.rollouts() for group in groups]


def _describe_group(group: RolloutGroup) -> dict[str, Any]:
    completion = group.completions[0]
    verdict = group.verdicts[0]
    return {
        "row_id": group.prompt.row_id,
        "prompt": group.prompt.text,
        "completion": completion.text,
        "ground_truth": [check.ground_truth for check in group.prompt.checks],
        "reward": verdict.reward,
        "scores": verdict.scores,
        "finish_reason": completion.finish_reason,
    }
