"""One rank that loads or exports a checkpoint, in our way or in OLMo-core's, and checks what came
of it.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.memory import PeakMemory
from harness.processes import leave_numbers
from harness.sharding import sharder
from olmo_core.config import DType
from olmo_core.distributed.checkpoint import load_model_and_optim_state
from olmo_core.nn.hf import load_hf_model, save_hf_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Olmo2ForCausalLM

from open_instruct.models.build import build_model
from open_instruct.models.export import export_hf
from open_instruct.models.family import build_transformer_config
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import check_cover, find_parameter_shapes, stream_load
from open_instruct.models.model_folder import load_model_config
from open_instruct.models.open_files import open_files
from open_instruct.models.shards import find_local_box

del AutoModelForCausalLM, Olmo2ForCausalLM  # imported so that nobody's time includes the import


def run_rank(task: str, way: str, checkpoint: Path, scratch: Path) -> None:
    """Do it and leave its numbers in `scratch`."""
    dist.init_process_group("gloo")
    hf_config = load_model_config(checkpoint)
    names = TensorNames(hf_config)
    sharded = sharder(dist.get_world_size())

    def load_ours() -> Any:
        model = build_model(hf_config)
        files = open_files(checkpoint, hf_config)
        check_cover(names, files, find_parameter_shapes(model))
        model = sharded(model)
        stream_load(model, files, names)
        return model

    def load_native() -> Any:
        model = sharded(build_transformer_config(hf_config).build(init_device="meta"))
        load_model_and_optim_state(checkpoint / "model_and_optim", model)
        return model

    def load_olmo_core() -> Any:
        model = sharded(build_transformer_config(hf_config).build(init_device="meta"))
        state = model.state_dict()
        load_hf_model(str(checkpoint), state)
        model.load_state_dict(state)
        return model

    def export_ours() -> None:
        num_params = sum(map(math.prod, find_parameter_shapes(model).values()))
        export_hf(
            model,
            names,
            source_folder=checkpoint,
            out_folder=out,
            dtype=torch.bfloat16,
            max_file_bytes=max(1, 2 * num_params // dist.get_world_size()),
        )

    def export_olmo_core() -> None:
        save_hf_model(out, model.state_dict(), model, dtype=DType.bfloat16)

    out = scratch / "export"
    ways = {
        "ours": load_ours,
        "load_hf_model": load_olmo_core,
        "load_model_and_optim_state": load_native,
    }
    if task != "export":
        model, numbers = measured(ways[way])
    else:
        model = load_ours()
        _, numbers = measured(export_ours if way == "ours" else export_olmo_core)
    files = open_files(checkpoint, hf_config)
    problems = wrong_files(out, files) if task == "export" else wrong_shards(model, files, names)
    assert not problems, f"{way}: wrong numbers in {problems[:3]}"
    shard = sum(
        p.to_local().numel() * 4 if isinstance(p, DTensor) else p.numel() * 4
        for p in model.parameters()
    )
    largest = max(p.numel() for p in model.parameters()) * (2 if task == "export" else 4)
    leave_numbers(scratch, {**numbers, "shard": shard, "largest_tensor": largest})
    dist.destroy_process_group()


def measured(action: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What it returns, and its time and memory on this rank."""
    dist.barrier()
    memory = PeakMemory()
    memory.start()
    started_s = time.perf_counter()
    result = action()
    dist.barrier()
    wall_time_s = time.perf_counter() - started_s
    memory.stop()
    numbers = {
        "wall_time_s": wall_time_s,
        "anonymous": memory.anonymous_bytes,
        "resident": memory.resident_bytes,
    }
    return result, numbers


def wrong_shards(model: Any, files: CheckpointFiles, names: TensorNames) -> list[str]:
    return [
        name
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
        and not torch.equal(
            parameter.to_local(), files.read(names.hf_name(name), find_local_box(parameter)).float()
        )
    ]


def wrong_files(out: Path, files: CheckpointFiles) -> list[str]:
    """The first rank looks at all of them."""
    if dist.get_rank() != 0:
        return []
    written = CheckpointFiles.open(out)
    return [name for name in files if not torch.equal(written.read(name), files.read(name))]
