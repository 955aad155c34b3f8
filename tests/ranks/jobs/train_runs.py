"""Whole DPO or SFT runs, one after the other, in the same ranks."""

import os
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

from open_instruct.commands.run_flags import parse_run
from open_instruct.models.heads import logprob_head
from open_instruct.objectives.registry import load_objective
from open_instruct.run import cadence
from open_instruct.train import train

# What `train` imports when it is called, so that the ranks share it.
from open_instruct.training import export, loop  # noqa: F401
from open_instruct.training.measure import speed
from open_instruct.training.olmo_core import fsdp2  # noqa: F401
from open_instruct.training.rows import datasets, sample_loader  # noqa: F401


def run_each(commands: list[list[str]], ports: list[int], entry: str = "dpo") -> list[int]:
    """Run `entry` with each command's flags; each run has a process group, and so a port, of its
    own.
    """
    objective = load_objective(entry)
    codes = []
    for command, port in zip(commands, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        config = parse_run(objective.config_class, command)
        objective.validate(config)
        codes.append(train(config, objective=objective))
    return codes


def run_with_a_slow_rank(
    commands: list[list[str]], ports: list[int], slow_rank: int, window: int, on_one_host: bool
) -> list[int]:
    """SFT runs in which the losses of one rank take three times as long for a token as those of the
    others.

    Its rows come late, too. Ranks look every `window` steps, and take each other for processes of
    other hosts.
    """
    is_slow = int(os.environ["RANK"]) == slow_rank
    own_losses, own_batch = logprob_head.compute_label_losses, sample_loader.build_step_batch

    def slow_losses(logits_NV: Any, *others: Any) -> Any:
        time.sleep((1.5e-4 if is_slow else 5e-5) * len(logits_NV))
        return own_losses(logits_NV, *others)

    def late_batch(*arguments: Any, **told: Any) -> Any:
        time.sleep(1.0 * is_slow)
        return own_batch(*arguments, **told)

    with (
        mock.patch.object(loop, "WINDOW", window),
        mock.patch.object(cadence, "WINDOW", window),
        nullcontext()
        if on_one_host
        else mock.patch.object(loop, "find_cpu_host", return_value=os.environ["RANK"]),
        mock.patch.object(speed, "LEAST_TOKENS", 1),
        mock.patch.object(logprob_head, "compute_label_losses", slow_losses),
        mock.patch.object(speed, "compute_label_losses", slow_losses),
        mock.patch.object(sample_loader, "build_step_batch", late_batch),
    ):
        return run_each(commands, ports, "sft")
