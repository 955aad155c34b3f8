"""Jobs that load checkpoints into every kind of sharding and export them again."""

import itertools
import resource
import signal
from pathlib import Path
from typing import Any

import olmo_core.distributed.parallel as olmo_core_parallel
import torch
import torch.distributed as dist
from olmo_core.config import DType
from olmo_core.distributed.parallel import DataParallelType, build_world_mesh
from olmo_core.nn.transformer import TransformerActivationCheckpointingMode
from olmo_core.train.train_module.transformer import (
    TransformerActivationCheckpointingConfig,
    TransformerContextParallelConfig,
    TransformerDataParallelConfig,
    TransformerTensorParallelConfig,
)
from torch.distributed.tensor import DTensor

from open_instruct.config.lora import LoRASection
from open_instruct.core.errors import InputError, RunError
from open_instruct.models import shards
from open_instruct.models.build import build_model
from open_instruct.models.export import export_hf
from open_instruct.models.export_checks import check_exportable
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.models.hf.names import TensorNames, clean_name
from open_instruct.models.load import check_cover, find_parameter_shapes, stream_load
from open_instruct.models.lora.adapters import add_adapters
from open_instruct.models.model_folder import load_model_config
from open_instruct.models.open_files import open_files
from open_instruct.models.shards import (
    find_local_box,
    find_local_shards,
    find_stack_rows,
    flat_shard,
)
from open_instruct.training.parallelize import Parallelism, parallelize

CPU = torch.device("cpu")
NUM_TOKENS = 12


def start() -> None:
    dist.init_process_group("gloo")


def sharded(
    hf_config: Any,
    *,
    replicas: int,
    shards: int,
    tensor: int,
    checkpointing: bool,
    context: int = 1,
    splits_experts: bool = False,
    dtype: str = "float32",
    compute_dtype: str = "float32",
    lora: LoRASection | None = None,
) -> Any:
    model = build_model(hf_config).to(getattr(torch, dtype))
    if lora is not None:
        add_adapters(model, lora, dtype=getattr(torch, dtype))
    dp = TransformerDataParallelConfig(
        name=DataParallelType.hsdp,
        num_replicas=replicas,
        shard_degree=shards,
        param_dtype=DType(compute_dtype),
    )
    tp = TransformerTensorParallelConfig(degree=tensor) if tensor > 1 else None
    cp = TransformerContextParallelConfig.ulysses(context) if context > 1 else None
    ac = TransformerActivationCheckpointingConfig(mode=TransformerActivationCheckpointingMode.full)
    # OLMo-core allows one mesh a process; this one tries several.
    olmo_core_parallel._WORLD_MESH = None
    parallelism = Parallelism(
        mesh=build_world_mesh(dp=dp, tp=tp, cp=cp, device_type="cpu"),
        context_parallel=context > 1,
        tensor_parallel=tensor > 1,
        checkpointing=ac if checkpointing else None,
        sharding=dp,
        splits_experts=splits_experts,
    )
    parallelize(model, parallelism)
    model.init_weights(max_seq_len=64, device=CPU)
    return model


def unsharded(hf_config: Any, *, dtype: str) -> Any:
    model = build_model(hf_config).to(getattr(torch, dtype))
    model.init_weights(device=CPU, max_seq_len=64)
    return model


def in_ranges(hf_config: Any, *, dtype: str) -> Any:
    """Whose parameters are nowhere: beside each is a range of it, of unequal lengths and for some
    ranks empty.
    """
    model, rank, num_ranks = build_model(hf_config), dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        ends = [parameter.numel() * index**2 // num_ranks**2 for index in range(num_ranks + 1)]
        local = torch.full(
            (ends[rank + 1] - ends[rank],), float("nan"), dtype=getattr(torch, dtype)
        )
        parameter.local_shard = flat_shard(  # type: ignore[attr-defined]
            local, tuple(parameter.shape), list(itertools.pairwise(ends)), rank=rank
        )
    return model


def _card() -> str:
    assert dist.get_rank() == 0, "who writes it makes it"
    return "# A card"


def _logits(model: Any) -> list[list[float]]:
    logits = model((torch.arange(NUM_TOKENS) % 7 + 2).unsqueeze(0))
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    rows: list[list[float]] = logits[0].float().tolist()
    return rows


def _differing(model: Any, files: CheckpointFiles, names: TensorNames) -> list[str]:
    """Parameters whose own shard, or whose gathered whole, is not bit for bit what the file
    holds.
    """
    differing = []
    parameters = {clean_name(name): parameter for name, parameter in model.named_parameters()}
    parts = find_local_shards(model)
    for name, parameter in parameters.items():
        if names.tied and name == "lm_head.w_out.weight":
            continue
        held = shards.find_local_shard(parameter)
        rows = [files.read(names.hf_name(row)) for row in find_stack_rows(name, held.shape)]
        stored = (torch.stack(rows) if len(held.shape) > 2 else rows[0]).to(held.local.dtype)
        if (
            sum(parts[row].local.numel() for row in find_stack_rows(name, held.shape))
            != held.local.numel()
        ):
            differing.append(name)
        if hasattr(parameter, "local_shard"):
            differing += [] if torch.equal(held.local, stored.view(-1)[held.box]) else [name]
            continue
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        box = find_local_box(parameter) if isinstance(parameter, DTensor) else ()
        if not torch.equal(whole, stored) or not torch.equal(own, stored[box]):
            differing.append(name)
    return differing


@torch.no_grad()
def import_and_export(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case: load, compare with the file, run a forward, export.

    `layout` None is one process unsharded.
    """
    start()
    results = []
    for case in cases:
        hf_config = load_model_config(Path(case["folder"]))
        names = TensorNames(hf_config)
        layout, dtype = case["layout"], case.get("dtype", "float32")
        if layout == "ranges":
            model = in_ranges(hf_config, dtype=dtype)
        else:
            model = (
                unsharded(hf_config, dtype=dtype)
                if layout is None
                else sharded(hf_config, dtype=dtype, **layout)
            )
        files = open_files(Path(case["folder"]), hf_config)
        check_cover(names, files, find_parameter_shapes(model))
        check_exportable(names, find_parameter_shapes(model))
        report = stream_load(model, files, names, chunk_bytes=case.get("chunk_bytes", 4096))
        differing = _differing(model, files, names)
        fingerprint = files.fingerprint
        num_params = sum(held.local.numel() for held in find_local_shards(model).values())
        logits = (
            None if layout == "ranges" else _logits(model)
        )  # also leaves FSDP's root module gathered, in the compute dtype
        export_hf(
            model,
            names,
            source_folder=case["folder"],
            out_folder=case["out"],
            dtype=getattr(torch, case["export_dtype"]),
            max_file_bytes=case.get("max_file_bytes", 200_000),
            card=_card,
        )
        results.append(
            {
                "differing": differing,
                "strided": any(
                    "Strided" in str(getattr(p, "placements", "")) for p in model.parameters()
                ),
                "num_local_params": num_params,
                "num_bytes_read": report.num_bytes_read,
                "logits": logits if dist.get_rank() == 0 else None,
                "fingerprint": fingerprint,
            }
        )
    dist.barrier()
    return results


def damaged(nan_folder: str, head_folder: str, layout: dict[str, Any]) -> list[str]:
    """The messages of two checkpoints whose headers are right and whose data is not."""
    start()
    messages = []
    for folder in (nan_folder, head_folder):
        hf_config = load_hf_config(folder)
        model = sharded(hf_config, **layout)
        files = CheckpointFiles.open(folder)
        try:
            stream_load(model, files, TensorNames(hf_config))
            messages.append("loaded")
        except InputError as error:
            messages.append(str(error))
    return messages


def export_twice(folder: str, out: str, layout: dict[str, Any], break_disk_on: int) -> list[str]:
    """Export, then again while rank `break_disk_on` finds its disk full in the middle: the
    messages, or 'exported'.
    """
    start()
    hf_config = load_hf_config(folder)
    names = TensorNames(hf_config)
    model = sharded(hf_config, **layout)
    files = CheckpointFiles.open(folder)
    stream_load(model, files, names)
    messages = []
    for attempt in range(2):
        if attempt == 1 and break_disk_on == dist.get_rank():
            _fill_disk()
        try:
            export_hf(
                model,
                names,
                source_folder=folder,
                out_folder=out,
                dtype=(torch.float32, torch.bfloat16)[attempt],
                max_file_bytes=100_000,
                card=_card,
            )
            messages.append("exported")
        except RunError as error:
            messages.append(str(error))
    return messages


def _fill_disk() -> None:
    """Let every file that this process writes end at 40 kB, as a full disk or a quota would."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
