"""Whole DPO or SFT runs, one after the other, in the same ranks."""

from __future__ import annotations

import os

from open_instruct.config.parser import parse

# What `train` imports when it is called, so that the ranks share it.
from open_instruct.learner import export, heldout, loop  # noqa: F401
from open_instruct.learner.olmo_core import policy  # noqa: F401
from open_instruct.objectives.registry import objective_named
from open_instruct.run import datasets  # noqa: F401
from open_instruct.train import train


def run_each(commands: list[list[str]], ports: list[int], entry: str = "dpo") -> list[int]:
    """Run `entry` with each command's flags; each run has a process group, and so a port, of its own."""
    objective = objective_named(entry)
    codes = []
    for command, port in zip(commands, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        config = parse(objective.config_class, command)
        objective.validate(config)
        codes.append(train(config, objective=objective))
    return codes
