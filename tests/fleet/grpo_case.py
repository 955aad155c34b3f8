"""A GRPO run small enough for tests, with a reward that random weights already earn some of."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from open_instruct.cluster.watchdog import SHARED_MEMORY
from open_instruct.rewards.verifier import Verifier
from tests.ranks import programs
from tests.ranks.fork_server import REPOSITORY, Forked
from tests.waiting import eventually

TIMEOUT_S = 600.0  # far above what a busy machine needs: it is no test of speed
NUM_STEPS = 4
NUM_PROMPTS_PER_STEP = 2
NUM_SAMPLES_PER_PROMPT = 4


class ShareOfDigits(Verifier):
    """How much of an answer is digits: every group has a spread, so every step has something to
    learn.
    """

    name = "digits"
    isolated = False

    def score(self, text: str, ground_truth: Any) -> float:
        return sum(character.isdigit() for character in text) / max(len(text), 1)


def write_prompts(path: Path, num_rows: int, *, verifiers: Sequence[str] = ("digits",)) -> Path:
    judged = {"dataset": list(verifiers)}
    rows = [
        {
            "messages": [{"role": "user", "content": f"Number {i}?"}],
            "ground_truth": [str(i)] * len(verifiers),
        }
        | judged
        for i in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Process = subprocess.Popen[str] | Forked


@dataclass(kw_only=True)
class GRPOCase:
    """One command, run as its users run it; the driver is forked where torch is imported
    already.
    """

    model: Path
    prompts: Path
    output_dir: Path
    script: str = "grpo_olmo_core_actor.py"
    flags: dict[str, Any] = field(default_factory=dict)

    def command(self) -> list[str]:
        flags = {
            "model_name_or_path": self.model,
            "dataset_mixer_list": [self.prompts, "1.0"],
            "verifier": "tests.fleet.grpo_case:ShareOfDigits",
            "num_learners_per_node": 1,
            "vllm_num_engines": 1,
            "vllm_kv_cache_mib": 16,
            "num_unique_prompts_rollout": NUM_PROMPTS_PER_STEP,
            "num_samples_per_prompt_rollout": NUM_SAMPLES_PER_PROMPT,
            "total_episodes": NUM_STEPS * NUM_PROMPTS_PER_STEP * NUM_SAMPLES_PER_PROMPT,
            "response_length": 12,
            "max_prompt_token_length": 32,
            "param_dtype": "float32",
            "learning_rate": "1e-3",
            "async_steps": 0,
            "output_dir": self.output_dir,
        } | self.flags
        words = [str(REPOSITORY / "open_instruct" / self.script)]
        for name, value in flags.items():
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return words

    def start(self) -> Forked:
        return started(self.command(), cwd=self.output_dir.parent)

    def run(self) -> str:
        """To a good end; returns what it said."""
        return finished(self.start(), exit_code=0)

    def rows(self) -> list[dict[str, Any]]:
        path = self.output_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self) -> dict[str, Any]:
        return json.loads((self.output_dir / "pids.json").read_text())

    def when_step(self, step: int, process: Process, then: Callable[[], None]) -> None:
        """Call `then` as soon as the row of `step` is there."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not any(row["step"] >= step for row in self.rows()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline_s, "the step did not come"
            time.sleep(0.02)
        then()


def started(words: list[str], *, cwd: Path) -> Forked:
    """`python WORDS` in `cwd`."""
    return programs.start(words, environment={"PYTHONPATH": str(REPOSITORY)}, cwd=cwd)


def finished(process: Process, *, exit_code: int) -> str:
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        raise
    assert process.returncode == exit_code, said
    return said


def marked(process: Process) -> list[int]:
    """The living processes of a run's fleet, whoever's children they are."""
    mark = f"OPEN_INSTRUCT_FLEET=open_instruct-{process.pid}-".encode()
    pids = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in environment.read_bytes():
                pids.append(int(environment.parent.name))
    return pids


def assert_no_process_left(process: Process) -> None:
    eventually(lambda: not marked(process), nap_s=0.1, what="processes of the run are left")
    assert not list(SHARED_MEMORY.glob(f"open_instruct-{process.pid}-*"))


def assert_nothing_left(case: GRPOCase, process: Process) -> None:
    assert not (case.output_dir / "run.lease").exists()
    assert not (case.output_dir / "pids.json").exists()
    assert_no_process_left(process)


def when_logged(case: GRPOCase, process: Process, words: str) -> None:
    log = case.output_dir / "run.log"

    def is_logged() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return log.exists() and words in log.read_text()

    eventually(is_logged, what=f"{words!r} was not logged")
