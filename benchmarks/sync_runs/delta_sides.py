"""The learners of a weight sync by changes, and the process that receives."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.processes import leave_numbers
from harness.sharding import sharder

from open_instruct.models.build import build_model
from open_instruct.models.hf.names import TensorNames
from open_instruct.toys.tiny import SIZES, tiny_config
from open_instruct.weights.broadcasts import PartBroadcaster
from open_instruct.weights.receiver import IncomingWeights
from open_instruct.weights.sender import WeightSender
from open_instruct.weights.way import LocalOf
from open_instruct.weights.ways import WAYS
from sync_runs.measure import BUCKET_MIB, NUM_LEARNERS
from sync_runs.told import TIMEOUT_S, awaited, publish

VOCAB_SIZE = 2048
LEARNING_RATE = 1e-6
KINDS = ("dense", "delta")


def slow_broadcaster(gb_s: float) -> type[PartBroadcaster]:
    """A learner's end that takes as long as a network of `gb_s`, which all learners share, would."""

    class Slow(PartBroadcaster):
        num_bytes = 0

        def put(self, position: int, local_of: LocalOf) -> None:
            super().put(position, local_of)
            start, stop = self.manifest.bucket_at(position).span(self.rank)
            Slow.num_bytes += stop - start
            time.sleep((stop - start) * NUM_LEARNERS / (gb_s * 1e9))

    return Slow


def learner(folder: Path, *, size: str, num_syncs: int, gb_s: float) -> None:
    """One of the ranks."""
    dist.init_process_group("gloo")
    slow: Any = slow_broadcaster(gb_s)
    WAYS["gloo"] = replace(WAYS["gloo"], outgoing=slow)
    hf_config = tiny_config("olmo2", SIZES[size], vocab_size=VOCAB_SIZE, tie=False)
    model = sharder(NUM_LEARNERS)(build_model(hf_config))
    parameters = [each.to_local().detach() for each in model.parameters()]
    with torch.no_grad():
        for each in parameters:
            each.normal_(std=0.02)
    masters = [each.view_as(each).requires_grad_() for each in parameters]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=0.0, foreach=False)
    senders = {kind: sender_of(model, TensorNames(hf_config), kind, BUCKET_MIB[size]) for kind in KINDS}
    for kind, sender in senders.items():
        info = sender.open(1)
        if dist.get_rank() == 0:
            publish(folder / f"{kind}.pickle", info)
        sender.join()
    taken: dict[str, Any] = {what: {kind: [] for kind in KINDS} for what in ("seconds", "bytes")}
    changed = []
    for version in range(num_syncs + 1):
        before = [each.bfloat16() for each in parameters[:4]]
        for each in masters:
            each.grad = torch.randn_like(each)
        optimizer.step()
        differ = [(old != new.bfloat16()).sum() for old, new in zip(before, parameters, strict=False)]
        changed.append(float(sum(differ)) / sum(each.numel() for each in before))
        for kind, sender in senders.items():
            dist.barrier()
            slow.num_bytes = 0
            began_s = time.perf_counter()
            sender.send(version)
            if version:  # the first one is whole
                taken["seconds"][kind].append(time.perf_counter() - began_s)
                taken["bytes"][kind].append(slow.num_bytes)
    sent: Any = senders["delta"]._sent
    held_bytes = sum(bits.nbytes for bits in sent._sent.values())
    leave_numbers(folder, {**taken, "changed": changed[-1], "held_bytes": held_bytes})
    dist.barrier()


def sender_of(model: Any, names: TensorNames, kind: str, bucket_mib: int) -> WeightSender:
    return WeightSender(
        model,
        names,
        backend="gloo",
        dtype=torch.bfloat16,
        bucket_bytes=bucket_mib << 20,
        timeout_s=TIMEOUT_S,
        changes_alone=kind == "delta",
    )


def receiver(folder: Path, *, size: str, num_syncs: int, gb_s: float) -> None:
    """The process of an engine, without an engine."""
    cpu = torch.device("cpu")
    ends = {kind: IncomingWeights(awaited(folder / f"{kind}.pickle"), index=0, device=cpu) for kind in KINDS}
    engines: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in KINDS}
    pause_s: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def load(kind: str) -> None:
        for weights in ends[kind].buckets():
            for name, tensor in weights:
                if name not in engines[kind]:
                    engines[kind][name] = torch.empty_like(tensor)
                engines[kind][name].copy_(tensor)

    for version in range(num_syncs + 1):
        for kind in KINDS:
            if kind == "delta":
                ends[kind].stage()
            took_s = timed(lambda kind=kind: load(kind))
            if version:
                pause_s[kind].append(took_s)
        for name, tensor in engines["dense"].items():
            assert torch.equal(tensor.view(torch.int16), engines["delta"][name].view(torch.int16)), name
    leave_numbers(folder, {"pause": pause_s})


def timed(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
