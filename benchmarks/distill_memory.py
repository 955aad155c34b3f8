"""Memory of distillation's head at a vocabulary of 100,352: ours, and both models' logits whole.

    python benchmarks/distill_memory.py                    # counts of tensors, and a real run of each in a process

One forward and backward of half the cross-entropy and half KL(teacher || student), from the hidden
states of both models. Plain is the usual way with a single copy of everything: float32 logits of
both, log_softmax, `F.kl_div`. Ours is what a run calls: the student's `LogprobHead` with the
comparison of `open_instruct/training/reference.py`, as it is.

- counted: tensors that are alive at the same time, on fake tensors, so at the size of a real
  microbatch, and computed in bfloat16;
- measured: the peak of a process's memory (VmHWM) above what it held before, at a size that a
  laptop has, in float32.

What is held before is left out: weights and hidden states. Gradients of the student's are in both.
The program exits with 1 where ours is more than 0.3 of plain.
"""

import argparse
import json
import sys

from distill_runs.counted import counted
from distill_runs.heads import VOCAB_SIZE, step_of
from harness.memory import ALLOCATOR, MIB, forget_peak, memory_bytes
from harness.processes import run
from harness.program import parser_of

AT_MOST = 0.3
WAYS = ("plain", "ours")


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--counted_tokens", type=int, default=8192, help="labelled tokens of the count"
    )
    parser.add_argument(
        "--counted_width", type=int, default=4096, help="of both models, in the count"
    )
    parser.add_argument(
        "--measured_tokens", type=int, default=2048, help="of the real run; 0 leaves it out"
    )
    parser.add_argument("--measured_width", type=int, default=128)
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(way: str, num_tokens: int, width: int) -> None:
    step_of(way, 2, 8, "float32")()  # what the libraries set up for themselves
    step = step_of(way, num_tokens, width, "float32")
    (before,) = memory_bytes("VmRSS")
    forget_peak()
    step()
    (peak,) = memory_bytes("VmHWM")
    print(json.dumps(peak - before))


def measured(way: str, num_tokens: int, width: int) -> int:
    """Bytes of a process of its own."""
    words = ["--worker", way, "--measured_tokens", num_tokens, "--measured_width", width]
    return int(json.loads(run([sys.executable, __file__, *words], environment=ALLOCATOR)))


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
                f"{name}: {num_tokens:,} labelled tokens, width {width:,}, vocabulary "
                f"{VOCAB_SIZE:,}: plain {plain / MIB:,.0f} MiB, ours {ours / MIB:,.0f} MiB, "
                f"{ours / plain:.3f}x",
                flush=True,
            )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
