"""The groups of a step become the samples that learners train on, and the step's rollout
metrics.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import get_args

import numpy as np
from transformers import PreTrainedTokenizerFast

from open_instruct.batching.rollouts import RankStep, plan_steps_of_ranks
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.rollout_sections import RolloutSection
from open_instruct.core.records import (
    Completion,
    Document,
    EpisodeStatus,
    RolloutGroup,
    RolloutSample,
    Span,
    Verdict,
)
from open_instruct.core.user_code import own_function
from open_instruct.data.sft_rows import SFTBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.losses.advantages import ADVANTAGES, advantages_of, has_signal
from open_instruct.run.console import Console
from open_instruct.training.rows.datasets import reading


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStepBatch:
    """The groups of one step in ticket order, and those that active sampling replaced on the
    way.
    """

    groups: tuple[RolloutGroup, ...]
    rejected: tuple[RolloutGroup, ...] = ()
    num_given_up: int = 0  # groups that were passed over


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """The samples and advantages of a batch.

    `advantages[i][j]` and `is_used[i][j]` belong to completion j of group i; `samples` are the used
    ones, in that order.
    """

    samples: tuple[RolloutSample, ...]
    advantages: tuple[tuple[float, ...], ...]
    is_used: tuple[tuple[bool, ...], ...]
    metrics: dict[str, float]


def plan_rank_work(
    batch: RolloutStepBatch,
    *,
    step: int,
    config: GRPOConfig,
    conversations: TokenDataset | None,
    num_ranks: int,
) -> tuple[StepSamples, tuple[RankStep, ...]]:
    """The samples of `step` (1-based), and the work of each data-parallel rank, conversations
    included.
    """
    learned = training_samples(batch, config=config.rollout, version=step - 1)
    work = plan_steps_of_ranks(
        (*learned.samples, *sft_samples(conversations, step=step, config=config)),
        num_ranks=num_ranks,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch,
        num_mini_batches=config.loss.num_mini_batches,
        prefix_sharing=config.loss.prefix_sharing,
    )
    return learned, work


def training_samples(
    batch: RolloutStepBatch, *, config: RolloutSection, version: int
) -> StepSamples:
    """Choose what is trained on, and with which advantage; `version` is that of the weights about
    to be trained.

    A group whose advantages are all 0 is left out with `filter_zero_std_samples`, unless a critic
    makes others of them. With `mask_truncated_completions` a truncated completion is left out too,
    but its reward still counts in the mean of its group.
    """
    name = config.advantage_normalization_type
    own = own_function(name, flag="--advantages", known=ADVANTAGES)
    advantages = advantages_of(batch.groups, name, config, own=own)
    is_used: list[tuple[bool, ...]] = []
    samples: list[RolloutSample] = []
    for group, group_advantages in zip(batch.groups, advantages, strict=True):
        learns = any(group_advantages) or not config.filter_zero_std_samples or config.has_critic
        used: list[bool] = []
        for completion, advantage in zip(group.completions, group_advantages, strict=True):
            is_masked = config.mask_truncated_completions and completion.is_truncated
            if completion.episode is not None and completion.episode.has_failed:
                is_masked = is_masked or not config.learn_from_failed_episodes
            used.append(learns and len(completion.logprobs) > 0 and not is_masked)
            if used[-1]:
                sample = _sample(group, completion, advantage)
                if config.answers_ce_coef and completion.episode is not None:
                    sample = add_answer_loss(sample, completion, config.answers_ce_coef)
                samples.append(sample)
        is_used.append(tuple(used))
    everything = (*batch.groups, *batch.rejected)
    # How many steps older than the learners' weights are the weights that made each token.
    behind = [
        version - made
        for completion in all_completions(batch.groups)
        for made in completion.versions
    ]
    metrics = {
        **verdict_metrics(everything),
        **length_metrics(everything),
        **episode_metrics(everything),
        "staleness/mean": mean(behind),
        "staleness/max": float(max(behind, default=0)),
        "num_rejected_groups": float(len(batch.rejected)),
        "num_trained_completions": float(len(samples)),
        "num_generated_tokens": float(
            sum(len(each.logprobs) for each in all_completions(everything))
        ),
    }
    if not config.has_critic:
        metrics["zero_std_fraction"] = mean(
            [float(not has_signal(group.rewards)) for group in everything]
        )
    if config.num_spare_prompts:
        metrics["num_given_up_groups"] = float(batch.num_given_up)
    return StepSamples(
        samples=tuple(samples),
        advantages=tuple(advantages),
        is_used=tuple(is_used),
        metrics=metrics,
    )


def verdict_metrics(groups: Iterable[RolloutGroup]) -> dict[str, float]:
    """`reward`, `verifier/NAME` (means over the completions it judged), and
    `num_verifier_problems`.

    With `--overlong_penalty` also the mean of that.
    """
    verdicts = all_verdicts(groups)
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        for name, score in verdict.scores.items():
            scores[name].append(score)
    penalties = [
        verdict.overlong_penalty for verdict in verdicts if verdict.overlong_penalty is not None
    ]
    return {
        "reward": mean([verdict.reward for verdict in verdicts]),
        **({"overlong_penalty": mean(penalties)} if penalties else {}),
        **{f"verifier/{name}": mean(scores[name]) for name in sorted(scores)},
        "num_verifier_problems": float(sum(len(verdict.problems) for verdict in verdicts)),
    }


def length_metrics(groups: Iterable[RolloutGroup]) -> dict[str, float]:
    """`sequence_length/…` in generated tokens, and `truncated_fraction`."""
    completions = all_completions(groups)
    lengths = [len(completion.token_ids) for completion in completions]
    return {
        "sequence_length/mean": mean(lengths),
        "sequence_length/min": float(min(lengths, default=0)),
        "sequence_length/max": float(max(lengths, default=0)),
        "truncated_fraction": mean([float(completion.is_truncated) for completion in completions]),
    }


def episode_metrics(groups: Iterable[RolloutGroup]) -> dict[str, float]:
    """Of episodes in environments:

    `episodes/turns` (mean replies), and `episodes/STATUS`, the share that ended so.
    """
    episodes = [each.episode for each in all_completions(groups) if each.episode is not None]
    if not episodes:
        return {}
    shares = {
        status: mean([float(each.status == status) for each in episodes])
        for status in get_args(EpisodeStatus)
    }
    return {"episodes/turns": mean([len(each.replies) for each in episodes])} | {
        f"episodes/{status}": share for status, share in shares.items()
    }


def all_verdicts(groups: Iterable[RolloutGroup]) -> list[Verdict]:
    return list(chain.from_iterable(group.verdicts for group in groups))


def all_completions(groups: Iterable[RolloutGroup]) -> list[Completion]:
    return list(chain.from_iterable(group.completions for group in groups))


def num_right(group: RolloutGroup) -> int:
    """The number of completions that every verifier accepted in full."""
    return sum(verdict.is_right for verdict in group.verdicts)


def mean(values: Sequence[float]) -> float:
    """0 where there is nothing to average."""
    return math.fsum(values) / len(values) if values else 0.0


def _sample(group: RolloutGroup, completion: Completion, advantage: float) -> RolloutSample:
    prompt_ids = group.prompt.token_ids
    if completion.episode is not None:
        prompt_ids = completion.episode.prompt_token_ids or prompt_ids
    start = len(prompt_ids)
    responses = tuple(
        Span(start=start + reply.start, stop=start + reply.stop)
        for reply in completion.replies
        if reply
    )
    return RolloutSample(
        document=Document(token_ids=prompt_ids + completion.token_ids, responses=responses),
        engine_logprobs=completion.logprobs,
        advantage=advantage,
        routes=completion.routes,
    )


def add_answer_loss(sample: RolloutSample, completion: Completion, coef: float) -> RolloutSample:
    """An episode of which what its environment wrote is learned too, by cross-entropy alone,
    weighed by `coef`.

    What the template writes around an answer, the end of a reply that was cut among it, is not
    learned.

    Example: replies of two tokens and of one, between them three tokens of which the environment
    wrote the second, have `weights["ce"]` (0, 0, 0, coef, 0, 0).
    """
    assert completion.episode is not None
    replies = sample.document.responses
    places = range(replies[0].start, replies[-1].stop)
    num_prompt = len(sample.document.token_ids) - len(completion.token_ids)
    sampled = {place for reply in replies for place in range(reply.start, reply.stop)}
    answered = {
        num_prompt + place
        for answer in completion.episode.answers
        for place in range(answer.start, answer.stop)
    }
    is_reply = tuple(float(place in sampled) for place in places)
    logprobs = iter(sample.engine_logprobs)
    return replace(
        sample,
        document=replace(sample.document, responses=(Span(start=places.start, stop=places.stop),)),
        engine_logprobs=tuple(next(logprobs) if own else 0.0 for own in is_reply),
        weights={
            "rl": is_reply,
            "kl": is_reply,
            "ce": tuple(coef * (place in answered) for place in places),
        },
    )


def load_conversations(
    config: GRPOConfig, tokenizer: PreTrainedTokenizerFast, *, console: Console | None = None
) -> TokenDataset | None:
    """The rows of --sft_mixer_list, none where there is none; the `console` reports what becomes of
    them.

    Raises:
        InputError: for a bad row, a missing file, a bad amount.
    """
    data = config.data
    if not data.sft_mixer_list:
        return None
    given = reading(config, tokenizer, "sft_mixer_list")
    dataset, report = load_token_dataset(SFTBuilder, max_seq_length=data.max_seq_length, **given)
    if console is not None:
        console.report("conversations", report.lines())
    return dataset


def sft_samples(
    dataset: TokenDataset | None, *, step: int, config: GRPOConfig
) -> list[RolloutSample]:
    """The conversations of `step` (1-based): the next of a shuffled epoch, a function of the step
    alone.
    """
    if dataset is None:
        return []
    last = step * config.data.sft_rows_per_step
    samples = []
    for position in range(last - config.data.sft_rows_per_step, last):
        epoch, place = divmod(position, len(dataset))
        row = np.random.default_rng([config.optim.seed, epoch]).permutation(len(dataset))[place]
        (document,) = dataset[int(row)]
        zeros = (0.0,) * document.num_label_tokens
        weights = {"rl": zeros, "ce": (1.0,) * len(zeros), "kl": zeros}
        samples.append(
            RolloutSample(document=document, engine_logprobs=zeros, advantage=0.0, weights=weights)
        )
    return samples
