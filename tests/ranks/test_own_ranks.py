"""Ranks that a command starts by itself: what is done, said and returned."""

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from open_instruct.parallel.processes import has_ended
from tests.ranks import programs
from tests.ranks.fork_server import REPOSITORY, Forked
from tests.ranks.test_faults import MANY_STEPS, once, pids_of, rows_in, running, said_by
from tests.ranks.train_case import TrainCase
from tests.waiting import eventually

pytestmark = pytest.mark.extended


def start(command: list[str], *, ignored: Sequence[int] = ()) -> Forked:
    words = [str(REPOSITORY / "open_instruct" / "dpo.py"), *command, "--num_processes", "2"]
    return programs.start(words, ignored=ignored)


def test_ranks_of_a_command_train_as_those_of_torchrun_do(dpo_case: TrainCase) -> None:
    said = said_by(process := start(dpo_case.command("own_ranks", ranks=2, max_train_steps=2)))
    assert process.returncode == 0, said
    torchrun = [*programs.TORCHRUN, "--rdzv_backend", "loopback", "--nproc_per_node", "2"]
    script = str(REPOSITORY / "open_instruct" / "dpo.py")
    said_by(
        programs.start(
            [*torchrun, script, *dpo_case.command("torchruns_ranks", ranks=2, max_train_steps=2)]
        )
    )
    assert json.loads((dpo_case.folder / "own_ranks" / "layout.json").read_text())[
        "gpus_per_node"
    ] == [2]
    assert dpo_case.trajectory("own_ranks") == dpo_case.trajectory("torchruns_ranks")
    warnings = [
        line for line in said.splitlines() if "warning" in line and "warning: --" not in line
    ]
    assert all("rows are cut to --max_seq_length" in line for line in warnings), said


def test_refusal_of_a_rank_is_the_last_word_and_exit_code_2(
    dpo_case: TrainCase, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{}\n{"prompt": "Name a prime.", "chosen": "Two.", "rejected": "Ten."}\n')
    said = said_by(
        process := start(dpo_case.command("own_refused", ranks=2, mixer_list=[rows, "1.0"]))
    )
    assert process.returncode == 2, said
    assert (
        said.count("dpo.py: 1 of 2 rows cannot be used") == 1
        and "--on_bad_row skip" in said.splitlines()[-1]
    ), said
    assert "Traceback" not in said and "Error" not in said


@pytest.mark.parametrize(
    ("number", "exit_code", "ignored"),
    [(signal.SIGHUP, 129, ()), (signal.SIGTERM, 143, (signal.SIGHUP, signal.SIGINT))],
    ids=["hangup", "below nohup"],
)
def test_stop_ends_ranks_behind_a_checkpoint(
    dpo_case: TrainCase, number: signal.Signals, exit_code: int, ignored: Sequence[int]
) -> None:
    out = dpo_case.folder / f"own_stopped_{exit_code}"
    command = dpo_case.command(out.name, ranks=2, batch=1, max_train_steps=MANY_STEPS)
    with running(start(command, ignored=ignored)) as process:
        once(lambda: rows_in(out) >= 1, process)
        for each in ignored:  # of the command, and of its ranks
            for pid in (process.pid, *pids_of(process)):
                os.kill(pid, each)
        before = rows_in(out)
        once(lambda: rows_in(out) > before + 1, process)
        process.send_signal(number)
        said = said_by(process)
    assert process.returncode == exit_code, said
    assert said.splitlines()[-1].startswith(f"{number.name}: stopped after step "), said
    assert list(out.glob("step*/checkpoint.json"))


def test_ranks_end_with_a_launcher_that_is_killed(dpo_case: TrainCase) -> None:
    """One sentence, and the folder is free for the next run."""
    out = dpo_case.folder / "own_orphans"
    command = dpo_case.command(out.name, ranks=2, batch=1, max_train_steps=MANY_STEPS)
    with running(start(command)) as process:
        once(lambda: rows_in(out) >= 1, process)
        ranks = pids_of(process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        try:
            eventually(lambda: all(map(has_ended, ranks)), timeout_s=60, what="they train on")
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
        said = process.said()
    (line,) = [line for line in said.splitlines() if "launcher" in line]
    assert (
        f"(pid {process.pid}) was killed or crashed while " in line
        and line == said.splitlines()[-1]
    ), said
    assert "the same command" in line
    assert "Traceback" not in said and "gloo" not in said
    assert not (out / "run.lease").exists()


def test_killed_rank_is_named_once_and_the_code_is_1(dpo_case: TrainCase) -> None:
    out = dpo_case.folder / "own_killed"
    command = dpo_case.command(out.name, ranks=2, batch=1, max_train_steps=MANY_STEPS)
    with running(start(command)) as process:
        once(lambda: rows_in(out) >= 1, process)
        pid = pids_of(process)[1]
        os.kill(pid, signal.SIGKILL)
        said = said_by(process)
    assert process.returncode == 1, said
    (line,) = [line for line in said.splitlines() if f"pid {pid}" in line]
    assert line == said.splitlines()[-1] and line.startswith("dpo.py: rank 1 (host "), said


def test_ranks_that_are_all_killed_are_reported_by_the_command(dpo_case: TrainCase) -> None:
    out = dpo_case.folder / "own_all_killed"
    command = dpo_case.command(out.name, ranks=2, batch=1, max_train_steps=MANY_STEPS)
    with running(start(command)) as process:
        once(lambda: rows_in(out) >= 1, process)
        pids = pids_of(process)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none has time to miss another
            for pid in pids:
                os.kill(pid, number)
        said = said_by(process)
    assert process.returncode == 1, said
    assert "was ended by SIGKILL. " in said.splitlines()[-1], said
