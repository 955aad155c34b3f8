"""How long a check in the sandbox takes, and one in a process of its own. Exit code 1 above 25 ms
p50, 80 ms p95.

python benchmarks/sandbox.py --num_checks 300
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing

from harness.program import end, parser_of, print_ratio

from open_instruct.config.policy_sections import RewardSection
from open_instruct.rewards.code import Code
from open_instruct.rewards.sandbox.sandbox import SANDBOX
from open_instruct.rewards.sandbox.trial import try_walls

P50_BOUND_MS, P95_BOUND_MS = 25.0, 80.0
PROGRAM = "import math, itertools, collections\n\ndef add(a, b):\n    return a + b\n"
TEST = "assert add(1, 2) == 3"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--num_checks", type=int, default=300)
    args = parser.parse_args()
    try_walls("auto", say=print, warn=print)
    verifier = Code()
    verifier.configure(RewardSection())

    def in_the_sandbox() -> None:
        assert verifier.passes(PROGRAM, TEST, timeout_s=10)

    with closing(SANDBOX):
        ours = timed("a check in the sandbox", in_the_sandbox, args.num_checks)
    other = timed("a process with limits alone", in_a_process, max(args.num_checks // 5, 20))
    print_ratio("p50 of a process to p50 in the sandbox", other[0] / ours[0])
    bounds = (("p50", ours[0], P50_BOUND_MS), ("p95", ours[1], P95_BOUND_MS))
    end([f"{name} {ms:.1f} ms is above {bound:g} ms" for name, ms, bound in bounds if ms > bound])


def in_a_process() -> None:
    command = [sys.executable, "-I", "-S", "-c", f"{PROGRAM}\n{TEST}"]
    subprocess.run(
        command, env={}, check=True, timeout=10, start_new_session=True, preexec_fn=limit
    )


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (10, 10))


def timed(what: str, check: Callable[[], None], num_checks: int) -> tuple[float, float]:
    """Milliseconds, p50 and p95, of one check after the other; the first, which starts the rest,
    does not count.
    """
    check()
    took_ms = []
    for _ in range(num_checks):
        began_s = time.perf_counter()
        check()
        took_ms.append(1000 * (time.perf_counter() - began_s))
    took_ms.sort()
    p50, p95 = (took_ms[int(share * num_checks)] for share in (0.5, 0.95))
    print(f"{what}: p50 {p50:.1f} ms, p95 {p95:.1f} ms")
    return p50, p95


if __name__ == "__main__":
    main()
