"""dpo.py, with the peaks of each rank's memory before its first step and since; run by
`offload_vs_trl.py`.

Each rank writes OUT/rank{N}.json, where OUT is the first word; the others are dpo.py's.
"""

import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.memory import forget_peak, memory_bytes
from harness.processes import leave_numbers

from open_instruct.dpo import main
from open_instruct.training.policy import Policy


def noted_peaks() -> dict[str, int]:
    """The most that this process held before the first step, and since, until the end of the
    last.
    """
    peaks = {"before": 0, "steps": 0}
    forward_backward, update = Policy.forward_backward, Policy.update

    def noted_forward_backward(policy: Policy, *arguments: Any) -> Any:
        if not peaks["before"]:
            (peaks["before"],) = memory_bytes("VmHWM")
            forget_peak()
        return forward_backward(policy, *arguments)

    def noted_update(policy: Policy) -> Any:
        metrics = update(policy)
        (peaks["steps"],) = memory_bytes("VmHWM")
        return metrics

    Policy.forward_backward = noted_forward_backward  # type: ignore[method-assign]
    Policy.update = noted_update  # type: ignore[method-assign]
    return peaks


if __name__ == "__main__":
    peak_bytes = noted_peaks()
    code = main(sys.argv[2:])
    leave_numbers(Path(sys.argv[1]), {"peak_bytes": peak_bytes})
    sys.exit(code)
