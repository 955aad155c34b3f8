"""A weight sync by changes beside one of all weights: what it takes, and what a plan says of it."""

import json
import tempfile
from dataclasses import asdict
from statistics import median
from typing import Any

from harness import BENCHMARKS
from harness.memory import MIB
from harness.processes import numbers_of_workers
from harness.rounds import paired_median

from open_instruct.batching.prefixes import FullRows
from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.parallel.layout import resolve_layout
from open_instruct.planning.memory.memory_model import MemoryModel
from open_instruct.planning.memory.parts import SENT
from open_instruct.planning.step_time import COMPARED_GB_S
from open_instruct.planning.subject.read_shape import model_shape
from open_instruct.planning.subject.workload import Workload
from sync_runs.measure import NUM_LEARNERS, Sync

MOST = {"bytes": 0.15, "seconds": 0.35, "pause": 0.2}
MOST_OF_PLAN = 1.05


def show_changes(sync: Sync, *, gb_s: float, compresses: bool) -> list[str]:
    """Run and print both, and return which bounds were missed."""
    settings = {"sync": asdict(sync), "gb_s": gb_s, "compresses": compresses}
    program = BENCHMARKS / "weight_sync.py"
    *learners, engine = numbers_of_workers(program, NUM_LEARNERS, 1, [json.dumps(settings)])
    taken: dict[str, Any] = learners[0]
    pauses = [
        ended - began for ended, began in zip(engine["ended"], taken["began"]["dense"], strict=True)
    ]
    taken["pause"] = {"dense": pauses, "delta": engine["copying"]}
    print(f"{taken['changed']:.1%} of the weights changed in a step{'':8}all   changed")
    missed = []
    for what, most in MOST.items():
        dense, delta = taken[what]["dense"], taken[what]["delta"]
        ratio = paired_median(delta, dense)
        unit, scale = ("MB of a learner", 1e6) if what == "bytes" else ("s", 1)
        print(
            f"{what:8}{unit:27}{median(dense) / scale:10.3f}{median(delta) / scale:10.3f}  ratio "
            f"{ratio:.3f} of {most}"
        )
        if ratio > most:
            missed.append(f"{what}: {ratio:.3f} of those of all weights, more than {most}")
    extra = max(each["memory"]["delta"] - each["memory"]["dense"] for each in learners)
    planned = planned_bytes(sync)
    print(f"memory  MiB more of a learner{extra / MIB:24.0f}  planned {planned / MIB:.0f}")
    if extra > MOST_OF_PLAN * planned:
        missed.append(
            f"memory: {extra / MIB:.0f} MiB, more than the {planned / MIB:.0f} of the plan"
        )
    for who, cpu in (("a learner", taken["cpu"]), ("the receiver", engine["cpu"])):
        told = ", ".join(f"{median(seconds):.3f} {what}" for what, seconds in cpu.items())
        print(f"seconds of processors, {who}: {told}")
    print(f"one thread compares {taken['compared_gb_s']:.2f} GB/s, a plan takes {COMPARED_GB_S}")
    for name, (share, mb_s) in taken["compressed"].items():
        print(f"{name}: {share:.2f} of the bytes, {mb_s:.0f} MB/s")
    return missed


def planned_bytes(sync: Sync) -> int:
    """The host memory that a plan counts for finding changes, of one learner."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_config(
            "olmo2", SIZES[sync.size], vocab_size=SIZES[sync.size]["vocab_size"], tie=False
        ).save_pretrained(folder)
        shape = model_shape(folder)
    workload = Workload(
        algorithm="grpo",
        tokens_per_microbatch=1,
        rows=FullRows(length=1),
        label_tokens_per_microbatch=1,
        num_microbatches=1,
        num_engines=1,
        sync_bucket_bytes=sync.bucket_bytes,
        sync_choice=("delta", ""),
    )
    return MemoryModel(shape, resolve_layout([NUM_LEARNERS]), workload).host_copies()[SENT]
