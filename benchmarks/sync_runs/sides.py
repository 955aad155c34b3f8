"""The learners of a weight sync, and the process that receives."""

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness.memory import PeakMemory
from harness.processes import leave_numbers
from harness.rounds import paired_median
from harness.sharding import sharder

from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.config.lora import LoRASection
from open_instruct.models.build import build_model
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.lora.adapters import add_adapters
from open_instruct.weight_sync.receiver import IncomingWeights
from open_instruct.weight_sync.sender import WeightSender
from sync_runs.bare import Bare
from sync_runs.measure import NUM_LEARNERS, Sync
from sync_runs.told import TIMEOUT_S, awaited, publish

VOCAB_SIZE = 2048


def learner(sync: Sync, folder: Path) -> None:
    """One of the ranks; the first one leaves the rates too."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sender = sender_of(sync)
    manifest = sender.manifest
    dist.barrier()
    memory = PeakMemory()
    memory.start()
    info = sender.open(1)
    if rank == 0:
        publish(folder / "info.pickle", info)
    sender.join()
    ours_s, bare_s = [], []
    bare = None
    # The first one touches the memory for the first time.
    for repetition in range(sync.num_syncs + 1):
        dist.barrier()
        started_s = time.perf_counter()
        sender.send(repetition)
        ours_s.append(time.perf_counter() - started_s)
        if repetition == 0:
            memory.stop()
        if rank == 0:
            if bare is None:
                bare = Bare(info, rank=0, port_path=folder / "bare.pickle")
            bare_s.append(bare.send())
    numbers: dict[str, Any] = {"anonymous": memory.anonymous_bytes}
    if rank == 0:
        numbers["rates"] = {
            "num_bytes": manifest.num_bytes,
            "num_buckets": len(manifest.buckets),
            "ours_s": median(ours_s[1:]),
            "bare_s": median(bare_s[1:]),
            "ratio": paired_median(bare_s[1:], ours_s[1:]),
        }
    leave_numbers(folder, numbers)
    dist.barrier()


def sender_of(sync: Sync) -> WeightSender:
    """Of a model with random weights in shards, with adapters or without."""
    dtype = getattr(torch, sync.dtype)
    vocab_size = SIZES[sync.size]["vocab_size"] if sync.lora_sync else VOCAB_SIZE
    hf_config = tiny_config("olmo2", SIZES[sync.size], vocab_size=vocab_size, tie=False)
    model = build_model(hf_config)
    if sync.lora_sync not in ("", "plain"):
        add_adapters(model, LoRASection(use_lora=True), dtype=dtype)
    model = sharder(NUM_LEARNERS)(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().uniform_()
    names = TensorNames(hf_config)
    return new_sender(sync, model, names, adapter_alone=sync.lora_sync == "adapter")


def new_sender(sync: Sync, model: Any, names: TensorNames, **kind: bool) -> WeightSender:
    """A sender as `sync` has it, of what `kind` says."""
    return WeightSender(
        model,
        names,
        backend=sync.backend,
        dtype=getattr(torch, sync.dtype),
        bucket_bytes=sync.bucket_bytes,
        timeout_s=TIMEOUT_S,
        **kind,
    )


def receiver(sync: Sync, folder: Path) -> None:
    """The process of an engine, without an engine."""
    info = awaited(folder / "info.pickle")
    memory = PeakMemory()
    memory.start()
    incoming = IncomingWeights(info, index=0, device=torch.device("cpu"))
    bare = None
    for repetition in range(sync.num_syncs + 1):
        for weights in incoming.buckets():
            for name, tensor in weights:
                del name, tensor
        if repetition == 0:
            memory.stop()
            bare = Bare(info, rank=1, port_path=folder / "bare.pickle")
        bare.receive()
    leave_numbers(folder, {"anonymous": memory.anonymous_bytes})
