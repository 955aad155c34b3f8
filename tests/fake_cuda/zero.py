"""DeepSpeed on the pretended device: what it does with values, which there are none of, is left out."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from open_instruct.learner.deepspeed import build
from open_instruct.learner.deepspeed.library import deepspeed
from open_instruct.models.load import LoadReport

NOTHING_READ = LoadReport(num_bytes_read=0, num_tensors=0, wall_time_s=0.0)
move = torch.nn.Module.to


def _stays(module: torch.nn.Module, *where: Any, **more: Any) -> torch.nn.Module:
    """A fake tensor is on its device already, and cannot be put in the place of another."""
    is_device = any(isinstance(each, torch.device) for each in where)
    return module if is_device else move(module, *where, **more)


def build_backend(*arguments: Any, **more: Any) -> Any:
    """With PyTorch's AdamW: DeepSpeed's are kernels, which nobody can pretend."""
    os.environ["LOCAL_RANK"] = "0"
    deepspeed.utils.logger.setLevel("ERROR")  # it warns, where results are printed, of a memory that is pretended
    coordinator = deepspeed.runtime.zero.partitioned_param_coordinator
    # Ranks compare what they did: all others have said 0.
    coordinator.assert_ints_same_as_other_ranks = lambda numbers: None
    with ExitStack() as held:
        for where, name, stand_in in (
            (build, "stream_load", lambda *_: NOTHING_READ),
            (build, "adam_for", lambda *_, **more: "AdamW"),
            (torch.nn.Module, "to", _stays),
        ):
            held.enter_context(mock.patch.object(where, name, stand_in))
        return build.build_backend(*arguments, **more)
