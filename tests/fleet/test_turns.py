"""Learners and engines on the same devices, in turns: whole runs, and what dies in each phase."""

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fleet import dying_engines
from tests.fleet.grpo_case import NUM_STEPS, GRPOCase, finished
from tests.ranks import programs

pytestmark = pytest.mark.extended

SHARED = {"placement": "shared", "num_learners_per_node": 2}
SPLIT = {"num_learners_per_node": 2, "vllm_num_engines": 2}


def digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def split(variant: Callable[..., GRPOCase]) -> GRPOCase:
    case = variant(**SPLIT)
    case.run()
    return case


def test_run_that_takes_turns_is_bitwise_the_one_that_does_not(
    split: GRPOCase, variant: Callable[..., GRPOCase]
) -> None:
    case = variant(**SHARED)
    said = case.run()
    rows = case.rows()
    assert len(rows) == NUM_STEPS
    assert all(row["time/switch"] > 0 for row in rows)
    assert max(row["logprob_diff/max"] for row in rows) < 1e-4
    assert "in turns" in said
    assert digest_of(case.output_dir / "hf_model") == digest_of(split.output_dir / "hf_model")


def test_engines_and_learners_that_die_in_their_turns_are_replaced(
    split: GRPOCase, variant: Callable[..., GRPOCase], tmp_path: Path
) -> None:
    """To the very weights of a run that loses nobody and takes no turns."""
    case = variant(**SHARED, max_restarts=len(dying_engines.PHASES_OF_TURNS) + 1)
    environment = dying_engines.write_deaths(tmp_path, dying_engines.PHASES_OF_TURNS)
    process = programs.start(case.command(), environment=environment, cwd=case.output_dir.parent)
    case.when_step(2, process, lambda: os.kill(case.pids()["learners"][1], signal.SIGKILL))
    said = finished(process, exit_code=0)
    assert tuple(dying_engines.read_deaths(tmp_path)) == dying_engines.PHASES_OF_TURNS
    assert "starting the learners again from the last checkpoint" in said
    assert [row["step"] for row in case.rows()] == [*range(1, NUM_STEPS + 1)]
    assert digest_of(case.output_dir / "hf_model") == digest_of(split.output_dir / "hf_model")


def test_completions_of_later_steps_wait_for_the_learners_turn_and_go_on(
    variant: Callable[..., GRPOCase],
) -> None:
    """On ZeRO too: asynchronous steps with engines of two devices, spare prompts in flight, and
    evaluations behind turns of the learners.
    """
    flags = {
        "dataset_mixer_eval_list": [variant().prompts, "2"],
        "local_eval_every": 2,
        "async_steps": 1,
        "num_spare_prompts": 1,
        "response_length": 24,
        "vllm_tensor_parallel_size": 2,
        "backend": "deepspeed",
        "deepspeed_stage": 2,
    }
    case = variant(**SHARED, **flags)
    case.run()
    rows = case.rows()
    assert len(rows) == NUM_STEPS
    assert max(row["staleness/max"] for row in rows) == 1
    assert [row["step"] for row in rows if "eval/reward" in row] == [2, 4]
    assert all(row["time/switch"] > 0 for row in rows)
