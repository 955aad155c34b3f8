"""GRPO's learner steps on made-up completions, case after case in the same ranks."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.config.parser import parse
from open_instruct.models.logprob_head import LogprobHead
from open_instruct.olmo_core_train_modules import GRPOTrainModule
from open_instruct.packing.rollouts import RankStep, plan_steps_of_ranks, rollout_minibatches
from open_instruct.parallel.process import stop_process
from open_instruct.records import Document, RolloutSample, Span
from open_instruct.training.policy import build_policy
from open_instruct.training.pretrained import open_pretrained
from open_instruct.training.reference_policy import build_reference
from open_instruct.training.run import join_run
from open_instruct.training.stepwise import StepwiseTrainer


def run_each(cases: list[dict[str, Any]], ports: list[int]) -> list[list[dict[str, float]]]:
    """The metrics of every step of every case; each case has a process group, and so a port, of its own."""
    results = []
    for case, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        results.append(_run(**case))
    return results


def _run(
    flags: list[str],
    *,
    completions: list[int],
    one_at_a_time: bool = False,
    logits_per_chunk: int | None = None,
) -> list[dict[str, float]]:
    """Learn from as many completions as `completions` says, a step each."""
    config = parse(GRPOConfig, flags)
    validate_grpo(config)
    run = join_run(config)
    pretrained = open_pretrained(
        config.model, max_seq_length=config.data.max_seq_length, export_folder=run.directory.hf_model
    )
    policy = build_policy(
        GRPOTrainModule,
        pretrained,
        run=run,
        config=config,
        num_steps=len(completions),
        loss=config.loss,
        temperature=config.rollout.temperature,
        response_length=config.data.response_length,
    )
    if config.loss.beta > 0:
        policy.reference = build_reference(pretrained, run=run, config=config)
    vocab_size = pretrained.hf_config.vocab_size
    if logits_per_chunk is not None:
        assert isinstance(policy.model.lm_head, LogprobHead)
        policy.model.lm_head.max_logits_bytes = logits_per_chunk * 4 * vocab_size
    trainer = StepwiseTrainer(
        policy,
        folder=run.directory.path,
        num_steps=len(completions),
        max_tokens_per_step=config.num_completions_per_step * config.data.max_seq_length,
    )
    rows = []
    for step, num_completions in enumerate(completions):
        samples = make_samples(num_completions, seed=step, vocab_size=vocab_size)
        work = plan_steps_of_ranks(
            samples,
            num_ranks=run.layout.data_parallel_world_size,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            num_mini_batches=config.loss.num_mini_batches,
        )[dist.get_rank(policy.dp_process_group)]
        if one_at_a_time:
            work = spread(work)
        minibatches = policy.fill_logprobs(
            rollout_minibatches(work, pad_token_id=0, pad_to_multiple_of=run.layout.tensor_parallel_degree)
        )
        before = [parameter.detach().clone() for parameter in policy.model.parameters()]
        row = trainer.take_step(minibatches * config.loss.num_epochs, num_tokens=work.num_tokens_global)
        moved = any(not _equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
        num_labels = sum(minibatch.num_label_tokens_global for minibatch in work.minibatches)
        rows.append(row | {"has_moved": float(moved), "num_labels": num_labels})
    stop_process()
    return rows


def make_samples(count: int, *, seed: int, vocab_size: int) -> list[RolloutSample]:
    """Random tokens; the engine's log-probs lie around those of a model that knows nothing."""
    chance = random.Random(seed)
    samples = []
    for _ in range(count):
        num_prompt, num_generated = chance.randint(3, 20), chance.randint(1, 24)
        ids = tuple(chance.randrange(vocab_size) for _ in range(num_prompt + num_generated))
        samples.append(
            RolloutSample(
                document=Document(token_ids=ids, responses=(Span(start=num_prompt, stop=len(ids)),)),
                engine_logprobs=tuple(-math.log(vocab_size) + chance.gauss(0, 0.5) for _ in range(num_generated)),
                advantage=chance.gauss(0, 1),
            )
        )
    return samples


def spread(work: RankStep) -> RankStep:
    """The same work, but every completion in a microbatch of its own."""
    return RankStep(
        minibatches=tuple(
            replace(minibatch, microbatches=tuple((sample,) for mb in minibatch.microbatches for sample in mb))
            for minibatch in work.minibatches
        )
    )


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    ours, theirs = (getattr(tensor, "_local_tensor", tensor) for tensor in (ours, theirs))
    return torch.equal(ours, theirs)
