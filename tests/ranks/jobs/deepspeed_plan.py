"""What ranks on DeepSpeed really hold from step to step, and every collective of a step."""

import gc
import os
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from open_instruct.commands.run_flags import parse_run
from open_instruct.core.records import StepBatch
from open_instruct.models.lora.adapters import find_merged_weights
from open_instruct.objectives.dpo import DPO
from open_instruct.parallel.process import stop_process
from open_instruct.run.cadence import Cadence
from open_instruct.run.opening import join_run
from open_instruct.run.pretrained import open_pretrained
from open_instruct.training.deepspeed import zero as built
from open_instruct.training.deepspeed.settings import engine_settings
from open_instruct.training.loop import Loop
from open_instruct.training.policy import Policy
from tests.ranks.jobs.traffic import _counted, _row, messages

SETTLES_S = 0.2
"""A thread of gloo holds what a collective was given for a moment after that is done: of metrics,
160 bytes.
"""


def measure_each(cases: list[dict[str, Any]], ports: list[int]) -> list[dict[str, Any] | None]:
    """Of each case what this rank measures; None where it is not in its world."""
    results = []
    rank = int(os.environ["RANK"])
    for case, port in zip(cases, ports, strict=True):
        world_size = str(case.pop("world_size"))
        os.environ.update(MASTER_PORT=str(port), WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
        results.append(_measured(**case) if rank < int(world_size) else None)
    return results


def _measured(
    flags: list[str],
    sharing: dict[str, int],
    num_tokens: int,
    num_microbatches: int,
    bucket_bytes: int,
) -> dict[str, Any]:
    def settings(*sections: Any, **more: Any) -> dict[str, Any]:
        of_flags = engine_settings(*sections, **more)
        return of_flags | {"zero_optimization": of_flags["zero_optimization"] | sharing}

    built.engine_settings = settings
    config = parse_run(DPO.config_class, flags)
    DPO.validate(config)
    run = join_run(config)
    pretrained = open_pretrained(config, run.directory.hf_model)
    values_class = DPO.bind(config).values_class
    microbatch = _row(num_tokens, 2, has_reference=True, values_class=values_class)
    num_rows = num_microbatches * run.layout.data_parallel_world_size
    step = StepBatch(
        microbatches=(microbatch,) * num_microbatches,
        counts={
            "rows": num_rows,
            "tokens": num_rows * num_tokens,
            "labels": num_rows * num_tokens // 2,
        },
    )
    before = _storages()
    gc.freeze()  # none of these objects is looked at again
    policy = Policy(
        built.build_backend(pretrained, run=run, config=config, num_steps=9), DPO.bind(config)
    )
    policy._check_first_loss = lambda loss, counts: None  # type: ignore[method-assign]  # reference log-probs are made up
    settings_of_loop: Any = {
        "start_model": "",
        "cadence": Cadence(num_steps=9, save_every=1),
    }
    place: Any = SimpleNamespace(state_dict=dict, load_state_dict=None)
    loop = Loop(policy, place, run=run, flags=config.run, **settings_of_loop)
    with torch.no_grad():
        policy.score(microbatch)
    # The second pass learns the order of the modules, and the third one goes by it: a short step
    # before a whole one.
    for num_passes in (1, num_microbatches):
        warm = replace(step, microbatches=step.microbatches[:num_passes])
        loop.take_step([warm], num_tokens=num_rows * num_tokens)
    measured: dict[str, Any] = {"between": _new_bytes(before)}
    update = policy.update

    def looked_at_update() -> dict[str, float]:
        measured["with_gradients"] = _new_bytes(before)
        return update()

    with mock.patch.object(policy, "update", looked_at_update):
        measured["step"] = _counted(
            partial(loop.take_step, [step], num_tokens=num_rows * num_tokens)
        )
    model, hf_config = policy.model, pretrained.hf_config
    measured["merging"] = _counted(lambda: find_merged_weights(model))
    measured["sync"] = messages(model, hf_config, bucket_bytes=bucket_bytes)
    if config.adapters is not None:
        measured["sync of adapters"] = messages(
            model, hf_config, bucket_bytes=bucket_bytes // 100, adapter_alone=True
        )
    stop_process()
    return measured


def _storages() -> dict[int, torch.UntypedStorage]:
    """Of all tensors that there are; held, so that none takes the place of another."""
    gc.collect()
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    tensors = [each for each in objects if type(each) in kinds]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    real = (
        tensor
        for tensor in tensors
        if type(tensor).__name__ != "FakeTensor" and tensor.device.type == "cpu"
    )
    storages = [tensor.untyped_storage() for tensor in real]
    return {storage._cdata: storage for storage in storages}


def _new_bytes(before: dict[int, torch.UntypedStorage]) -> int:
    time.sleep(SETTLES_S)
    return sum(storage.nbytes() for key, storage in _storages().items() if key not in before)
