"""Checkpoints of GRPO's learner: written on some ranks, read on others, damaged, planted, and cut
short on the way.
"""

import hashlib
import json
import os
import resource
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from open_instruct.checkpoints import safe_checkpointer
from open_instruct.checkpoints.safe_checkpointer import split, to_json
from open_instruct.core.errors import InputError, RunError
from open_instruct.parallel.process import stop_process
from open_instruct.training.olmo_core import fsdp2
from tests.ranks.jobs.grpo_steps import Learner

NUM_STEPS = 4


def save_each(
    cases: list[list[str]], ports: list[int], num_saved: int, copies_after_s: float = 0.0
) -> list[dict[str, Any]]:
    """Take and save so many steps, where a thread copies with that delay; what was in the last of
    them.
    """
    copy_to_host = safe_checkpointer.copy_to_host

    def late_copies(*arguments: Any) -> dict[str, torch.Tensor]:
        time.sleep(copies_after_s)
        return copy_to_host(*arguments)

    safe_checkpointer.copy_to_host = late_copies
    results = []
    for flags, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        learner = Learner(flags, num_steps=NUM_STEPS)
        for _ in range(num_saved):
            learner.take_step(7)
            learner.save({"mark": learner.loop.step}, waits=False)
        learner.loop.close()
        results.append(state_of(learner))
        stop_process()
    safe_checkpointer.copy_to_host = copy_to_host
    return results


def take_steps(
    cases: list[list[str]], ports: list[int], completions: list[int], saves: bool
) -> list[list[dict[str, float]]]:
    """The metrics of each case's steps; where it `saves`, a checkpoint is written after each of
    them.
    """
    results = []
    for flags, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        learner = Learner(flags, num_steps=len(completions))
        rows = []
        for num_completions in completions:
            rows.append(learner.take_step(num_completions))
            if saves:
                learner.save({}, waits=True)
        learner.loop.close()
        results.append(rows)
        stop_process()
    return results


def save_from_host(cases: list[list[str]], ports: list[int]) -> list[dict[str, Any]]:
    """`save_each` of two steps, with moments where --adam_offload has them on CUDA."""
    fsdp2.build_optimizer_config = partial(_on_host, fsdp2.build_optimizer_config)
    return save_each(cases, ports, num_saved=2)


def _on_host(build: Any, *arguments: Any, **settings: Any) -> Any:
    return build(*arguments, **settings | {"on_host": True})


def save_many(flags: list[str], num_saves: int) -> list[str]:
    """So many checkpoints, of one set of weights, some begun while the one before is written; what
    is left.
    """
    learner = Learner(flags, num_steps=num_saves)
    for number in range(num_saves):
        learner.loop.trainer.global_step += 1
        learner.save({}, waits=False)
        for _ in range(number % 3):
            learner.loop._finish_save(waits=False)  # as at the end of a step
    learner.loop.close()
    folder = Path(learner.config.run.output_dir)
    stop_process()
    return sorted(path.name for path in folder.glob("step*"))


def load_each(cases: list[list[str]], ports: list[int]) -> list[dict[str, Any]]:
    """Go on from what is there: the state that was found, what was warned of, or why it was
    refused.
    """
    results: list[dict[str, Any]] = []
    for flags, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        warnings: list[str] = []
        try:
            learner = Learner(flags, num_steps=NUM_STEPS)
            found = learner.resume(warn=warnings.append)
            results.append(state_of(learner) | {"found": found, "warnings": warnings})
        except (InputError, RunError) as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
        stop_process()
    return results


def state_of(learner: Learner) -> dict[str, Any]:
    """Of every tensor of policy, optimizer and reference the bits of the whole, of the rest the
    value.
    """
    tensors, values = split(
        learner.loop.checkpointer.state_to_save(learner.policy.backend.train_module)
    )
    trainer = learner.loop.trainer.state_dict()
    own_random_state = hashlib.sha256(json.dumps(to_json(trainer.pop("rng"))).encode()).hexdigest()
    del trainer["world_size"]
    return {
        "tensors": {name: bits(tensor) for name, tensor in tensors.items()},
        "values": to_json(values),
        "trainer": to_json(trainer),
        "random_state": own_random_state,
    }


@torch.no_grad()
def bits(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    raw = whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{whole.dtype} {tuple(whole.shape)} {hashlib.sha256(raw).hexdigest()}"


def faults_of_one_rank(flags: list[str]) -> list[str]:
    """Rank 1 cannot write, then cannot read: what each rank is told, and what is there in the
    end.
    """
    learner = Learner(flags, num_steps=NUM_STEPS)
    learner.take_step(7)
    learner.save({})
    learner.take_step(7)
    told = []

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == 1:  # as a full disk or a quota would
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
    try:
        learner.save({}, waits=False)
        learner.loop.close()
    except RunError as error:
        told.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    read_parts = safe_checkpointer.read_parts

    def unreadable(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    if dist.get_rank() == 1:
        safe_checkpointer.read_parts = unreadable
    try:
        learner.resume(warn=told.append)
    except RunError as error:
        told.append(str(error))
    safe_checkpointer.read_parts = read_parts

    learner.resume(warn=told.append)
    told.append(f"at step {learner.loop.step}")
    folder = Path(learner.config.run.output_dir)
    told.append(", ".join(sorted(path.name for path in folder.glob("step*"))))
    stop_process()
    return told
