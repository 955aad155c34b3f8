"""A thousand steps of GRPO: no process of the run needs more memory for the last ones than for the
first.
"""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fleet.grpo_case import (
    NUM_PROMPTS_PER_STEP,
    GRPOCase,
    Process,
    ShareOfDigits,
    finished,
    write_prompts,
)
from tests.ranks import programs
from tests.ranks.fork_server import REPOSITORY
from tests.ranks.shallow import write_shallow_model

pytestmark = pytest.mark.extended

NUM_STEPS = 1000
# Until then caches fill; between the two of them a leak of 64 KiB a step would add 40 MiB.
EARLY_STEP, LATE_STEP = 300, 950
MOST_GROWTH_MIB = 40
PATIENCE_S = 5400.0  # far above what a busy machine needs: it is no test of speed


class JudgedElsewhere(ShareOfDigits):
    """Judges in a process of its own, as verifiers of users do."""

    name = "digits_elsewhere"
    isolated = True


def test_no_process_grows_over_a_thousand_steps(tmp_path: Path) -> None:
    case = GRPOCase(
        model=write_shallow_model(tmp_path / "model", family="olmo2", layers=1, is_narrow=False),
        prompts=write_prompts(tmp_path / "prompts.jsonl", 6, verifiers=(JudgedElsewhere.name,)),
        output_dir=tmp_path / "out",
        flags={
            "verifier": "tests.fleet.test_long_run:JudgedElsewhere",
            "num_verifier_processes": 1,
            "num_samples_per_prompt_rollout": 2,
            "total_episodes": NUM_STEPS * NUM_PROMPTS_PER_STEP * 2,
            "response_length": 6,
            "checkpointing_steps": 100,
            "keep_last_n_checkpoints": 1,
        },
    )
    # What oneDNN compiles is kept by design, and would hide a leak (docs/benchmarks.md).
    environment = {"PYTHONPATH": str(REPOSITORY), "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
    process = programs.start(case.command(), environment=environment, cwd=tmp_path)
    wait_for_step(case, EARLY_STEP, process)
    early = read_memory_mib(case, process)
    wait_for_step(case, LATE_STEP, process)
    late = read_memory_mib(case, process)
    finished(process, exit_code=0)
    growth = {role: late[role] - early[role] for role in early}
    assert early.keys() == {"driver", "learner", "engine", "judge"}
    assert max(growth.values()) < MOST_GROWTH_MIB, (early, late)
    assert len(case.rows()) == NUM_STEPS
    assert not any(row["num_verifier_problems"] for row in case.rows())


def wait_for_step(case: GRPOCase, step: int, process: Process) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while read_newest_step(case.output_dir / "metrics.jsonl") < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s, f"step {step} did not come"
        time.sleep(0.5)


def read_newest_step(metrics: Path) -> int:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    whole = [line for line in lines[-2:] if line.endswith("}")]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def read_memory_mib(case: GRPOCase, process: Process) -> dict[str, float]:
    """Anonymous memory by what a process is; the judge's are one that is warm and those that it has
    forked.
    """
    pids: dict[str, Any] = case.pids()
    descendants = psutil.Process(process.pid).children(recursive=True)
    judges = [each.pid for each in descendants if "utf8" in each.cmdline()]
    by_role = {
        "driver": [process.pid],
        "learner": pids["learners"],
        "engine": pids["engines"],
        "judge": judges,
    }
    return {role: sum(map(read_anonymous_mib, each)) for role, each in by_role.items() if each}


def read_anonymous_mib(pid: int) -> float:
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(fields["RssAnon"].split()[0]) / 1024
