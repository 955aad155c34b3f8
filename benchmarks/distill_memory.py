"""Memory of distillation's head at a vocabulary of 100,352: ours, and both models' logits whole.

    python benchmarks/distill_memory.py                    # counts of tensors, and a real run of each in a process

One forward and backward of half the cross-entropy and half KL(teacher || student), from the hidden states of both
models. Plain is the usual way with a single copy of everything: float32 logits of both, log_softmax, `F.kl_div`. Ours
is what a run calls: the student's `LogprobHead` with the comparison of `open_instruct/learner/teacher.py`, as it is.

- counted: tensors that are alive at the same time, on fake tensors, so at the size of a real microbatch, and computed
  in bfloat16;
- measured: the peak of a process's memory (VmHWM) above what it held before, at a size that a laptop has, in float32.

What is held before is left out: weights and hidden states. Gradients of the student's are in both. The program exits
with 1 where ours is more than 0.3 of plain.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(REPOSITORY)

MIB = 2**20
VOCAB_SIZE = 100_352
AT_MOST = 0.3
WAYS = ("plain", "ours")
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counted_tokens", type=int, default=8192, help="labelled tokens of the count")
    parser.add_argument("--counted_width", type=int, default=4096, help="of both models, in the count")
    parser.add_argument("--measured_tokens", type=int, default=2048, help="of the real run; 0 leaves it out")
    parser.add_argument("--measured_width", type=int, default=128)
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def step_of(way: str, num_tokens: int, width: int, dtype_name: str) -> Any:
    """A function that runs forward and backward of the heads once; what it starts from is there already."""
    import torch
    import torch.nn.functional as F

    from open_instruct.learner.teacher import Comparison, OpenedTeacher
    from open_instruct.losses.distillation import divergence
    from open_instruct.models.heads.logprob_head import HeadSettings, LogprobHead, Measure
    from open_instruct.objectives.objective import Teacher

    dtype = getattr(torch, dtype_name)
    head = LogprobHead(d_model=width, vocab_size=VOCAB_SIZE, bias=False, dtype=dtype)
    hidden_BKD = torch.randn(1, num_tokens, width, dtype=dtype, requires_grad=True)
    labels_BK = torch.zeros(1, num_tokens, dtype=torch.long)
    teacher_BKD, teacher_VD = torch.randn(1, num_tokens, width).to(dtype), torch.randn(VOCAB_SIZE, width).to(dtype)

    def plain() -> None:
        logits_NV = head.w_out(hidden_BKD[0]).float()
        with torch.no_grad():
            teacher_NV = F.linear(teacher_BKD[0], teacher_VD).float().log_softmax(dim=-1)
        kl = F.kl_div(logits_NV.log_softmax(dim=-1), teacher_NV, reduction="sum", log_target=True)
        ce = F.cross_entropy(logits_NV, labels_BK[0], reduction="sum")
        (0.5 * (ce + kl) / num_tokens).backward()

    def ours() -> None:
        teacher = Teacher(model_name_or_path="", compare=lambda *both: divergence(*both, beta=0.0))
        opened = OpenedTeacher(teacher=teacher, pretrained=None, vocab_size=VOCAB_SIZE)  # type: ignore[arg-type]
        compare = Comparison(opened=opened, head_VD=teacher_VD).compare_logits
        head.settings = HeadSettings(measure=Measure(compare, (teacher_BKD,)))
        out = head(hidden_BKD, labels=labels_BK, loss_reduction="none", return_logits=False)
        (0.5 * (out.loss.sum() + out.measured.sum()) / num_tokens).backward()

    return {"plain": plain, "ours": ours}[way]


def counted(way: str, num_tokens: int, width: int) -> int:
    """Bytes of the tensors that are alive at the worst moment, beyond those before."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Alive(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.storages: dict[int, Any] = {}
            self.bytes = self.peak = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.add(tensor.untyped_storage())
            return out

        def add(self, storage: Any) -> None:
            key, size = storage._cdata, storage.nbytes()
            if key in self.storages:
                return

            def gone(_: Any) -> None:
                del self.storages[key]
                self.bytes -= size

            self.storages[key] = weakref.ref(storage, gone)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    with FakeTensorMode():
        step = step_of(way, num_tokens, width, "bfloat16")
        with Alive() as alive:
            step()
    return int(alive.peak)


def worker(way: str, num_tokens: int, width: int) -> None:
    step_of(way, 2, 8, "float32")()  # what the libraries set up for themselves
    step = step_of(way, num_tokens, width, "float32")
    before = memory_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    step()
    print(json.dumps((memory_kib("VmHWM") - before) * 1024))


def memory_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def measured(way: str, num_tokens: int, width: int) -> int:
    sizes = ["--measured_tokens", str(num_tokens), "--measured_width", str(width)]
    done = subprocess.run(
        [sys.executable, __file__, "--worker", way, *sizes],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
    )
    return int(json.loads(done.stdout))


def main() -> int:
    args = parse_args()
    if args.worker:
        worker(args.worker, args.measured_tokens, args.measured_width)
        return 0
    within = True
    for name, function, num_tokens, width in (
        ("counted", counted, args.counted_tokens, args.counted_width),
        ("measured", measured, args.measured_tokens, args.measured_width),
    ):
        if num_tokens:
            plain, ours = (function(way, num_tokens, width) for way in WAYS)
            within &= ours <= AT_MOST * plain
            print(
                f"{name}: {num_tokens:,} labelled tokens, width {width:,}, vocabulary {VOCAB_SIZE:,}: plain "
                f"{plain / MIB:,.0f} MiB, ours {ours / MIB:,.0f} MiB, {ours / plain:.3f}x",
                flush=True,
            )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
