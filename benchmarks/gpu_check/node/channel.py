"""Weights of two learners to an engine of one device and one of two, by their channel alone:
`channel_ends.py`.

Over NCCL, each process with a device of its own; in the rehearsal over gloo. Engines are stand-ins
that hold no model; vLLM's own workers take weights in `engines.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from gpu_check.channel_ends import NUM_RECEIVERS
from gpu_check.findings import Findings
from gpu_check.ranks import Run, devices

NUM_LEARNERS = 2


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    more = ("--rehearse",) if rehearse else ()
    words = ("learner", str(work), *more)
    learners = Run(
        name="learners", module="gpu_check.channel_ends", words=words, num_ranks=NUM_LEARNERS
    )
    running = {"learners": learners.start(rehearse=rehearse)}
    for index in range(NUM_RECEIVERS):
        own = {} if rehearse else devices(NUM_LEARNERS + index, 1)
        program = [sys.executable, "-m", "gpu_check.channel_ends", str(index), str(work), *more]
        running[f"receiver {index}"] = subprocess.Popen(program, env=os.environ | own)
    for name, process in running.items():  # told at once: others may wait for one that has ended
        findings.require((code := process.wait()) == 0, f"{name}: ended with code {code}")
    if not findings.failures:
        received = [
            json.loads((work / f"received{index}.json").read_text())
            for index in range(NUM_RECEIVERS)
        ]
        compare(findings, json.loads((work / "sent.json").read_text()), received)


def compare(
    findings: Findings, sent: dict[str, object], received: list[list[dict[str, int]]]
) -> None:
    """Every version that every receiver got against what was sent."""
    sums, seconds, num_bytes = sent["sums"], sent["seconds"], sent["bytes"]
    assert isinstance(sums, list) and isinstance(seconds, list) and isinstance(num_bytes, int)
    for index, versions in enumerate(received):
        wrong = [
            f"version {version}: {name}"
            for version, (came, went) in enumerate(zip(versions, sums, strict=True))
            for name in came.keys() | went.keys()
            if came.get(name) != went.get(name)
        ]
        findings.require(
            not wrong,
            f"receiver {index}: {len(wrong)} tensors are not as they were sent, as {wrong[:3]}",
        )
    rate = num_bytes / min(seconds) / 1e9
    findings.table(
        f"Syncs by {sent['backend']}, {NUM_LEARNERS} learners, engines of one and of two devices",
        [{"version": version, "seconds": each} for version, each in enumerate(seconds)],
    )
    findings.headline = (
        f"{sent['backend']}: {len(sums[0])} tensors as they were sent, {rate:.2f} GB/s"
    )
