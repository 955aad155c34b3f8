"""A weight sync that is measured, and its start in fresh processes.

The processes' own code is in sides.py.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from harness import BENCHMARKS
from harness.memory import MIB
from harness.processes import numbers_of_workers

NUM_LEARNERS = 2
BUCKET_MIB = {"mini": 4, "small": 32, "base": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """`num_syncs` are timed. `lora_sync` is "plain", "merged" or "adapter"; all but "plain" have
    adapters, and with "" there are none and the vocabulary is small.
    """

    backend: str
    size: str
    dtype: str
    num_syncs: int
    lora_sync: str = ""

    @property
    def bucket_bytes(self) -> int:
        return BUCKET_MIB[self.size] * MIB


def measure(sync: Sync) -> dict[str, Any]:
    """Rates, and the largest memory of each kind of process, of three fresh processes."""
    program = BENCHMARKS / "weight_sync.py"
    *learners, receiver = numbers_of_workers(program, NUM_LEARNERS, 1, [json.dumps(asdict(sync))])
    largest = max(learner["anonymous"] for learner in learners)
    return {
        **learners[0]["rates"],
        "learner_buckets": largest / sync.bucket_bytes,
        "receiver_buckets": receiver["anonymous"] / sync.bucket_bytes,
    }
