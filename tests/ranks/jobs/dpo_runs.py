"""Whole DPO runs, one after the other, in the same ranks."""

from __future__ import annotations

import os

from open_instruct.config.dpo import DPOConfig, validate_dpo
from open_instruct.config.parser import parse
from open_instruct.dpo import train

# What `train` imports when it is called, so that the ranks share it.
from open_instruct.training import closing, evaluation, policy, preference_data, trainer  # noqa: F401


def run_each(commands: list[list[str]], ports: list[int]) -> list[int]:
    """Run `train` with each command's flags; each run has a process group, and so a port, of its own."""
    codes = []
    for command, port in zip(commands, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        config = parse(DPOConfig, command)
        validate_dpo(config)
        codes.append(train(config))
    return codes
