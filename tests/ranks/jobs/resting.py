"""GRPO's learner steps with a rest after each: its state in host memory, and back."""

import gc
import hashlib
import os
from typing import Any

import numpy as np
import torch

from open_instruct.checkpoints.safe_checkpointer import split
from open_instruct.models.box_files import make_part
from open_instruct.models.shards import local_part
from open_instruct.parallel.process import stop_process
from open_instruct.training.deepspeed import zero
from tests.ranks.jobs import grpo_steps
from tests.ranks.jobs.deepspeed_runs import as_for_large_models

NUM_COMPLETIONS = (9, 6, 7)


def run_each(cases: list[list[str]], ports: list[int]) -> list[dict[str, Any]]:
    """Of each case: digests of the state and metrics after each step, with rests and without, and
    the bytes of tensors before and during the last rest.
    """
    zero.engine_settings = as_for_large_models
    results = []
    for number, flags in enumerate(cases):
        result: dict[str, Any] = {}
        for rests, port in zip((False, True), ports[2 * number :], strict=False):
            os.environ["MASTER_PORT"] = str(port)
            result["rested" if rests else "awake"] = _run(flags, rests=rests, sizes=result)
        results.append(result)
    return results


def _run(flags: list[str], *, rests: bool, sizes: dict[str, Any]) -> list[Any]:
    elsewhere = _bytes_of_tensors()  # DeepSpeed does not let go of an earlier learner
    learner = grpo_steps.Learner(flags, num_steps=len(NUM_COMPLETIONS))
    states = []
    for num_completions in NUM_COMPLETIONS:
        row = learner.take_step(num_completions)
        if learner.loop.step == 1:
            learner.save({})  # whose files are written from the tensors themselves
        if rests:
            list_tensors = learner._list_resident_tensors
            addresses = [local_part(each).data_ptr() for each in list_tensors()]
            sizes["held"] = _bytes_of_tensors() - elsewhere
            move = learner.move_to_host()
            sizes |= {"moved": move.num_bytes, "left": _bytes_of_tensors() - elsewhere}
            taken = torch.ones(sizes["moved"], dtype=torch.uint8)  # as an engine would
            assert learner.move_to_device().num_bytes == move.num_bytes
            after = [local_part(each).data_ptr() for each in list_tensors()]
            sizes["moved_tensors"] = sum(a != b for a, b in zip(addresses, after, strict=True))
            del taken
        metrics = {name: value for name, value in row.items() if name.startswith(COMPARED)}
        states.append([metrics, _digest(learner)])
    stop_process()
    del learner
    gc.collect()
    return states


COMPARED = ("loss", "policy_loss", "grad_norm", "critic/loss", "critic/grad_norm", "kl")


def _digest(learner: grpo_steps.Learner) -> str:
    """Of all tensors that a checkpoint has: weights and states of policy, reference and critic."""
    state = learner.loop.checkpointer.state_to_save(learner.policy.backend.train_module)
    tensors, _ = split(state)
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        local = make_part(tensor).local.detach().contiguous()
        digest.update(name.encode())
        digest.update(np.from_dlpack(local.flatten().view(torch.uint8)).data)
    return digest.hexdigest()


def _bytes_of_tensors() -> int:
    """Of all storages of this process that a tensor refers to, but for the mover's host blocks."""
    gc.collect()
    sizes: dict[int, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.device.type == "cpu":
            storage = local_part(each).untyped_storage()
            if storage.nbytes() != BLOCK_BYTES:
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


BLOCK_BYTES = 2**28
