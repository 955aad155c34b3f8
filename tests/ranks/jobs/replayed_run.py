"""A GRPO run of a few steps with saved rollouts, but without engines: its groups are made up."""

import contextlib
import io
import json
import os
import random
from dataclasses import replace

import torch.distributed as dist

from open_instruct import cli
from open_instruct.config.resolved import write_config
from open_instruct.core.records import Completion, Prompt, RolloutGroup, Verdict
from open_instruct.parallel.process import stop_process
from open_instruct.rl.samples import RolloutStepBatch, load_conversations, plan_rank_work
from open_instruct.rl.traces import write_traces
from open_instruct.training.export import export_policy
from tests.ranks.jobs.grpo_steps import Learner, make_samples

NUM_GROUPS, GROUP_SIZE = 4, 3


def run_it(flags: list[str], *, num_steps: int, export: bool = False) -> list[dict[str, float]]:
    """Leave in the run's folder what a run leaves there: flags, rollouts, rows, a checkpoint of
    every step.

    With `export` the trained model too.
    """
    learner = Learner(flags)
    config, run = learner.config, learner.run
    assert config.num_steps == num_steps, "the schedule is that of the flags"
    conversations = load_conversations(
        config.data, learner.pretrained.tokenizer, seed=config.optim.seed
    )
    rows = []
    for step in range(1, num_steps + 1):
        batch = RolloutStepBatch(groups=make_groups(step, vocab_size=learner.vocab_size))
        num_ranks = run.layout.data_parallel_world_size
        learned, work = plan_rank_work(
            batch, step=step, config=config, conversations=conversations, num_ranks=num_ranks
        )
        own = work[dist.get_rank(learner.policy.dp_process_group)]
        rows.append({"step": step, **learner.step(own), **learned.metrics})
        learner.save({})
        if run.process.rank == 0:
            write_traces(run.directory.path, step, batch, learned)
    if export:
        export_policy(
            learner.policy,
            learner.pretrained,
            run=run,
            export_dtype=config.run.export_dtype,
            adapters=config.adapters,
            trained_by="grpo",
        )
    if run.process.rank == 0:
        write_config(config, run.directory.config, command="grpo")
        run.directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stop_process()
    return rows


def replay_each(commands: list[list[str]], ports: list[int]) -> list[str]:
    """What each replay prints; each has a process group, and so a port, of its own."""
    printed = []
    for words, port in zip(commands, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            assert cli.main(["replay", *words]) == 0
        printed.append(stdout.getvalue())
    return printed


def make_groups(step: int, *, vocab_size: int) -> tuple[RolloutGroup, ...]:
    """The last group has no signal; some completions were cut at the length limit."""
    chance = random.Random(step)
    groups = []
    for ticket in range(NUM_GROUPS):
        samples = make_samples(GROUP_SIZE, seed=100 * step + ticket, vocab_size=vocab_size)
        prompt_ids = samples[0].document.token_ids[: samples[0].document.responses[0].start]
        completions = tuple(
            Completion(
                token_ids=sample.document.token_ids[sample.document.responses[0].start :],
                logprobs=sample.engine_logprobs,
                versions=(step - 1,) * len(sample.engine_logprobs),
                text="",
                finish_reason="length" if index == 0 else "stop",
                seed=index,
            )
            for index, sample in enumerate(samples)
        )
        verdicts = tuple(Verdict(reward=chance.random(), scores={}) for _ in completions)
        if ticket == NUM_GROUPS - 1:
            verdicts = tuple(replace(verdict, reward=1.0) for verdict in verdicts)
        prompt = Prompt(row_id=ticket, token_ids=prompt_ids, text="", checks=())
        groups.append(
            RolloutGroup(ticket=ticket, prompt=prompt, completions=completions, verdicts=verdicts)
        )
    return tuple(groups)
