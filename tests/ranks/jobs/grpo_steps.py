"""GRPO's learner steps on made-up completions, case after case in the same ranks."""

import math
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from open_instruct.batching.rollouts import RankStep, plan_steps_of_ranks
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.core.records import Document, RolloutSample, Span
from open_instruct.models.heads.logprob_head import LogprobHead
from open_instruct.parallel.process import stop_process
from open_instruct.run.opening import join_run
from open_instruct.run.pretrained import open_pretrained
from open_instruct.training.grpo import GRPOLearner

GROUP = 4


def run_each(cases: list[dict[str, Any]], ports: list[int]) -> list[list[dict[str, float]]]:
    """The metrics of every step of every case; each case has a process group, and so a port, of its
    own.
    """
    results = []
    for case, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        results.append(_run(**case))
    return results


def _run(
    flags: list[str],
    *,
    completions: list[int],
    conversations: int = 0,
    one_at_a_time: bool = False,
    trees: bool = False,
    logits_per_chunk: int | None = None,
    routes: bool = False,
) -> list[dict[str, float]]:
    """Learn from as many completions as `completions` says, a step each, and from `conversations`
    beside them.
    """
    learner = Learner(flags, num_steps=len(completions))
    policy = learner.policy
    if logits_per_chunk is not None:
        assert isinstance(policy.model.lm_head, LogprobHead)
        policy.model.lm_head.max_logits_bytes = logits_per_chunk * 4 * learner.vocab_size
    rows = []
    for num_completions in completions:
        before = [parameter.detach().clone() for parameter in policy.model.parameters()]
        row = learner.take_step(
            num_completions,
            num_given=conversations,
            one_at_a_time=one_at_a_time,
            trees=trees,
            routes=routes,
        )
        moved = any(not equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
        rows.append(row | {"has_moved": float(moved)})
    stop_process()
    return rows


class Learner(GRPOLearner):
    """One rank of a learner, in a process group of its own, on made-up completions."""

    def __init__(self, flags: list[str], *, num_steps: int | None = None) -> None:
        """As the flags say, but for `num_steps` steps where that is given."""
        config = parse_run(GRPOConfig, flags)
        validate_grpo(config)
        if num_steps is not None:
            config.rollout.total_episodes = num_steps * config.num_completions_per_step
        run = join_run(config)
        pretrained = open_pretrained(config, run.directory.hf_model)
        super().__init__(pretrained, run=run, config=config)
        self.hf_config = pretrained.hf_config
        self.vocab_size = self.hf_config.vocab_size

    def take_step(
        self,
        num_completions: int,
        *,
        num_given: int = 0,
        one_at_a_time: bool = False,
        trees: bool = False,
        routes: bool = False,
    ) -> dict[str, float]:
        """The metrics of a step, and how many labels it had; its completions depend on the number
        of the step.
        """
        samples = make_samples(num_completions, seed=self.loop.step, vocab_size=self.vocab_size)
        samples = as_trees(samples) if trees else samples
        if routes:
            samples = [
                replace(sample, routes=drawn_routes(sample.document.token_ids, self.hf_config))
                for sample in samples
            ]
        given = make_samples(num_given, seed=1000 + self.loop.step, vocab_size=self.vocab_size)
        samples += [replace(sample, weights=weights_of_given(sample)) for sample in given]
        return self.learn_from(samples, one_at_a_time=one_at_a_time)

    def learn_from(
        self, samples: list[RolloutSample], *, one_at_a_time: bool = False
    ) -> dict[str, float]:
        """`take_step` with completions of one's own."""
        work = plan_steps_of_ranks(
            samples,
            num_ranks=self.run.layout.data_parallel_world_size,
            max_tokens_per_microbatch=self.config.max_tokens_per_microbatch,
            num_mini_batches=self.config.loss.num_mini_batches,
            prefix_sharing=self.config.loss.prefix_sharing,
        )[dist.get_rank(self.policy.dp_process_group)]
        if one_at_a_time:
            work = spread(work)
        row = self.step(work)
        return row | {
            "num_labels": sum(minibatch.counts["labels"] for minibatch in work.minibatches)
        }


def make_samples(count: int, *, seed: int, vocab_size: int) -> list[RolloutSample]:
    """Random tokens, up to four completions of a prompt; the engine's log-probs lie around those of
    a model that knows nothing.
    """
    chance = random.Random(seed)
    samples: list[RolloutSample] = []
    prompt: tuple[int, ...] = ()
    for index in range(count):
        if index % GROUP == 0:
            prompt = tuple(chance.randrange(vocab_size) for _ in range(chance.randint(3, 20)))
        num_prompt, num_generated = len(prompt), chance.randint(1, 24)
        ids = prompt + tuple(chance.randrange(vocab_size) for _ in range(num_generated))
        samples.append(
            RolloutSample(
                document=Document(
                    token_ids=ids, responses=(Span(start=num_prompt, stop=len(ids)),)
                ),
                engine_logprobs=tuple(
                    -math.log(vocab_size) + chance.gauss(0, 0.5) for _ in range(num_generated)
                ),
                advantage=chance.gauss(0, 1),
            )
        )
    return samples


def as_trees(samples: list[RolloutSample]) -> list[RolloutSample]:
    """The same, but completions begin like those before them in their group; each keeps its own
    advantage.
    """
    trees = samples[:1]
    for index, sample in enumerate(samples[1:], start=1):
        ids, ids_before = sample.document.token_ids, trees[-1].document.token_ids
        num_alike = sample.document.responses[0].start + (0, 10, 15, 10)[index % GROUP]
        if index % GROUP and min(len(ids), len(ids_before)) > num_alike:
            document = replace(sample.document, token_ids=ids_before[:num_alike] + ids[num_alike:])
            sample = replace(sample, document=document)
        trees.append(sample)
    return trees


def drawn_routes(ids: tuple[int, ...], hf_config: Any) -> bytes:
    """Experts of all tokens but the last, as an engine would tell them: equal where the same tokens
    stand before.
    """
    experts = range(hf_config.num_experts)
    drawn: list[int] = []
    for stop in range(1, len(ids)):
        chance = random.Random(str(ids[:stop]))
        for _ in range(hf_config.num_hidden_layers):
            drawn += chance.sample(experts, hf_config.num_experts_per_tok)
    return np.array(drawn, dtype=np.int16).tobytes()


def weights_of_given(sample: RolloutSample) -> dict[str, tuple[float, ...]]:
    """Of what somebody else wrote; some of it counts half."""
    labels = len(sample.engine_logprobs)
    zeros = (0.0,) * labels
    return {"rl": zeros, "ce": tuple(1.0 if i % 3 else 0.5 for i in range(labels)), "kl": zeros}


def spread(work: RankStep) -> RankStep:
    """The same work, but every completion in a microbatch of its own."""
    minibatches = tuple(
        replace(
            minibatch,
            microbatches=tuple((sample,) for mb in minibatch.microbatches for sample in mb),
        )
        for minibatch in work.minibatches
    )
    return replace(work, minibatches=minibatches, prefix_sharing="off")


def equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether this rank holds the same of both, bit for bit."""
    ours, theirs = (getattr(tensor, "_local_tensor", tensor) for tensor in (ours, theirs))
    return torch.equal(ours, theirs)
