"""A run that is stopped and started again ends where the run that was never stopped ends."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import programs
from tests.ranks.fork_server import REPOSITORY, Forked
from tests.ranks.train_case import TrainCase, free_ports

NUM_STEPS = 12
TIMEOUT_S = 600.0
ENTRY = str(REPOSITORY / "open_instruct" / "dpo.py")


def start(command: list[str], *, ranks: int) -> Forked:
    """The command a user gives: plain Python for one rank, torchrun for more."""
    torchrun = [
        *programs.TORCHRUN,
        "--nproc_per_node",
        str(ranks),
        "--master_port",
        str(free_ports(1)[0]),
    ]
    return programs.start([*(torchrun if ranks > 1 else ()), ENTRY, *command])


def finish(process: Forked) -> str:
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    return output


def wait_for_rows(metrics: Path, count: int, process: Forked) -> None:
    """Until `metrics` has that many rows, so that a checkpoint lies behind and steps lie ahead."""
    deadline = time.monotonic() + TIMEOUT_S
    while not metrics.exists() or metrics.read_text().count("\n") < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.005)


def kill(process: Forked) -> None:
    """SIGKILL the launcher and every rank: torchrun gives each rank a session of its own."""
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, ranks)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()


Command = Callable[[str], list[str]]


@pytest.fixture
def command_of(dpo_case: TrainCase) -> Callable[..., Command]:
    def with_flags(*, ranks: int, **flags: object) -> Command:
        settings = {"max_train_steps": NUM_STEPS, "checkpointing_steps": 2, **flags}
        return lambda name: dpo_case.command(name, ranks=ranks, **settings)

    return with_flags


@pytest.mark.parametrize(
    "optimizer", ["adamw", pytest.param("adamw_8bit", marks=pytest.mark.extended)]
)
def test_killed_run_resumes_bitwise_in_bfloat16(
    dpo_case: TrainCase, command_of: Callable[..., Command], optimizer: str
) -> None:
    command = command_of(
        ranks=2, param_dtype="bfloat16", optimizer=optimizer, keep_last_n_checkpoints=2
    )
    undisturbed, killed = f"bf16_{optimizer}_undisturbed", f"bf16_{optimizer}_killed"
    finish(start(command(undisturbed), ranks=2))

    process = start(command(killed), ranks=2)
    wait_for_rows(dpo_case.folder / killed / "metrics.jsonl", 5, process)
    kill(process)
    assert not (dpo_case.folder / killed / "hf_model").exists(), "killed too late to prove anything"
    output = finish(start(command(killed), ranks=2))

    assert "resuming after step" in output
    assert dpo_case.trajectory(killed) == dpo_case.trajectory(undisturbed)
    assert dpo_case.weights_digest(killed) == dpo_case.weights_digest(undisturbed)
    for name in (undisturbed, killed):
        # The last two, whichever run wrote them.
        assert sorted(path.name for path in (dpo_case.folder / name).glob("step*")) == [
            "step10",
            "step12",
        ]


@pytest.mark.extended
def test_damaged_newest_checkpoint_is_gone_around_bitwise(
    dpo_case: TrainCase, command_of: Callable[..., Command]
) -> None:
    command = command_of(ranks=2, param_dtype="bfloat16", max_train_steps=4)
    first = finish(start(command("gone_around"), ranks=2))
    undisturbed = dpo_case.weights_digest("gone_around"), dpo_case.trajectory("gone_around")
    run = dpo_case.folder / "gone_around"
    weights = run / "step4" / "rank1.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)

    output = finish(start(command("gone_around"), ranks=2))
    told = " ".join(output.split())
    assert (
        "warning: the checkpoint step4 is damaged" in told
        and f"{weights} is not what was written" in told
    )
    assert "resuming after step 2 of 4" in told and "damaged" not in first
    assert (
        dpo_case.weights_digest("gone_around"),
        dpo_case.trajectory("gone_around"),
    ) == undisturbed
    assert sorted(path.name for path in run.glob("step*")) == ["step2", "step4", "step4-damaged"]


@pytest.mark.extended
def test_ended_run_goes_on_when_it_is_given_more_steps(
    dpo_case: TrainCase, command_of: Callable[..., Command]
) -> None:
    """With the learning rate of the longer run, which is told."""
    two, four = (command_of(ranks=1, max_train_steps=steps) for steps in (2, 4))
    finish(start(two("ended"), ranks=1))
    output = " ".join(finish(start(four("ended"), ranks=1)).split())
    assert (
        "had ended after step 2, and goes on from there (--max_train_steps was 2, is 4)" in output
    )
    assert "--lr_scheduler_type linear" in output and "resuming after step 2 of 4" in output
    finish(start(four("at_once"), ranks=1))
    rates = [[row["lr"] for row in dpo_case.metrics(name)] for name in ("ended", "at_once")]
    assert rates[0][2:] == rates[1][2:] and rates[0][1] < rates[1][1]
    refused = start(two("ended"), ranks=1)
    output, _ = refused.communicate(timeout=TIMEOUT_S)
    assert refused.returncode == 2 and "--max_train_steps was 4, is 2" in output


@pytest.mark.extended
@pytest.mark.parametrize(
    ("optimizer", "number", "exit_code"),
    [
        ("skip_step_adamw", signal.SIGTERM, 143),
        ("muon", signal.SIGHUP, 129),  # it takes AdamW's steps too
        ("adamw_8bit", signal.SIGTERM, 143),
    ],
)
def test_terminated_run_resumes_bitwise_in_float32(
    dpo_case: TrainCase,
    command_of: Callable[..., Command],
    optimizer: str,
    number: signal.Signals,
    exit_code: int,
) -> None:
    command = command_of(ranks=1, optimizer=optimizer, checkpointing_steps=100)
    undisturbed, stopped = f"{optimizer}_undisturbed", f"{optimizer}_stopped"
    finish(start(command(undisturbed), ranks=1))

    process = start(command(stopped), ranks=1)
    wait_for_rows(dpo_case.folder / stopped / "metrics.jsonl", 2, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == exit_code, output
    assert number.name in output and "Give the same command again" in output
    num_steps = len(dpo_case.metrics(stopped))
    assert 2 <= num_steps < NUM_STEPS, "stopped too late to prove anything"
    assert (dpo_case.folder / stopped / f"step{num_steps}").is_dir()

    rows = dpo_case.rows.read_text()
    try:
        dpo_case.rows.write_text("".join(reversed(rows.splitlines(keepends=True))))
        process = start(command(stopped), ranks=1)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        dpo_case.rows.write_text(rows)
    # Before the reference's log-probs are asked for, and so before a model is there.
    assert process.returncode == 2 and "--mixer_list" in output and "log-probs" not in output, (
        output
    )

    finish(start(command(stopped), ranks=1))
    assert dpo_case.trajectory(stopped) == dpo_case.trajectory(undisturbed)
    assert dpo_case.weights_digest(stopped) == dpo_case.weights_digest(undisturbed)


@pytest.mark.extended
def test_run_of_four_ranks_resumes_on_two(
    dpo_case: TrainCase, command_of: Callable[..., Command]
) -> None:
    on_four = command_of(ranks=4, batch=1, fsdp_shard_degree=2)
    on_two = command_of(ranks=2, batch=1)
    finish(start(on_two("elastic_undisturbed"), ranks=2))

    process = start(on_four("elastic"), ranks=4)
    wait_for_rows(dpo_case.folder / "elastic" / "metrics.jsonl", 5, process)
    kill(process)
    output = finish(start(on_two("elastic"), ranks=2))

    assert "resuming after step" in output
    for ours, theirs in zip(
        dpo_case.trajectory("elastic"), dpo_case.trajectory("elastic_undisturbed"), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-5)
