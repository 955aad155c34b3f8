"""Rate and memory of a weight sync, beside bare copies of the same bytes in the same buckets.

    python benchmarks/weight_sync.py                       # 50M and 500M parameters, shm and gloo
    python benchmarks/weight_sync.py --sizes small --backends shm
    python benchmarks/weight_sync.py --dtype bfloat16      # half the bytes travel, and the learners cast them

Two FSDP ranks hold fp32 shards and one more process receives them. "bare" is what the way of
travelling costs without us: for shm a copy into the slot and a copy out of it, for gloo a broadcast from
rank 0 to the receiver over the same kind of group. Both are taken in turns in the same processes. Rates are of
the bytes that travel, and medians, as is the ratio, which is taken turn by turn: other work comes and goes.

Memory is anonymous memory (RssAnon) above what the same process held before the channel was opened, as a
multiple of the bucket size. Ends with code 1 if a sync is slower than 0.6 of the bare rate, or takes more
than two buckets on any process.
"""

from __future__ import annotations

import argparse
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)

from benchmarks.load_memory import PeakMemory

MIB = 2**20
NUM_LEARNERS = 2
VOCAB_SIZE = 2048
BUCKET_MIB = {"mini": 4, "small": 32, "base": 64}
TIMEOUT_S = 120.0
LEAST_RATIO = 0.6
MOST_BUCKETS = 2.0
NOISE_BYTES = MIB  # what the interpreter takes for itself meanwhile


def learner(backend: str, size: str, dtype: str, repeat: int, folder: Path, lora_sync: str) -> None:
    """One of the ranks; the first one writes the rates. With a `lora_sync` but "plain" the model has adapters."""
    import torch
    import torch.distributed as dist
    from olmo_core.config import DType
    from olmo_core.distributed.parallel import DataParallelType, build_world_mesh
    from olmo_core.train.train_module.transformer import TransformerDataParallelConfig
    from olmo_core.train.train_module.transformer.common import parallelize_model

    from open_instruct.config.lora import LoRASection
    from open_instruct.models.build import build_model
    from open_instruct.models.hf.names import TensorNames
    from open_instruct.models.lora.adapters import adapt
    from open_instruct.toys.tiny import SIZES, tiny_config
    from open_instruct.weights.sender import WeightSender

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    hf_config = tiny_config(
        "olmo2", SIZES[size], vocab_size=SIZES[size].vocab_size if lora_sync else VOCAB_SIZE, tie=False
    )
    dp = TransformerDataParallelConfig(
        name=DataParallelType.hsdp, num_replicas=1, shard_degree=NUM_LEARNERS, param_dtype=DType.bfloat16
    )
    model = build_model(hf_config)
    if lora_sync not in ("", "plain"):
        adapt(model, LoRASection(use_lora=True), dtype=getattr(torch, dtype))
    model = parallelize_model(
        model,
        world_mesh=build_world_mesh(dp=dp, device_type="cpu"),
        device=torch.device("cpu"),
        max_sequence_length=128,
        dp_config=dp,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().uniform_()
    sender = WeightSender(
        model,
        TensorNames(hf_config),
        backend=backend,
        dtype=getattr(torch, dtype),
        bucket_bytes=BUCKET_MIB[size] * MIB,
        timeout_s=TIMEOUT_S,
        adapter_alone=lora_sync == "adapter",
    )
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
    for repetition in range(repeat + 1):  # the first one touches the memory for the first time
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
    if rank == 0:
        report = {
            "num_bytes": manifest.num_bytes,
            "num_buckets": len(manifest.buckets),
            "ours_s": median(ours_s[1:]),
            "bare_s": median(bare_s[1:]),
            "ratio": median(bare / ours for ours, bare in zip(ours_s[1:], bare_s[1:], strict=True)),
        }
        publish(folder / "report.pickle", report)
    publish(folder / f"memory_{rank}.pickle", {"anonymous": memory.anonymous_bytes})
    dist.barrier()


def receiver(repeat: int, folder: Path) -> None:
    """The process of an engine, without an engine."""
    import torch

    from open_instruct.weights.receiver import IncomingWeights

    info = awaited(folder / "info.pickle")
    memory = PeakMemory()
    memory.start()
    incoming = IncomingWeights(info, index=0, device=torch.device("cpu"))
    bare = None
    for repetition in range(repeat + 1):
        for weights in incoming.buckets():
            for name, tensor in weights:
                del name, tensor
        if repetition == 0:
            memory.stop()
            bare = Bare(info, rank=1, port_path=folder / "bare.pickle")
        bare.receive()
    publish(folder / "memory_receiver.pickle", {"anonymous": memory.anonymous_bytes})


class Bare:
    """The same buckets between two processes, between memory that is there already."""

    def __init__(self, info: dict[str, Any], *, rank: int, port_path: Path) -> None:
        import torch

        from open_instruct.cluster.addresses import LOOPBACK
        from open_instruct.weights import broadcasts, slots
        from open_instruct.weights.manifest import WeightManifest
        from open_instruct.weights.progress import SyncProgress

        self.broadcasts = broadcasts
        self.slot_of = slots.slot_of
        self.manifest = WeightManifest(**info["manifest"])
        self.rank = rank
        self.is_shared = info["backend"] == "shm"
        slot_bytes = self.manifest.largest_bucket_bytes
        self.position = 0
        if rank == 0:
            self.roll = SyncProgress.host(LOOPBACK, timeout_s=TIMEOUT_S)
            path = slots.create_shared_file(slot_bytes)
            publish(port_path, {"port": self.roll.store.port, "path": path})
        else:
            told = awaited(port_path)
            path = told["path"]
            self.roll = SyncProgress.join(
                {"address": LOOPBACK, "port": told["port"], "timeout_s": TIMEOUT_S}, member="receiver 0"
            )
        # The sender's are as many as the weights: fewer would stay in the processor's cache.
        self.memory = torch.ones(slot_bytes if rank else self.manifest.num_bytes, dtype=torch.uint8)
        self.slots = slots.map_shared_file(path, slot_bytes)
        self.roll.report("mapped")
        self.roll.wait("mapped", ["learner 0", "receiver 0"], to="map the file")
        slots.remove_shared_file(path)
        meeting = {"backend": "gloo", "address": LOOPBACK, "port": 1, "num_receivers": 1, "timeout_s": TIMEOUT_S}
        self.group = broadcasts.broadcast_group(
            meeting, self.roll, sender="learner 0", rank=rank, device=torch.device("cpu")
        )

    def send(self) -> float:
        """Seconds until the peer has all of it."""
        self.roll.wait(f"began/{self.position}", ["receiver 0"], to="begin")
        started_s = time.perf_counter()
        first_byte = 0
        for index, bucket in enumerate(self.manifest.buckets):
            position = self.position + index
            source = self.memory[first_byte : first_byte + bucket.num_bytes]
            first_byte += bucket.num_bytes
            if not self.is_shared:
                self.broadcasts.broadcast(self.group, source).wait()
                continue
            if index >= self.broadcasts.NUM_SLOTS:
                self.roll.wait(f"done/{position - self.broadcasts.NUM_SLOTS}", ["receiver 0"], to="copy")
            self.slot_of(self.slots, position, bucket).copy_(source)
            self.roll.report(f"filled/{position}")
        self.position += len(self.manifest.buckets)
        self.roll.wait(f"done/{self.position - 1}", ["receiver 0"], to="copy")
        return time.perf_counter() - started_s

    def receive(self) -> None:
        self.roll.report(f"began/{self.position}")
        for bucket in self.manifest.buckets:
            if self.is_shared:
                self.roll.wait(f"filled/{self.position}", ["learner 0"], to="copy")
                self.memory[: bucket.num_bytes].copy_(self.slot_of(self.slots, self.position, bucket))
            else:
                self.broadcasts.broadcast(self.group, self.memory[: bucket.num_bytes]).wait()
            self.roll.report(f"done/{self.position}")
            self.position += 1


def publish(path: Path, content: dict[str, Any]) -> None:
    path.with_suffix(".partial").write_bytes(pickle.dumps(content))
    path.with_suffix(".partial").rename(path)


def awaited(path: Path) -> dict[str, Any]:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)
    content: dict[str, Any] = pickle.loads(path.read_bytes())
    return content


def measure(backend: str, size: str, dtype: str, repeat: int, lora_sync: str = "") -> dict[str, Any]:
    """Rates, and the largest memory of each kind of process, of three fresh processes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        processes = []
        for rank in range(NUM_LEARNERS + 1):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(NUM_LEARNERS),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(NUM_LEARNERS),
                "NUM_NODES": "1",
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            command = [sys.executable, __file__, "--worker", backend, size, dtype, str(repeat), scratch, lora_sync]
            log = (folder / f"{rank}.log").open("w")
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        codes = [process.wait() for process in processes]
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            sys.exit(f"{backend} failed on process {rank}\n{(folder / f'{rank}.log').read_text()[-4000:]}")
        report = awaited(folder / "report.pickle")
        learners = [awaited(folder / f"memory_{rank}.pickle")["anonymous"] for rank in range(NUM_LEARNERS)]
        received = awaited(folder / "memory_receiver.pickle")["anonymous"]
    bucket_bytes = BUCKET_MIB[size] * MIB
    return {**report, "learner_buckets": max(learners) / bucket_bytes, "receiver_buckets": received / bucket_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["small", "base"], choices=list(BUCKET_MIB))
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"], choices=["shm", "gloo"])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="that travels")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        backend, size, dtype, repeat, scratch, lora_sync = arguments.worker
        if int(os.environ["RANK"]) < NUM_LEARNERS:
            return learner(backend, size, dtype, int(repeat), Path(scratch), lora_sync)
        return receiver(int(repeat), Path(scratch))

    missed = []
    print(f"{'size':6}{'way':6}{'MB':>6}{'buckets':>9}{'ours MB/s':>11}{'bare MB/s':>11}{'ratio':>7}  extra memory")
    for size in arguments.sizes:
        for backend in arguments.backends:
            result = measure(backend, size, arguments.dtype, arguments.repeat)
            ratio, megabytes = result["ratio"], result["num_bytes"] / 1e6
            print(
                f"{size:6}{backend:6}{megabytes:>6.0f}{result['num_buckets']:>9}"
                f"{megabytes / result['ours_s']:>11.0f}{megabytes / result['bare_s']:>11.0f}{ratio:>7.2f}  "
                f"{result['learner_buckets']:.2f} buckets a learner, {result['receiver_buckets']:.2f} the receiver",
                flush=True,
            )
            if ratio < LEAST_RATIO:
                missed.append(f"{size} {backend}: the rate is {ratio:.2f} of the bare one, less than {LEAST_RATIO}")
            noise = NOISE_BYTES / (BUCKET_MIB[size] * MIB)
            if max(result["learner_buckets"], result["receiver_buckets"]) > MOST_BUCKETS + noise:
                missed.append(f"{size} {backend}: a process took more than {MOST_BUCKETS} buckets of memory")
    if missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
