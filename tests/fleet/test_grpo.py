"""Whole runs of GRPO: what one leaves, and how others that are stopped, or lose processes, come to
the same.

Real Ray, real learners over gloo, a real vLLM engine, one command each; see also test_grpo_kinds.py
and test_grpo_ends.py.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from open_instruct.commands import export
from open_instruct.rl.traces import read_traces
from tests.fleet import dying_engines, dying_run
from tests.fleet.grpo_case import (
    NUM_PROMPTS_PER_STEP,
    NUM_SAMPLES_PER_PROMPT,
    TIMEOUT_S,
    GRPOCase,
    Process,
    assert_no_process_left,
    assert_nothing_left,
    finished,
    marked,
    when_logged,
)
from tests.ranks import programs
from tests.ranks.objective_case import assert_opens_whole
from tests.waiting import eventually

pytestmark = pytest.mark.slow

# What scripts read; see README.
EVERY_STEP = {
    *(
        "step",
        "loss",
        "reward",
        "verifier/digits",
        "clip_fraction",
        "rho/mean",
        "rho/max",
        "grad_norm",
        "lr",
    ),
    *(
        "logprob_diff/mean",
        "logprob_diff/max",
        "staleness/mean",
        "sequence_length/mean",
        "truncated_fraction",
    ),
    *("zero_std_fraction", "num_tokens", "time/generate", "time/train", "time/sync", "time/step"),
}
# So many that one can lose an engine, a learner and the driver one after the other.
STEPS = range(1, 8)
LAST_STEP_OF_THE_DRIVER = 5
SECONDS_TO_MISS_AN_ENGINE = 30
RESTART = "; starting it again ("
UNDISTURBED = {
    "num_learners_per_node": 2,
    "total_episodes": len(STEPS) * NUM_PROMPTS_PER_STEP * NUM_SAMPLES_PER_PROMPT,
}
# Nothing in it depends on the clock.
TIMED = ("time/", "tokens_per_second", "peak_memory")


@pytest.fixture(scope="module")
def undisturbed(variant: Callable[..., GRPOCase]) -> GRPOCase:
    """On-policy, two learners: what disturbed runs are compared with."""
    case = variant(
        **UNDISTURBED,
        dataset_mixer_eval_list=[variant().prompts, "2"],
        local_eval_every=2,
    )
    case.run()
    return case


def weights(case: GRPOCase) -> dict[str, torch.Tensor]:
    return load_file(case.output_dir / "hf_model" / "model.safetensors")


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not name.startswith(TIMED)} for row in rows
    ]


def test_run_leaves_every_metric_and_file_that_scripts_read(undisturbed: GRPOCase) -> None:
    rows = undisturbed.rows()
    assert [row["step"] for row in rows] == [*STEPS]
    assert all(set(row) >= EVERY_STEP for row in rows)
    assert all(row["reward"] == row["verifier/digits"] > 0 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    scored = [row["step"] for row in rows if {"eval/reward", "eval/pass_at_1"} <= row.keys()]
    assert scored == [step for step in STEPS if step % 2 == 0 or step == STEPS[-1]]
    out = undisturbed.output_dir
    assert {path.name for path in out.iterdir()} >= {
        "config.yaml",
        "layout.json",
        "run.log",
        "hf_model",
        "step7",
    }
    assert not (out / "pids.json").exists()
    assert json.loads((out / "layout.json").read_text())["shard_degree"] == 2


def test_export_of_the_newest_checkpoint_is_the_model_that_the_run_left(
    undisturbed: GRPOCase, tmp_path: Path
) -> None:
    """Byte for byte; transformers opens it whole, and it has moved from the start model."""
    left, again = undisturbed.output_dir / "hf_model", tmp_path / "again"
    assert export.main([str(undisturbed.output_dir), "--output_dir", str(again)]) == 0
    files = {path.name: path.read_bytes() for path in left.iterdir()}
    assert files == {path.name: path.read_bytes() for path in again.iterdir()}
    assert_opens_whole(undisturbed.output_dir)
    start = load_file(undisturbed.model / "model.safetensors")
    trained = weights(undisturbed)
    assert trained.keys() == start.keys()
    assert not torch.equal(trained["lm_head.weight"], start["lm_head.weight"])


@pytest.mark.extended
def test_ended_run_is_exported_again_when_its_model_is_gone(undisturbed: GRPOCase) -> None:
    before = weights(undisturbed)
    shutil.rmtree(undisturbed.output_dir / "hf_model")
    undisturbed.run()
    after = weights(undisturbed)
    assert before.keys() == after.keys() and all(
        torch.equal(after[name], before[name]) for name in before
    )


def test_engines_and_learners_agree_after_every_sync(undisturbed: GRPOCase) -> None:
    assert max(row["logprob_diff/max"] for row in undisturbed.rows()) < 1e-4
    assert all(row["staleness/max"] == 0 for row in undisturbed.rows())


def test_traces_hold_the_version_of_every_token(undisturbed: GRPOCase) -> None:
    """Those that a run keeps without a flag."""
    for step in STEPS:
        versions = {
            version
            for group in read_traces(undisturbed.output_dir, step)
            for completion in group.completions
            for version in completion.versions
        }
        assert versions == {step - 1}


def assert_same_weights(ours: GRPOCase, theirs: GRPOCase) -> None:
    for name, tensor in weights(theirs).items():
        assert torch.equal(tensor, weights(ours)[name]), name


def test_run_that_loses_engine_learner_and_driver_ends_with_the_weights_of_one_that_loses_nothing(
    variant: Callable[..., GRPOCase], undisturbed: GRPOCase
) -> None:
    """An engine as it reads a version; a learner, which all begin again for from the last
    checkpoint; then the driver, with everything that it has started, and the same command given
    again.

    Engines are sent what has changed of the weights, and whole weights where one of both is new.
    """
    case = variant(
        **UNDISTURBED, checkpointing_steps=2, weight_sync="delta", weight_sync_backend="files"
    )
    process = case.start()
    folder = case.output_dir / "weight_sync"
    killed: list[int] = []

    def kill_engine() -> None:
        # Beside it all: another run in the folder is refused, also while this one is frozen.
        os.kill(process.pid, signal.SIGSTOP)
        try:
            assert f"in use by process {process.pid} on" in finished(case.start(), exit_code=2)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: list(folder.glob("*-2.json")), what="no link of version 2")
        os.kill(case.pids()["engines"][0], signal.SIGKILL)

    def kill_learner() -> None:
        killed.append(case.pids()["learners"][1])
        os.kill(killed[0], signal.SIGKILL)

    case.when_step(1, process, kill_engine)
    case.when_step(3, process, kill_learner)
    when_logged(case, process, "starting the learners again")
    case.when_step(LAST_STEP_OF_THE_DRIVER, process, lambda: process.send_signal(signal.SIGKILL))
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert "engine 0 was lost" in said and "starting it again (1 of 3 restarts)" in said
    assert f"learner rank 1 (node 127.0.0.1, pid {killed[0]})" in said
    assert "starting the learners again from the last checkpoint (1 of 3)" in said
    assert not (case.output_dir / "hf_model").exists(), "killed too late to prove anything"
    assert_no_process_left(process)
    assert "resuming after step" in case.run()
    assert not folder.exists()
    assert [row["step"] for row in case.rows()] == [*STEPS]
    assert_same_weights(case, undisturbed)
    assert {path.name for path in (case.output_dir / "traces").iterdir()} == {
        f"step{step}.parquet" for step in STEPS
    }
    for step in STEPS:  # some of them were taken twice
        assert token_ids_of(case, step) == token_ids_of(undisturbed, step)
        assert case.rows()[step - 1]["reward"] == undisturbed.rows()[step - 1]["reward"]


@pytest.mark.extended
def test_process_that_dies_in_a_phase_of_a_weight_sync_is_replaced(
    variant: Callable[..., GRPOCase], undisturbed: GRPOCase
) -> None:
    """Engines and learners, each in the middle of taking, comparing, loading or sending changes,
    one version after the other: to the very weights of an undisturbed run.
    """
    case = variant(**UNDISTURBED, weight_sync="delta", weight_sync_backend="gloo")
    case = replace(case, script="../tests/fleet/dying_run.py")
    folder = case.output_dir.parent / "dying"
    environment = dying_run.environment_of(folder)
    deaths = ("stage-2", "compare-3", "apply-3", "send-4")
    for death in deaths:
        (folder / death).touch()
    process = programs.start(case.command(), environment=environment, cwd=case.output_dir.parent)
    said = finished(process, exit_code=0)
    assert not {*deaths} & {path.name for path in folder.iterdir()}
    assert "engine 0 was lost" in said and "starting it again (2 of 3 restarts)" in said
    assert "learner rank 1 (node 127.0.0.1" in said and "learner rank 0 (node 127.0.0.1" in said
    assert "starting the learners again from the last checkpoint (2 of 3)" in said
    assert [row["step"] for row in case.rows()] == [*STEPS]
    assert_same_weights(case, undisturbed)
    for step in STEPS:
        assert token_ids_of(case, step) == token_ids_of(undisturbed, step)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("weight_sync", "backend", "phases"),
    [
        ("dense", "shm", dying_engines.PHASES_OF_WHOLE_WEIGHTS),
        ("delta", "gloo", dying_engines.PHASES_OF_CHANGES),
    ],
)
def test_engine_that_dies_in_any_phase_of_a_weight_sync_is_missed_in_seconds_and_replaced(
    variant: Callable[..., GRPOCase],
    undisturbed: GRPOCase,
    tmp_path: Path,
    weight_sync: str,
    backend: str,
    phases: tuple[str, ...],
) -> None:
    """To the very weights of an undisturbed run, and long before the sync's own time-out."""
    flags = {
        "weight_sync": weight_sync,
        "weight_sync_backend": backend,
        "max_restarts": len(phases),
    }
    case = variant(**UNDISTURBED, **flags, weight_sync_timeout_s=20 * SECONDS_TO_MISS_AN_ENGINE)
    environment = dying_engines.write_deaths(tmp_path, phases)
    process = programs.start(case.command(), environment=environment, cwd=case.output_dir.parent)
    finished(process, exit_code=0)
    died_s = dying_engines.read_deaths(tmp_path)
    assert tuple(died_s) == phases
    missed_s = [
        read_time_s(line)
        for line in (case.output_dir / "run.log").read_text().splitlines()
        if RESTART in line
    ]
    for phase, missed in zip(phases, missed_s, strict=True):
        assert missed - died_s[phase] < SECONDS_TO_MISS_AN_ENGINE, phase
    assert [row["step"] for row in case.rows()] == [*STEPS]
    assert_same_weights(case, undisturbed)
    assert_opens_whole(case.output_dir)


def read_time_s(line: str) -> float:
    """Of a line of `run.log`, in seconds since the epoch: `2026-11-29 03:24:39,120 rank 0 …`."""
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def token_ids_of(case: GRPOCase, step: int) -> list[tuple[int, ...]]:
    groups = read_traces(case.output_dir, step)
    return [completion.token_ids for group in groups for completion in group.completions]


def assert_same_steps(ours: GRPOCase, theirs: GRPOCase) -> None:
    # The last step's tokens are of the third version that learners have sent.
    assert max(row["logprob_diff/max"] for row in ours.rows()) < 1e-4
    for our, their in zip(ours.rows(), theirs.rows(), strict=True):
        assert our["reward"] == their["reward"]
        assert our["loss"] == pytest.approx(their["loss"], abs=1e-6)
        assert our["grad_norm"] == pytest.approx(their["grad_norm"], rel=1e-4)


@pytest.mark.extended
def test_learners_on_deepspeed_take_the_same_steps_and_are_replaced(
    variant: Callable[..., GRPOCase], undisturbed: GRPOCase
) -> None:
    """Under ZeRO-3: one is killed, all start again from the last checkpoint, and engines get what
    they have trained.

    Through shared memory, over which an engine is lost too.
    """
    flags = {"deepspeed_stage": 3, "weight_sync": "delta", "weight_sync_backend": "shm"}
    case = replace(variant(**UNDISTURBED, **flags), script="grpo_fast.py")
    process = case.start()
    case.when_step(1, process, lambda: os.kill(case.pids()["engines"][0], signal.SIGKILL))
    case.when_step(3, process, lambda: os.kill(case.pids()["learners"][1], signal.SIGKILL))
    said = finished(process, exit_code=0)
    assert (
        "DeepSpeed ZeRO-3" in said
        and "starting the learners again from the last checkpoint (1 of 3)" in said
    )
    assert "engine 0 was lost" in said and "starting it again (1 of 3 restarts)" in said
    assert "command: grpo\n" in (case.output_dir / "config.yaml").read_text()
    rows = case.rows()
    assert [row["step"] for row in rows] == [*STEPS]
    assert_same_steps(case, undisturbed)
    for name, tensor in weights(undisturbed).items():
        torch.testing.assert_close(weights(case)[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.extended
def test_terminated_run_saves_and_resumes(
    variant: Callable[..., GRPOCase], undisturbed: GRPOCase
) -> None:
    case = variant(
        **UNDISTURBED, checkpointing_steps=100, weight_sync="delta", weight_sync_backend="gloo"
    )
    process = case.start()
    case.when_step(1, process, lambda: stop_all(process))
    said = finished(process, exit_code=143)
    assert "SIGTERM: stopped after step" in said.splitlines()[-1]
    assert_nothing_left(case, process)

    rows = case.prompts.read_text()
    try:
        case.prompts.write_text(rows.replace("Number", "Figure"))
        said = finished(case.start(), exit_code=2)
    finally:
        case.prompts.write_text(rows)
    # Which is said once Ray is there.
    assert "--dataset_mixer_list" in said and "weight sync:" not in said

    said = case.run()
    assert "resuming after step" in said
    assert untimed(case.rows())[-1]["reward"] == untimed(undisturbed.rows())[-1]["reward"]
    assert_same_weights(case, undisturbed)


def stop_all(process: Process) -> None:
    """As systemd and job schedulers do, which signal whatever a run has started, in whichever
    session.
    """
    pids = [
        process.pid,
        *(child.pid for child in psutil.Process(process.pid).children(recursive=True)),
    ]
    for pid in {*pids, *marked(process)}:
        os.kill(pid, signal.SIGTERM)
