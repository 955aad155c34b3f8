"""Whole DPO or SFT runs, one after the other, in the same ranks."""

from __future__ import annotations

import os
from typing import Any

from open_instruct import dpo, sft
from open_instruct.config.dpo import DPOConfig, validate_dpo
from open_instruct.config.parser import parse
from open_instruct.config.sft import SFTConfig, validate_sft

# What `train` imports when it is called, so that the ranks share it.
from open_instruct.training import closing, datasets, evaluation, policy, trainer  # noqa: F401

ENTRIES: dict[str, tuple[Any, Any, Any]] = {
    "dpo": (DPOConfig, validate_dpo, dpo.train),
    "sft": (SFTConfig, validate_sft, sft.train),
}


def run_each(commands: list[list[str]], ports: list[int], entry: str = "dpo") -> list[int]:
    """Run `entry` with each command's flags; each run has a process group, and so a port, of its own."""
    config_class, validate, train = ENTRIES[entry]
    codes = []
    for command, port in zip(commands, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        config = parse(config_class, command)
        validate(config)
        codes.append(train(config))
    return codes
