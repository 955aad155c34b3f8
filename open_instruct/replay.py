"""Take one step of a GRPO run again: read its completions, load its weights, step, compare.

open-instruct replay RUN --step N [--loss_fn gspo ...]
"""

from __future__ import annotations

import gc
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.help import asks_for_help, print_lines
from open_instruct.config.replay import Replay, described, help_lines, on_one_process, parse_replay
from open_instruct.errors import InputError
from open_instruct.whole_file import write_asked

if TYPE_CHECKING:
    from open_instruct.config.grpo import GRPOConfig
    from open_instruct.parallel.process import Process
    from open_instruct.records import RolloutGroup
    from open_instruct.rollout.replay import StepWeights


def main(argv: Sequence[str]) -> int:
    """Replay what the words after the command describe, print it, and return the exit code.

    :raises InputError: if the flags cannot work, or the run has no such step.
    """
    if asks_for_help(argv):
        print_lines(help_lines)
        return 0
    asked = parse_replay(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("replay runs on one process: start it without torchrun")
    report = replay(asked)
    if asked.flags.json is not None:
        write_asked(asked.flags.json, json.dumps(report, indent=2) + "\n", flag="--json")
    return 0


def replay(asked: Replay) -> dict[str, Any]:
    """Take the step, print what comes of it, and return the same numbers as JSON."""
    from open_instruct.parallel.process import start_process, stop_process
    from open_instruct.rollout.replay import as_decided, differences, recorded_row, table, weights_before
    from open_instruct.rollout.traces import read_traces
    from open_instruct.run.run_directory import RunDirectory

    # Libraries warn of what a run keeps in its log; here nobody reads it.
    logging.captureWarnings(True)
    run, step = asked.run, asked.flags.step
    settings = as_decided(asked.settings, run)
    groups = read_traces(run, step)
    weights = weights_before(run, step, config=settings, given=asked.flags.weights)
    recorded = recorded_row(RunDirectory(path=run).metrics, step)
    print(f"step {step} of {run}: {weights.told}", flush=True)

    process = start_process(timeout_s=settings.parallel.dist_timeout_s, seed=settings.optim.seed)
    recomputed = take_again(settings, groups, step=step, weights=weights, process=process)
    changed = None
    if asked.changed is not None:
        print(f"changed: {described(asked.changes)}", flush=True)
        changed = take_again(as_decided(asked.changed, run), groups, step=step, weights=weights, process=process)
    stop_process()

    print("\n" + table({"recorded": recorded, "recomputed": recomputed, "changed": changed}))
    if recorded is None:
        print(f"\nmetrics.jsonl has no row of step {step}: the run ended before it was written")
    elif weights.are_the_steps_own:
        print(f"\n{differences(recorded, recomputed)}")
    return {
        "run": str(run),
        "step": step,
        "weights": asdict(weights) | {"checkpoint": None if weights.checkpoint is None else str(weights.checkpoint)},
        "changes": {name: {"from": old, "to": new} for name, (old, new) in asked.changes.items()},
        "recorded": recorded,
        "recomputed": recomputed,
        "changed": changed,
    }


def take_again(
    config: GRPOConfig,
    groups: Sequence[RolloutGroup],
    *,
    step: int,
    weights: StepWeights,
    process: Process,
) -> dict[str, float]:
    """The metrics of `step` under `config`, by the learner's own walk; what it writes is removed."""
    from open_instruct.learner.grpo import GRPOLearner
    from open_instruct.parallel.layout import layout_of
    from open_instruct.parallel.world_mesh import keep_mesh
    from open_instruct.rollout.conversations import load_conversations
    from open_instruct.rollout.replay import OF_THE_RUN, check_trace_fits, work_of
    from open_instruct.run.console import Console
    from open_instruct.run.opened import Run
    from open_instruct.run.pretrained import open_pretrained
    from open_instruct.run.run_directory import RunDirectory

    config = on_one_process(config)
    with tempfile.TemporaryDirectory(prefix="replay_") as folder:
        run = Run(
            process=process,
            layout=layout_of(config.parallel, process.gpus_per_node),
            directory=RunDirectory(path=Path(folder)),
            console=Console(speaks=False),
        )

        def opened(model: str) -> Any:
            started = replace(config, model=replace(config.model, model_name_or_path=model))
            return open_pretrained(started, run.directory.hf_model)

        pretrained = opened(weights.model)
        check_trace_fits(groups, pretrained.hf_config.vocab_size)
        conversations = load_conversations(config, pretrained.tokenizer)
        work, num_completions = work_of(groups, step=step, config=config, conversations=conversations)
        start = opened(config.model.model_name_or_path) if config.loss.beta > 0 else None
        learner = GRPOLearner(pretrained, reference=start, run=run, config=config)
        learner.loop.stand_before(step, checkpoint=weights.checkpoint)
        row = learner.step(work)
    keep_mesh(None)
    # Model and trainer hold each other: their memory is wanted before the next ones are built.
    del learner
    gc.collect()
    row = {name: value for name, value in row.items() if not name.startswith(OF_THE_RUN)}
    return {"num_trained_completions": float(num_completions)} | row
