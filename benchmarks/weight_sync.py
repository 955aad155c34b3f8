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
than two and a half buckets on any process: with gloo a receiver has two, and the small tensors of one.
"""

import argparse
import json
import os
from pathlib import Path

from harness.memory import MIB
from harness.program import end, parser_of
from sync_runs.measure import BUCKET_MIB, NUM_LEARNERS, Sync, measure

LEAST_RATIO = 0.6
MOST_BUCKETS = 2.5
NOISE_BYTES = MIB  # what the interpreter takes for itself meanwhile


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["small", "base"], choices=list(BUCKET_MIB))
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"], choices=["shm", "gloo"])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="that travels")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        from sync_runs.sides import learner, receiver

        sync, folder = Sync(**json.loads(arguments.worker[0])), Path(arguments.worker[1])
        return (learner if int(os.environ["RANK"]) < NUM_LEARNERS else receiver)(sync, folder)

    missed = []
    print(f"{'size':6}{'way':6}{'MB':>6}{'buckets':>9}{'ours MB/s':>11}{'bare MB/s':>11}{'ratio':>7}  extra memory")
    for size in arguments.sizes:
        for backend in arguments.backends:
            sync = Sync(backend=backend, size=size, dtype=arguments.dtype, num_syncs=arguments.repeat)
            result = measure(sync)
            ratio, megabytes = result["ratio"], result["num_bytes"] / 1e6
            print(
                f"{size:6}{backend:6}{megabytes:>6.0f}{result['num_buckets']:>9}"
                f"{megabytes / result['ours_s']:>11.0f}{megabytes / result['bare_s']:>11.0f}{ratio:>7.2f}  "
                f"{result['learner_buckets']:.2f} buckets a learner, {result['receiver_buckets']:.2f} the receiver",
                flush=True,
            )
            if ratio < LEAST_RATIO:
                missed.append(f"{size} {backend}: the rate is {ratio:.2f} of the bare one, less than {LEAST_RATIO}")
            noise = NOISE_BYTES / sync.bucket_bytes
            if max(result["learner_buckets"], result["receiver_buckets"]) > MOST_BUCKETS + noise:
                missed.append(f"{size} {backend}: a process took more than {MOST_BUCKETS} buckets of memory")
    end(missed)


if __name__ == "__main__":
    main()
