"""What `open-instruct plan` predicts of a rank's memory, beside what PyTorch tracks and what a real
run takes.

    python benchmarks/plan_memory.py                # all cases, some minutes on two cores
    python benchmarks/plan_memory.py --cases fp32 full --no_measured

One optimizer step after another of our DPO train module, at its worst moment, on rank 0, in MiB:

- predicted: `planning/memory/phases.py`, the largest of its phases forward, backward and optimizer
  step;
- tracked (`memory_runs/tracked.py`): PyTorch's `FSDPMemTracker` on fake tensors, in a fake process
  group of as many ranks: the real model, sharded and checkpointed by the code that a run uses.
  Nothing is computed, so this counts tensors;
- measured (`memory_runs/measured.py`): real ranks over gloo. Their anonymous memory (RssAnon),
  sampled from a process of its own every millisecond, above what a rank had before its model was
  built, after one product of matrices and one collective had made the libraries' own buffers.

Before these come the optimizer's states, as planned.

What makes the last one sound on a CPU is the allocator: glibc keeps freed memory for later, so that
a process holds more than its tensors. Here every allocation from 64 KiB on is a mapping of its own
that goes back when it is freed (MALLOC_MMAP_THRESHOLD_), there is one arena, and each rank has one
thread. The program exits with 1 if prediction and tracker differ by more than 5%, or prediction and
measurement by more than 10%.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from harness import REPOSITORY
from harness.memory import ALLOCATOR, MIB, memory_bytes
from harness.program import parser_of

from benchmarks.memory_runs.cases import CASES, Case, planned, predicted

SAMPLE_EVERY_S = 0.001
TRACKED_WITHIN, MEASURED_WITHIN = 0.05, 0.10


def tracked(case: Case) -> int:
    """Peak bytes that the tracker counts, in a process of its own, since a process has one fake
    process group.
    """
    command = [sys.executable, "-m", "benchmarks.memory_runs.tracked", json.dumps(asdict(case))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY)
    if ended.returncode != 0:
        sys.exit(f"{case.name}: the tracker failed\n{ended.stderr[-4000:]}")
    return int(ended.stdout.split()[-1])


def measured(case: Case) -> int:
    """Peak bytes of rank 0 in a real run."""
    torchrun = [
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={case.layout.world_size}",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rank = ["-m", "benchmarks.memory_runs.measured", json.dumps(asdict(case)), scratch]
        command = [sys.executable, "-m", *torchrun, *rank]
        with open(folder / "log", "w") as log:
            environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"}
            running = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=REPOSITORY
            )
            samples = []
            while running.poll() is None and not (folder / "done-0").exists():
                built = folder / "built-0"
                if pid := built.read_text() if built.exists() else "":
                    samples.append(_anonymous_bytes(pid))
                time.sleep(SAMPLE_EVERY_S)
            running.wait()
        if running.returncode != 0 or not samples:
            sys.exit(f"{case.name}: the real run failed\n{(folder / 'log').read_text()[-4000:]}")
        return max(samples) - samples[0]


def _anonymous_bytes(pid: str) -> int:
    try:
        return memory_bytes("RssAnon", pid=pid)[0]
    except (OSError, KeyError):  # it has ended
        return 0


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--cases", nargs="+", choices=[case.name for case in CASES], help="default: all"
    )
    parser.add_argument("--no_measured", action="store_true", help="leave out the real runs")
    parser.add_argument("--no_tracked", action="store_true", help="leave out the tracker")
    flags = parser.parse_args()
    columns = {"tracked": (flags.no_tracked, tracked, TRACKED_WITHIN)}
    columns["measured"] = (flags.no_measured, measured, MEASURED_WITHIN)
    is_good = True
    print(
        f"{'case':18}{'states':>8}{'predicted':>10}{'tracked':>10}{'ratio':>8}{'measured':>10}{'ratio':>8} "
        ""
        " worst phase"
    )
    for case in CASES:
        if flags.cases and case.name not in flags.cases:
            continue
        phases = predicted(case)
        worst = max(phases, key=lambda name: phases[name])
        row = f"{case.name:18}{planned(case).optimizer / MIB:>8.0f}{phases[worst] / MIB:>10.0f}"
        for is_left_out, measure, within in columns.values():
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
