"""Time and memory of planning a 32B model on 1,024 GPUs, and of ranking all its layouts, against
their bounds.

    python benchmarks/plan_speed.py
    python benchmarks/plan_speed.py --model meta-llama/Llama-3.1-405B --num_nodes 512

Each number is of a process of its own, from its start to its end. Exit code 1 beyond a bound.
"""

import resource
import subprocess
import sys
import time

from harness import REPOSITORY
from harness.program import parser_of

PLAN_BOUND_S, RANKING_BOUND_S, MEMORY_BOUND_GIB = 10.0, 30.0, 4.0

IMPORTS = """
import sys
from open_instruct.planning.plan import make_plan
from open_instruct.planning.advice import Advice
from open_instruct.commands.plan import parse_request
setting = parse_request(sys.argv[1:]).setting
"""
PROGRAMS = {
    "one plan": IMPORTS
    + "plan = make_plan(setting); print('1 layout,', f'{plan.time.step_s:.2f} s a step')",
    "all layouts ranked": IMPORTS + "print(len(Advice(make_plan(setting)).ranked), 'layouts')",
}
BOUNDS_S = {"one plan": PLAN_BOUND_S, "all layouts ranked": RANKING_BOUND_S}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--model", default="allenai/OLMo-2-0325-32B", help="a public model, or a config.json"
    )
    parser.add_argument("--num_nodes", type=int, default=128)
    parser.add_argument("--gpus_per_node", type=int, default=8)
    flags = parser.parse_args()
    words = ["dpo", "--model_name_or_path", flags.model]
    words += ["--num_nodes", str(flags.num_nodes), "--gpus_per_node", str(flags.gpus_per_node)]
    print(f"{flags.model} on {flags.num_nodes * flags.gpus_per_node} GPUs")
    within = True
    for name, program in PROGRAMS.items():
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        wall_s = time.monotonic() - start
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        # ru_maxrss is the largest of all children so far, in KiB on Linux.
        memory_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        within = within and wall_s < BOUNDS_S[name] and memory_gib < MEMORY_BOUND_GIB
        print(
            f"{name:<20} {wall_s:6.2f} s of {BOUNDS_S[name]:g} s   {memory_gib:.2f} GiB of "
            f"{MEMORY_BOUND_GIB:g} GiB   {done.stdout.strip()}"
        )
    print("within all bounds" if within else "BEYOND A BOUND")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
