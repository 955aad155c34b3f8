"""A step's groups become the samples that learners train on, and the step's rollout metrics."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import get_args

import numpy as np
from transformers import PreTrainedTokenizerFast

from open_instruct.batching.rollouts import RankStep, plan_steps_of_ranks
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.rollout_sections import PromptDataSection, RolloutSection
from open_instruct.core.records import (
    Completion,
    EpisodeStatus,
    RolloutGroup,
    RolloutSample,
    Span,
    Verdict,
)
from open_instruct.core.user_code import load_own_function
from open_instruct.data.sft_rows import choose_builder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.losses.advantages import ADVANTAGES, compute_advantages, has_signal
from open_instruct.rl.branches import (
    find_agent_names,
    group_by_prompt,
    judge_agent,
    list_branches,
    list_versions,
    make_samples,
)
from open_instruct.run.console import Console
from open_instruct.training.rows.datasets import build_load_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStepBatch:
    """The groups of one step in ticket order, and those that active sampling replaced."""

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
    """Choose the samples of `step` (1-based), and plan the work of each data-parallel rank.

    The work includes the step's conversations.
    """
    step_samples = training_samples(batch, config=config.rollout, version=step - 1)
    conversation_samples = sft_samples(
        conversations,
        step=step,
        num_rows_per_step=config.data.sft_rows_per_step,
        seed=config.optim.seed,
    )
    work = plan_steps_of_ranks(
        (*step_samples.samples, *conversation_samples),
        num_ranks=num_ranks,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch,
        num_mini_batches=config.loss.num_mini_batches,
        prefix_sharing=config.loss.prefix_sharing,
    )
    return step_samples, work


def training_samples(
    batch: RolloutStepBatch, *, config: RolloutSection, version: int
) -> StepSamples:
    """Choose the samples to train on, each with its advantage.

    A group whose advantages are all 0 is left out with `filter_zero_std_samples`, unless a critic
    makes others of them. With `mask_truncated_completions` a truncated completion is left out too,
    but its reward still counts in the mean of its group.

    Args:
        version: of the weights that the step will train.
    """
    name = config.advantage_normalization_type
    function = load_own_function(name, flag="--advantages", built_in=ADVANTAGES)
    compute = partial(compute_advantages, name=name, section=config, function=function)
    advantages = compute(batch.groups)
    advantages_by_agent = {"": advantages}
    for agent in find_agent_names(batch.groups):
        advantages_by_agent[agent] = compute([judge_agent(group, agent) for group in batch.groups])
    is_used: list[tuple[bool, ...]] = []
    samples: list[RolloutSample] = []
    for number, group in enumerate(batch.groups):
        of_group = {agent: each[number] for agent, each in advantages_by_agent.items()}
        has_advantage = any(map(any, of_group.values()))
        learns = has_advantage or not config.filter_zero_std_samples or config.has_critic
        are_used: list[bool] = []
        group_samples: list[RolloutSample] = []
        for index, completion in enumerate(group.completions):
            samples_of_one: list[RolloutSample] = []
            if learns and _can_train_on(completion, config):
                of_one = {agent: each[index] for agent, each in of_group.items()}
                samples_of_one = make_samples(group, completion, of_one, config.agent_branches)
            if samples_of_one and config.answers_ce_coef and completion.episode is not None:
                coef = config.answers_ce_coef
                samples_of_one[0] = add_answer_loss(samples_of_one[0], completion, coef)
            are_used.append(bool(samples_of_one))
            group_samples += samples_of_one
        is_used.append(tuple(are_used))
        if any(map(list_branches, group.completions)):
            group_samples = group_by_prompt(group_samples)
        samples += group_samples
    num_trained = sum(map(sum, is_used))
    metrics = _rollout_metrics(batch, num_trained=num_trained, config=config, version=version)
    return StepSamples(
        samples=tuple(samples),
        advantages=tuple(advantages),
        is_used=tuple(is_used),
        metrics=metrics,
    )


def _can_train_on(completion: Completion, config: RolloutSection) -> bool:
    """Whether no flag leaves a completion out."""
    if config.mask_truncated_completions and completion.is_truncated:
        return False
    has_failed = completion.episode is not None and completion.episode.has_failed
    return config.learn_from_failed_episodes or not has_failed


def _rollout_metrics(
    batch: RolloutStepBatch,
    *,
    num_trained: int,
    config: RolloutSection,
    version: int,
) -> dict[str, float]:
    """The metrics of a step's rollouts; rejected groups count in all but staleness."""
    groups = (*batch.groups, *batch.rejected)
    # How many steps older than the learners' weights are the weights that made each token.
    ages: list[int] = []
    for completion in all_completions(batch.groups):
        ages += [version - token_version for token_version in list_versions(completion)]
    num_tokens = sum(
        sum(1 for _ in list_versions(completion)) for completion in all_completions(groups)
    )
    metrics = {
        **verdict_metrics(groups),
        **length_metrics(groups),
        **episode_metrics(groups),
        "staleness/mean": mean(ages),
        "staleness/max": float(max(ages, default=0)),
        "staleness/older_fraction": sum(age > 0 for age in ages) / max(1, len(ages)),
        "num_rejected_groups": float(len(batch.rejected)),
        "num_trained_completions": float(num_trained),
        "num_generated_tokens": float(num_tokens),
    }
    if not config.has_critic:
        are_silent = [float(not has_signal(group.rewards)) for group in groups]
        metrics["zero_std_fraction"] = mean(are_silent)
    if config.num_spare_prompts:
        metrics["num_given_up_groups"] = float(batch.num_given_up)
    return metrics


def verdict_metrics(groups: Iterable[RolloutGroup]) -> dict[str, float]:
    """The means `reward` and `verifier/NAME`, and `num_verifier_problems`.

    A verifier's mean is over the completions that it judged. With `--overlong_penalty` the mean
    penalty is there too.
    """
    verdicts = all_verdicts(groups)
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        for name, score in verdict.scores.items():
            scores[name].append(score)
    penalties = [
        verdict.overlong_penalty for verdict in verdicts if verdict.overlong_penalty is not None
    ]
    metrics = {"reward": mean([verdict.reward for verdict in verdicts])}
    if penalties:
        metrics["overlong_penalty"] = mean(penalties)
    for name in sorted(scores):
        metrics[f"verifier/{name}"] = mean(scores[name])
    num_problems = sum(len(verdict.problems) for verdict in verdicts)
    metrics["num_verifier_problems"] = float(num_problems)
    return metrics


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
    """`episodes/turns` and `episodes/branches`, mean numbers of replies and of lines, and
    `episodes/STATUS`, the share that ended so.

    Empty where no prompt has an environment.
    """
    episodes = [each.episode for each in all_completions(groups) if each.episode is not None]
    if not episodes:
        return {}
    num_turns = []
    for each in episodes:
        num_more = sum(len(branch.replies) - branch.num_shared for branch in each.branches)
        num_turns.append(len(each.replies) + num_more)
    metrics = {
        "episodes/turns": mean(num_turns),
        "episodes/branches": mean([1 + len(each.branches) for each in episodes]),
    }
    for status in get_args(EpisodeStatus):
        have_ended_so = [float(each.status == status) for each in episodes]
        metrics[f"episodes/{status}"] = mean(have_ended_so)
    return metrics


def all_verdicts(groups: Iterable[RolloutGroup]) -> list[Verdict]:
    return list(chain.from_iterable(group.verdicts for group in groups))


def all_completions(groups: Iterable[RolloutGroup]) -> list[Completion]:
    return list(chain.from_iterable(group.completions for group in groups))


def num_right(group: RolloutGroup) -> int:
    """How many completions every verifier accepted in full."""
    return sum(verdict.is_right for verdict in group.verdicts)


def mean(values: Sequence[float]) -> float:
    """The mean; 0 where there is nothing to average."""
    if not values:
        return 0.0
    return math.fsum(values) / len(values)


def add_answer_loss(sample: RolloutSample, completion: Completion, coef: float) -> RolloutSample:
    """Learn what an episode's environment wrote too, by cross-entropy alone, weighed by `coef`.

    What the template writes around an answer is not learned, such as the end of a reply that was
    cut.

    Example: replies of two tokens and of one, between them three tokens of which the environment
    wrote the second, have `weights["ce"]` (0, 0, 0, coef, 0, 0).
    """
    assert completion.episode is not None
    replies = sample.document.responses
    places = range(replies[0].start, replies[-1].stop)
    num_prompt = len(sample.document.token_ids) - len(completion.token_ids)
    is_reply = [0.0] * len(places)
    engine_logprobs = [0.0] * len(places)
    num_done = 0
    for reply in replies:
        at = slice(reply.start - places.start, reply.stop - places.start)
        is_reply[at] = [1.0] * len(reply)
        engine_logprobs[at] = sample.engine_logprobs[num_done : num_done + len(reply)]
        num_done += len(reply)
    answer_places: set[int] = set()
    for answer in completion.episode.answers:
        answer_places.update(range(num_prompt + answer.start, num_prompt + answer.stop))
    whole = Span(start=places.start, stop=places.stop)
    return replace(
        sample,
        document=replace(sample.document, responses=(whole,)),
        engine_logprobs=tuple(engine_logprobs),
        weights={
            "rl": tuple(is_reply),
            "kl": tuple(is_reply),
            "ce": tuple(coef * (place in answer_places) for place in places),
        },
    )


def load_conversations(
    data: PromptDataSection,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    console: Console | None = None,
) -> TokenDataset | None:
    """Load the rows of --sft_mixer_list, if there are any; the `console` reports on them.

    Raises:
        InputError: for a bad row, a missing file, a bad amount.
    """
    if not data.sft_mixer_list:
        return None
    arguments = build_load_arguments(data, tokenizer, "sft_mixer_list", seed=seed)
    arguments["max_seq_length"] = data.max_seq_length
    make_builder = choose_builder(splits_replies=data.split_replies)
    dataset, report = load_token_dataset(make_builder, **arguments)
    if console is not None:
        console.report("conversations", report.lines())
    return dataset


def sft_samples(
    dataset: TokenDataset | None,
    *,
    step: int,
    num_rows_per_step: int,
    seed: int,
) -> list[RolloutSample]:
    """The conversations of `step` (1-based): the next rows of a shuffled epoch.

    They depend on the seed and the step alone.
    """
    if dataset is None:
        return []
    first = (step - 1) * num_rows_per_step
    samples = []
    for position in range(first, first + num_rows_per_step):
        epoch, place = divmod(position, len(dataset))
        order = np.random.default_rng([seed, epoch]).permutation(len(dataset))
        row = order[place]
        (document,) = dataset[int(row)]
        zeros = (0.0,) * document.num_label_tokens
        weights = {
            "rl": zeros,
            "ce": (1.0,) * len(zeros),
            "kl": zeros,
        }
        samples.append(
            RolloutSample(
                document=document,
                engine_logprobs=zeros,
                advantage=0.0,
                weights=weights,
            )
        )
    return samples
