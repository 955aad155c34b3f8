"""The learners of a weight sync by changes, each beside one of all weights, and the process that
receives both.
"""

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness.memory import PeakMemory
from harness.processes import leave_numbers
from harness.sharding import sharder

from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.models.build import build_model
from open_instruct.models.hf.names import TensorNames
from open_instruct.weight_sync import sender as sender_module
from open_instruct.weight_sync.broadcasts import PartBroadcaster
from open_instruct.weight_sync.changes import Message, SentParts
from open_instruct.weight_sync.channel import NUM_SLOTS, FindLocal
from open_instruct.weight_sync.receiver import IncomingWeights
from open_instruct.weight_sync.sender import WeightSender
from open_instruct.weight_sync.transports import TRANSPORTS
from sync_runs.measure import NUM_LEARNERS, Sync
from sync_runs.sides import new_sender
from sync_runs.told import awaited, publish

LEARNING_RATE = 1e-6
KINDS = {"dense": False, "delta": True}


class HeldBack(PartBroadcaster):
    """A learner's end of gloo over a network of `gb_s`, which all learners share and buckets pass
    one by one.

    It sleeps where a bucket has not passed yet: before its slot is used again, and at the end of a
    version.
    """

    gb_s = 1.0
    num_bytes = 0
    kept: list[bytes] | None = None
    """What is sent, where that is to be compressed."""

    def put(self, position: int, find_local: FindLocal) -> None:
        passed_s: dict[int, float] = self.__dict__.setdefault("passed_s", {})
        _sleep_until(passed_s.get(position - NUM_SLOTS, 0.0))
        super().put(position, find_local)
        bucket = self.manifest.find_bucket(position)
        start, stop = bucket.span(self.index)
        HeldBack.num_bytes += stop - start
        if HeldBack.kept is not None:
            HeldBack.kept += [
                find_local(name).numpy().tobytes() for name in bucket.parts[self.index]
            ]
        free_s = max(passed_s.get(position - 1, 0.0), time.perf_counter())
        passed_s[position] = free_s + (stop - start) * NUM_LEARNERS / (self.gb_s * 1e9)
        if (position + 1) % len(self.manifest.buckets) == 0:
            _sleep_until(passed_s[position])


class TimedParts(SentParts):
    """Counts the processor's time that finding changes takes, which other work on the machine does
    not lengthen.
    """

    cpu_s = 0.0

    def _encode_message(self, index: int, find_local: FindLocal, *, has_digests: bool) -> Message:
        began_s = time.thread_time()
        message = super()._encode_message(index, find_local, has_digests=has_digests)
        TimedParts.cpu_s += time.thread_time() - began_s
        return message


def learner(sync: Sync, folder: Path, *, gb_s: float, compresses: bool) -> None:
    """One of the ranks."""
    dist.init_process_group("gloo")
    HeldBack.gb_s = gb_s
    TRANSPORTS["gloo"] = (HeldBack, TRANSPORTS["gloo"][1])
    sender_module.SentParts = TimedParts  # type: ignore[misc]
    hf_config = tiny_config(
        "olmo2", SIZES[sync.size], vocab_size=SIZES[sync.size]["vocab_size"], tie=False
    )
    model = sharder(NUM_LEARNERS)(build_model(hf_config))
    parameters = [each.to_local().detach() for each in model.parameters()]
    for each in parameters:
        each.normal_(std=0.02)
    masters = [each.view_as(each).requires_grad_() for each in parameters]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=0.0, foreach=False)
    names = TensorNames(hf_config)
    senders = {
        kind: new_sender(sync, model, names, changes_alone=changes)
        for kind, changes in KINDS.items()
    }
    taken: dict[str, Any] = {
        what: {kind: [] for kind in KINDS} for what in ("began", "seconds", "bytes", "cpu")
    }
    taken["memory"] = {kind: _first_sync(kind, sender, folder) for kind, sender in senders.items()}
    for version in range(1, sync.num_syncs + 1):
        before = [each.bfloat16() for each in parameters[:4]]
        for each in masters:
            each.grad = torch.randn_like(each)
        optimizer.step()
        optimizer.zero_grad()
        differ = sum(
            (old != new.bfloat16()).sum() for old, new in zip(before, parameters, strict=False)
        )
        taken["changed"] = float(differ) / sum(each.numel() for each in before)
        for kind, sender in senders.items():
            HeldBack.kept = (
                [] if compresses and kind == "delta" and version == sync.num_syncs else None
            )
            HeldBack.num_bytes, TimedParts.cpu_s = 0, 0.0
            dist.barrier()
            taken["began"][kind].append(time.perf_counter())
            began_s = time.process_time()
            sender.send(version)
            taken["cpu"][kind].append(time.process_time() - began_s)
            taken["seconds"][kind].append(time.perf_counter() - taken["began"][kind][-1])
            taken["bytes"][kind].append(HeldBack.num_bytes)
    own_bytes = median(taken["bytes"]["dense"])
    taken["compared_gb_s"] = own_bytes / 1e9 / TimedParts.cpu_s  # of the last version
    leave_numbers(folder, {**taken, "compressed": compressed(b"".join(HeldBack.kept or []))})
    dist.barrier()


def _first_sync(kind: str, sender: WeightSender, folder: Path) -> int:
    """Connect and send all; returns the largest memory, above what was there before."""
    memory = PeakMemory()
    memory.start()
    info = sender.open(1)
    if dist.get_rank() == 0:
        publish(folder / f"{kind}.pickle", info)
    sender.join()
    sender.send(0)
    memory.stop()
    return memory.anonymous_bytes


def compressed(told: bytes) -> dict[str, tuple[float, float]]:
    """By compressor, the share of the bytes that is left, and the MB that one thread compresses in
    a second.
    """
    compressors: dict[str, Callable[[bytes], bytes]] = {}
    if told:
        import zstandard  # of this measurement alone

        levels = {
            f"zstd level {level}": zstandard.ZstdCompressor(level=level).compress
            for level in (1, 3)
        }
        compressors = {"zlib level 1": lambda data: zlib.compress(data, 1), **levels}
    found = {}
    for name, compress in compressors.items():
        began_s = time.thread_time()
        share = len(compress(told)) / len(told)
        found[name] = (share, len(told) / 1e6 / (time.thread_time() - began_s))
    return found


def receiver(sync: Sync, folder: Path) -> None:
    """The process of an engine, without an engine: it copies what comes into weights of its own.

    Leaves when it had all weights, and how long it took to copy those that changes were put into
    before.
    """
    engines: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in KINDS}
    ended: dict[str, list[float]] = {kind: [] for kind in KINDS}
    copying_s: list[float] = []
    cpu_s: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "staging")}
    ends: dict[str, IncomingWeights] = {}
    for version in range(sync.num_syncs + 1):
        for kind, changes in KINDS.items():
            if version == 0:
                info = awaited(folder / f"{kind}.pickle")
                ends[kind] = IncomingWeights(info, index=0, device=torch.device("cpu"))
            began_cpu_s = time.process_time()
            if changes:
                ends[kind].stage(version)
                cpu_s["staging"].append(time.process_time() - began_cpu_s)
            began_s = time.perf_counter()
            _load(ends[kind], engines[kind])
            ended[kind].append(time.perf_counter())
            cpu_s[kind].append(time.process_time() - began_cpu_s)
            if changes:
                copying_s.append(ended[kind][-1] - began_s)
        for name, tensor in engines["dense"].items():
            assert torch.equal(
                tensor.view(torch.int16), engines["delta"][name].view(torch.int16)
            ), name
    cpu = {what: each[1:] for what, each in cpu_s.items()}
    leave_numbers(folder, {"ended": ended["dense"][1:], "copying": copying_s[1:], "cpu": cpu})


def _load(incoming: IncomingWeights, engine: dict[str, torch.Tensor]) -> None:
    for weights in incoming.buckets():
        for name, tensor in weights:
            if name not in engine:
                engine[name] = torch.empty_like(tensor)
            engine[name].copy_(tensor)


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.perf_counter()))
