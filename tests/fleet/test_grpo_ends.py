"""Runs of GRPO that end before their time: what is said, with which exit code, and that nothing is
left.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fleet.grpo_case import (
    NUM_PROMPTS_PER_STEP,
    NUM_SAMPLES_PER_PROMPT,
    GRPOCase,
    assert_nothing_left,
    finished,
    marked,
    when_logged,
)

pytestmark = pytest.mark.extended


def test_verifier_that_always_raises_ends_the_run(variant: Callable[..., GRPOCase]) -> None:
    case = variant(verifier="broken.py:Broken")
    (case.output_dir.parent / "broken.py").write_text(
        "from open_instruct.rewards.verifier import Verifier\n"
        "class Broken(Verifier):\n"
        "    name = 'digits'\n"
        "    def score(self, completion, ground_truth):\n"
        "        return completion.digits\n"
    )
    said = finished(case.start(), exit_code=1)
    for text in (said, (case.output_dir / "run.log").read_text()):
        assert text.count("return completion.digits") == 1
        assert "the verifier digits: AttributeError: 'str' object has no attribute 'digits'" in text
    assert f"all {NUM_PROMPTS_PER_STEP * NUM_SAMPLES_PER_PROMPT} verdicts of a step failed" in said
    assert not case.rows()


@pytest.mark.parametrize(
    ("words", "number", "last_words", "exit_code"),
    [
        ("prompts: ", signal.SIGHUP, "SIGHUP while ", 129),
        (
            "load their libraries",
            signal.SIGTERM,
            "SIGTERM while starting learners and engines",
            143,
        ),
    ],
    ids=["reading", "starting"],
)
def test_run_that_is_stopped_while_it_starts_leaves_nothing(
    variant: Callable[..., GRPOCase], words: str, number: int, last_words: str, exit_code: int
) -> None:
    case = variant(num_learners_per_node=2)
    process = case.start()
    when_logged(case, process, words)
    os.killpg(process.pid, number)
    said = finished(process, exit_code=exit_code)
    assert last_words in said.splitlines()[-1]
    assert "There is no checkpoint yet" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert_nothing_left(case, process)


def test_hangup_of_the_terminal_ends_the_run_behind_a_checkpoint(
    variant: Callable[..., GRPOCase],
) -> None:
    """The whole group is told of it, and twice."""
    case = variant(checkpointing_steps=100, total_episodes=8000)
    process = case.start()
    case.when_step(1, process, lambda: os.killpg(process.pid, signal.SIGHUP))
    os.killpg(process.pid, signal.SIGHUP)
    said = finished(process, exit_code=129)
    step = len(case.rows())
    assert said.splitlines()[-1].startswith(f"SIGHUP: stopped after step {step}; "), said
    assert (case.output_dir / f"step{step}" / "checkpoint.json").exists()
    assert_nothing_left(case, process)


def test_ray_that_dies_ends_the_run_at_once_in_a_sentence(variant: Callable[..., GRPOCase]) -> None:
    case = variant()
    process = case.start()
    when_logged(case, process, "load their libraries")
    (server,) = [
        pid for pid in marked(process) if "gcs_server" in Path(f"/proc/{pid}/comm").read_text()
    ]
    os.kill(server, signal.SIGKILL)
    said = finished(process, exit_code=1)
    assert "the run's own Ray was killed or crashed while starting" in said.splitlines()[-1], said
    assert "the same command, given again, starts from the beginning" in said.splitlines()[-1]
    assert_nothing_left(case, process)
