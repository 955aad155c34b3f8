"""Rate and memory of a weight sync, beside bare copies of the same bytes in the same buckets.

    python benchmarks/weight_sync.py                       # 50M and 500M parameters, shm and gloo
    python benchmarks/weight_sync.py --sizes small --backends shm
    python benchmarks/weight_sync.py --dtype bfloat16      # half the bytes travel, and the learners cast them
    python benchmarks/weight_sync.py --changes             # 500M parameters, of which what has changed is sent

Two FSDP ranks hold fp32 shards and one more process receives them. "bare" is what the way of
travelling costs without us: for shm a copy into the slot and a copy out of it, for gloo a broadcast
from rank 0 to the receiver over the same kind of group. Both are taken in turns in the same
processes. Rates are of the bytes that travel, and medians, as is the ratio, which is taken turn by
turn: other work comes and goes.

Memory is anonymous memory (RssAnon) above what the same process held before the channel was opened,
as a multiple of the bucket size. Ends with code 1 if a sync is slower than 0.6 of the bare rate, or
takes more than two and a half buckets on any process: with gloo a receiver has two, and the small
tensors of one.

With --changes the learners' AdamW, at a learning rate of 1e-6, changes some of the bfloat16 weights
in each step, and each version is sent twice, in turns: all of it over one channel, what has changed
over another, both over gloo. As one machine has no network, learners sleep for as long as their
bytes would take at --gb_s. The receiver copies what has come into weights of its own: with all
weights an engine would pause from the learners' first byte to the last copy, with changes for the
copies alone. It compares both to the bit. Code 1 where changes take more than 0.15 of the bytes,
0.35 of the time or 0.2 of the pause, or more memory than planned.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from harness.memory import MIB
from harness.program import end, parser_of
from sync_runs.changes import show_changes
from sync_runs.measure import BUCKET_MIB, NUM_LEARNERS, Sync, measure

LEAST_RATIO = 0.6
MOST_BUCKETS = 2.5
NOISE_BYTES = MIB  # what the interpreter takes for itself meanwhile


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["small", "base"], choices=list(BUCKET_MIB))
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"], choices=["shm", "gloo"])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="that travels"
    )
    parser.add_argument(
        "--changes", action="store_true", help="send what has changed, beside all weights"
    )
    parser.add_argument("--num_syncs", type=int, default=5, help="with --changes")
    parser.add_argument(
        "--gb_s", type=float, default=1.0, help="of the network that is pretended with --changes"
    )
    parser.add_argument(
        "--compress",
        action="store_true",
        help="also compress changes; needs `pip install zstandard`",
    )
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(json.loads(arguments.worker[0]), Path(arguments.worker[1]))
    if arguments.changes:
        sync = Sync(
            backend="gloo",
            size=arguments.sizes[-1],
            dtype="bfloat16",
            num_syncs=arguments.num_syncs,
        )
        return end(show_changes(sync, gb_s=arguments.gb_s, compresses=arguments.compress))

    missed = []
    print(
        f"{'size':6}{'way':6}{'MB':>6}{'buckets':>9}{'ours MB/s':>11}{'bare MB/s':>11}{'ratio':>7} "
        " extra memory"
    )
    for size in arguments.sizes:
        for backend in arguments.backends:
            sync = Sync(
                backend=backend, size=size, dtype=arguments.dtype, num_syncs=arguments.repeat
            )
            result = measure(sync)
            ratio, megabytes = result["ratio"], result["num_bytes"] / 1e6
            print(
                f"{size:6}{backend:6}{megabytes:>6.0f}{result['num_buckets']:>9}{megabytes / result['ours_s']:>11.0f}{megabytes / result['bare_s']:>11.0f}{ratio:>7.2f} "
                ""
                f" {result['learner_buckets']:.2f} buckets a learner, "
                f"{result['receiver_buckets']:.2f} the receiver",
                flush=True,
            )
            if ratio < LEAST_RATIO:
                missed.append(
                    f"{size} {backend}: the rate is {ratio:.2f} of the bare one, less than "
                    f"{LEAST_RATIO}"
                )
            noise = NOISE_BYTES / sync.bucket_bytes
            if max(result["learner_buckets"], result["receiver_buckets"]) > MOST_BUCKETS + noise:
                missed.append(
                    f"{size} {backend}: a process took more than {MOST_BUCKETS} buckets of memory"
                )
    end(missed)


def work(settings: dict[str, Any], folder: Path) -> None:
    """A process of a sync: a learner, or the receiver."""
    from sync_runs import changes_sides, sides

    is_learner = int(os.environ["RANK"]) < NUM_LEARNERS
    if "sync" in settings:
        sync = Sync(**settings.pop("sync"))
        return (
            changes_sides.learner(sync, folder, **settings)
            if is_learner
            else changes_sides.receiver(sync, folder)
        )
    return (sides.learner if is_learner else sides.receiver)(Sync(**settings), folder)


if __name__ == "__main__":
    main()
