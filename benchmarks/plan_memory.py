"""What `open-instruct plan` predicts of a rank's memory, beside what PyTorch tracks and what a real run takes.

    python benchmarks/plan_memory.py                # all cases, some minutes on two cores
    python benchmarks/plan_memory.py --cases fp32 full --no_measured

One optimizer step after another of our DPO train module, at its worst moment, on rank 0, in MiB:

- predicted: `planning/memory/phases.py`, the largest of its phases forward, backward and optimizer step;
- tracked: PyTorch's `FSDPMemTracker` on fake tensors, in a fake process group of as many ranks: the real model, sharded
  and checkpointed by the code that a run uses. Nothing is computed, so this is a count of tensors;
- measured: real ranks over gloo. Their anonymous memory (RssAnon), sampled from a process of its own every millisecond,
  above what a rank had before its model was built, after one product of matrices and one collective had made the
  libraries' own buffers.

What makes the last one sound on a CPU is the allocator: glibc keeps freed memory for later, so that a process holds
more than its tensors. Here every allocation from 64 KiB on is a mapping of its own that goes back when it is freed
(MALLOC_MMAP_THRESHOLD_), there is one arena, and each rank has one thread. The program exits with 1 if prediction
and tracker differ by more than 5%, or prediction and measurement by more than 10%.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(REPOSITORY)

MIB = 2**20
NUM_STEPS = 2
SAMPLE_EVERY_S = 0.001
TRACKED_WITHIN, MEASURED_WITHIN = 0.05, 0.10
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}
PAIR = ((300, 212), (290, 222))
SHORT_PAIR = ((150, 106), (140, 116))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a step of it: `pairs` are the lengths of (chosen, rejected) documents of one microbatch."""

    name: str
    family: str = "olmo2"
    is_tied: bool = False
    num_layers: int = 8
    vocab_size: int = 16384
    param_dtype: str = "float32"
    checkpointing: str = "none"
    optimizer: str = "adamw"
    shard_degree: int = 2
    num_replicas: int = 1
    num_microbatches: int = 1
    reduces_last: bool = False
    lora_rank: int = 0
    pairs: tuple[tuple[int, int], ...] = PAIR

    @property
    def lengths(self) -> tuple[int, ...]:
        return (*(chosen for chosen, _ in self.pairs), *(rejected for _, rejected in self.pairs))

    @property
    def num_ranks(self) -> int:
        return self.shard_degree * self.num_replicas


CASES = [
    Case(name="fp32"),
    Case(name="fp32-short", pairs=SHORT_PAIR),
    Case(name="full", checkpointing="full"),
    Case(name="selected", checkpointing="selected_modules"),
    Case(name="bf16", param_dtype="bfloat16"),
    Case(name="bf16-full", param_dtype="bfloat16", checkpointing="full"),
    Case(name="bf16-qwen3-tied", param_dtype="bfloat16", family="qwen3", is_tied=True),
    Case(name="llama-accumulate", family="llama", num_microbatches=2, pairs=SHORT_PAIR),
    Case(name="reduced-last", num_microbatches=3, reduces_last=True, pairs=SHORT_PAIR, param_dtype="bfloat16"),
    Case(name="replicas", shard_degree=1, num_replicas=2, pairs=SHORT_PAIR, optimizer="skip_step_adamw"),
    Case(name="adapters", lora_rank=16),
    Case(name="bf16-adapters", lora_rank=16, param_dtype="bfloat16", num_microbatches=2, checkpointing="full"),
    Case(name="four-shards", shard_degree=4, pairs=SHORT_PAIR, checkpointing="full"),
]


def fields_of(case: Case) -> Any:
    """The config.json of a case, as transformers' object."""
    from open_instruct.toys.tiny import Size, tiny_config

    size = Size(
        roughly="",
        hidden=768,
        mlp=2048,
        layers=case.num_layers,
        heads=12,
        kv_heads=6,
        vocab_size=case.vocab_size,
        window=4096,
    )
    return tiny_config(case.family, size, vocab_size=case.vocab_size, tie=case.is_tied)  # type: ignore[arg-type]


def lora_of(case: Case) -> Any:
    """The flags of its adapters; None where all of the model is trained."""
    from open_instruct.config.lora import LoRASection

    return LoRASection(use_lora=True, lora_r=case.lora_rank) if case.lora_rank else None


def predicted(case: Case) -> dict[str, int]:
    """Bytes of each phase of a step."""
    from open_instruct.parallel.layout import resolve_layout
    from open_instruct.planning.memory.phases import Moments, memory_by_phase
    from open_instruct.planning.subject.model import shape_of_fields
    from open_instruct.planning.subject.workload import Workload, adapted

    shape = adapted(shape_of_fields(fields_of(case).to_dict(), name=case.name, where=case.name), lora_of(case))
    layout = resolve_layout([case.num_ranks], fsdp_shard_degree=case.shard_degree)
    workload = Workload(
        algorithm="dpo",
        tokens_per_microbatch=sum(case.lengths),
        longest_sequence=max(case.lengths),
        label_tokens_per_microbatch=sum(case.lengths) - len(case.lengths),
        num_microbatches=case.num_microbatches,
        reduces_last=case.reduces_last,
        param_dtype=case.param_dtype,  # type: ignore[arg-type]
        optimizer=case.optimizer,  # type: ignore[arg-type]
        checkpointing=case.checkpointing,  # type: ignore[arg-type]
        checkpointing_modules=("blocks.*.feed_forward",),
        on_cuda=False,
    )
    phases = memory_by_phase(Moments(shape, layout, workload))
    return {p.name: p.total_bytes for p in phases if p.name in ("forward", "backward", "optimizer step")}


def build_adapted(case: Case) -> Any:
    """The model, with the adapters of its case if it has any."""
    import torch

    from open_instruct.models.build import build_model
    from open_instruct.models.lora.adapters import adapt

    model = build_model(fields_of(case))
    if (lora := lora_of(case)) is not None:
        adapt(model, lora, dtype=getattr(torch, case.param_dtype))
    return model


def build_module(case: Case) -> Any:
    """The train module of a run, on this rank's part of the mesh."""
    import torch

    from open_instruct.config.sections import MemorySection, OptimSection, PreferenceLossSection
    from open_instruct.learner.model.activation_checkpointing import build_activation_checkpointing
    from open_instruct.learner.optim.optimizers import build_optimizer_config
    from open_instruct.olmo_core_train_modules import DPOTrainModule
    from open_instruct.parallel.data_parallel import build_data_parallel_config
    from open_instruct.parallel.layout import resolve_layout

    device = torch.device("cpu")
    layout = resolve_layout([case.num_ranks], fsdp_shard_degree=case.shard_degree)
    memory = MemorySection(activation_checkpointing=case.checkpointing)  # type: ignore[arg-type]
    num_tokens = sum(case.lengths)
    model = build_adapted(case)
    return DPOTrainModule(
        model=model,
        optim=build_optimizer_config(OptimSection(optimizer=case.optimizer), device=device),  # type: ignore[arg-type]
        rank_microbatch_size=num_tokens,
        max_sequence_length=num_tokens,
        dp_config=build_data_parallel_config(layout, param_dtype=case.param_dtype),
        ac_config=build_activation_checkpointing(memory, model=model, device=device)[0],
        max_grad_norm=1.0,
        device=device,
        loss=PreferenceLossSection(),
        reduces_last=case.reduces_last,
    )


def batch_of(case: Case) -> Any:
    """One microbatch of random pairs, with a label at every token but the first of each document."""
    import torch

    from open_instruct.objectives.objective import REFERENCE
    from open_instruct.packing.documents import pack_documents
    from open_instruct.records import Batch, Document, Span

    draw = torch.Generator().manual_seed(0)
    documents = [
        Document(
            token_ids=tuple(torch.randint(case.vocab_size, (length,), generator=draw).tolist()),
            responses=(Span(start=1, stop=length),),
        )
        for length in case.lengths
    ]
    return Batch(
        packed=pack_documents(documents),
        row_ids=tuple(range(len(case.pairs))),
        values={f"{REFERENCE}_S": torch.zeros(len(documents))},
    )


# Measured


def run_rank(case: Case, folder: Path) -> None:
    """One rank of a real run: says when its model is about to be built, and when it is done."""
    import torch
    import torch.distributed as dist

    from open_instruct.models.shards import local_part
    from open_instruct.records import StepBatch

    class Recorder:
        """What a train module asks of its trainer."""

        global_step = NUM_STEPS
        global_train_tokens_seen = 0

        def record_metric(self, *told: Any, **more: Any) -> None:
            pass

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    dtype = getattr(torch, case.param_dtype)
    warm = torch.ones(512, 512, dtype=dtype) @ torch.ones(512, 512, dtype=dtype)
    dist.all_reduce(warm.float())
    del warm
    import olmo_core.train.train_module  # noqa: F401

    from open_instruct import olmo_core_train_modules  # noqa: F401

    batch = batch_of(case)
    fields_of(case)
    dist.barrier()
    (folder / f"built-{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(0.2)
    module = build_module(case)
    module._trainer = Recorder()
    module.scheduler = None
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.model.parameters():
            for row in local_part(parameter):
                row.normal_(0.0, 0.02, generator=draw)
    counts = {"rows": len(case.pairs), "tokens": 0}
    step = StepBatch(microbatches=(batch,) * case.num_microbatches, counts=counts)
    for _ in range(NUM_STEPS):
        module.zero_grads()
        module.train_batch({"step": step})
        module.optim_step()
    dist.barrier()
    (folder / f"done-{dist.get_rank()}").write_text("")
    dist.barrier()
    dist.destroy_process_group()


def measured(case: Case) -> int:
    """Peak bytes of rank 0 in a real run."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.num_ranks}"]
        command += [__file__, "--rank_of", json.dumps(asdict(case)), "--folder", scratch]
        with open(folder / "log", "w") as log:
            running = subprocess.Popen(command, env={**os.environ, **ALLOCATOR}, stdout=log, stderr=log)
            pid = base = None
            peak = 0
            while running.poll() is None and not (folder / "done-0").exists():
                if pid is None and (folder / "built-0").exists():
                    text = (folder / "built-0").read_text()
                    pid = int(text) if text else None
                    base = None if pid is None else _anonymous_bytes(pid)
                if pid is not None:
                    peak = max(peak, _anonymous_bytes(pid))
                time.sleep(SAMPLE_EVERY_S)
            running.wait()
        if running.returncode != 0 or base is None:
            sys.exit(f"{case.name}: the real run failed\n{(folder / 'log').read_text()[-4000:]}")
        return peak - base


def _anonymous_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
    except (OSError, StopIteration):
        return 0


# Tracked


def track(case: Case) -> int:
    """Peak bytes of rank 0 by `FSDPMemTracker`, in this process.

    Fake tensors have no values. The loss is the plain sum of the log-probs; DPO's is a few numbers more.
    """
    import torch
    import torch.distributed as dist
    from olmo_core.distributed.parallel import build_world_mesh
    from olmo_core.train.train_module.transformer.common import parallelize_model
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from open_instruct.config.sections import MemorySection, OptimSection
    from open_instruct.learner.model.activation_checkpointing import build_activation_checkpointing
    from open_instruct.learner.optim.optimizers import build_optimizer_config
    from open_instruct.models.attention.segments import Segments
    from open_instruct.parallel.data_parallel import build_data_parallel_config
    from open_instruct.parallel.layout import resolve_layout

    device = torch.device("cpu")
    dist.init_process_group("fake", rank=0, world_size=case.num_ranks, store=FakeStore())
    layout = resolve_layout([case.num_ranks], fsdp_shard_degree=case.shard_degree)
    dp_config = build_data_parallel_config(layout, param_dtype=case.param_dtype)
    mesh = build_world_mesh(dp=dp_config, device_type="cpu")
    memory = MemorySection(activation_checkpointing=case.checkpointing)  # type: ignore[arg-type]
    optim = OptimSection(optimizer=case.optimizer)  # type: ignore[arg-type]
    num_tokens = sum(case.lengths)
    with FakeTensorMode():
        model = build_adapted(case)
        model = parallelize_model(
            model,
            world_mesh=mesh,
            device=device,
            max_sequence_length=num_tokens,
            rank_microbatch_size=num_tokens,
            dp_config=dp_config,
            ac_config=build_activation_checkpointing(memory, model=model, device=device)[0],
        )
        optimizer = build_optimizer_config(optim, device=device).build(model)
        # DTensor works out shapes with tensors of the global shape the first time; the tracker would count those.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.state.clear()
        ids_BT = torch.zeros(1, num_tokens, dtype=torch.long)
        positions_BK = torch.zeros(1, num_tokens - len(case.lengths), dtype=torch.long)
        segments = Segments.of(case.lengths, (0,) * len(case.lengths), device=device)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((ids_BT, positions_BK, segments.positions_T))
        with tracker:
            for _ in range(NUM_STEPS):
                optimizer.zero_grad(set_to_none=True)
                for index in range(case.num_microbatches):
                    is_last = index == case.num_microbatches - 1
                    model.set_is_last_backward(is_last)
                    (model.set_requires_gradient_sync if case.reduces_last else model.set_requires_all_reduce)(is_last)
                    output = model(
                        ids_BT,
                        labels=ids_BT,
                        loss_reduction="none",
                        return_logits=False,
                        logits_to_keep=positions_BK,
                        segments=segments,
                    )
                    output.loss.sum().backward()
                    del output
                    tracker.reset_mod_stats()  # it follows a module through one pass only
                optimizer.step()
        (peak,) = (of for at, of in tracker.get_tracker_snapshot("peak").items() if at.type == "cpu")
        for kind, num_bytes in sorted(peak.items(), key=str):
            print(kind, f"{num_bytes / MIB:.1f}", file=sys.stderr)
    return int(peak["Total"])


def tracked(case: Case) -> int:
    """`track` in a process of its own, since a process has one fake process group."""
    command = [sys.executable, __file__, "--track", json.dumps(asdict(case))]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if ended.returncode != 0:
        sys.exit(f"{case.name}: the tracker failed\n{ended.stderr[-4000:]}")
    return int(ended.stdout.split()[-1])


def case_of(text: str) -> Case:
    fields = json.loads(text)
    return Case(**fields | {"pairs": tuple(tuple(pair) for pair in fields["pairs"])})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--no_measured", action="store_true", help="leave out the real runs")
    parser.add_argument("--no_tracked", action="store_true", help="leave out the tracker")
    parser.add_argument("--rank_of", type=case_of, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--track", type=case_of, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank_of is not None:
        run_rank(flags.rank_of, flags.folder)
        return 0
    if flags.track is not None:
        print(track(flags.track))
        return 0
    is_good = True
    print(f"{'case':18}{'predicted':>10}{'tracked':>10}{'ratio':>8}{'measured':>10}{'ratio':>8}  worst phase")
    for case in CASES:
        if flags.cases and case.name not in flags.cases:
            continue
        phases = predicted(case)
        worst = max(phases, key=lambda name: phases[name])
        row = f"{case.name:18}{phases[worst] / MIB:>10.0f}"
        for is_left_out, measure, within in (
            (flags.no_tracked, tracked, TRACKED_WITHIN),
            (flags.no_measured, measured, MEASURED_WITHIN),
        ):
            if is_left_out:
                row += f"{'-':>10}{'-':>8}"
                continue
            num_bytes = measure(case)
            ratio = phases[worst] / num_bytes
            is_good &= abs(ratio - 1) <= within
            row += f"{num_bytes / MIB:>10.0f}{ratio:>8.3f}"
        print(f"{row}  {worst}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
