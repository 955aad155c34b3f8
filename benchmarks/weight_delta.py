"""A weight sync of what has changed beside one of all weights: bytes, seconds, and how long an engine pauses.

    python benchmarks/weight_delta.py                      # 500M parameters, over gloo held to 1 GB/s
    python benchmarks/weight_delta.py --size small --num_syncs 3

Two FSDP ranks hold float32 masters, of which AdamW at a learning rate of 1e-6 changes some of the bfloat16 weights in
each step; one more process receives them. Each version is sent twice, in turns: all of it over one channel, what has
changed over another. As this machine has no network, whoever broadcasts sleeps for as long as the bytes would take.
The receiver copies what has come into weights of its own, as an engine does: with all weights it pauses from the first
byte to the last copy, with changes for the copies alone. It compares both to the bit.

Ends with code 1 where changes take more than 0.15 of the bytes, 0.35 of the time or 0.2 of the pause.
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median

from harness.memory import MIB
from harness.processes import numbers_of_workers
from harness.program import end, parser_of
from harness.rounds import paired_median
from sync_runs.measure import BUCKET_MIB, NUM_LEARNERS

MOST = {"bytes": 0.15, "seconds": 0.35, "pause": 0.2}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", default="base", choices=list(BUCKET_MIB))
    parser.add_argument("--num_syncs", type=int, default=5)
    parser.add_argument("--gb_s", type=float, default=1.0)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        from sync_runs.delta_sides import learner, receiver

        settings, folder = json.loads(arguments.worker[0]), Path(arguments.worker[1])
        return (learner if int(os.environ["RANK"]) < NUM_LEARNERS else receiver)(folder, **settings)

    settings = {"size": arguments.size, "num_syncs": arguments.num_syncs, "gb_s": arguments.gb_s}
    *learners, engine = numbers_of_workers(Path(__file__), NUM_LEARNERS, 1, [json.dumps(settings)])
    taken = {**learners[0], "pause": engine["pause"]}
    print(f"{taken['changed']:.1%} of the weights changed in a step")
    missed = []
    for what, most in MOST.items():
        dense, delta = taken[what]["dense"], taken[what]["delta"]
        ratio = paired_median(delta, dense)
        unit, scale = ("MB", 1e6) if what == "bytes" else ("s", 1)
        medians = f"{median(dense) / scale:10.3f}{median(delta) / scale:10.3f} {unit:3}"
        print(f"{what:8}{medians} ratio {ratio:.3f} (at most {most})")
        if ratio > most:
            missed.append(f"{what}: {ratio:.3f} of those of all weights, more than {most}")
    held = max(each["held_bytes"] for each in learners)
    print(f"a learner keeps {held / MIB:.0f} MiB for it, its part of the weights as they were sent")
    end(missed)


if __name__ == "__main__":
    main()
