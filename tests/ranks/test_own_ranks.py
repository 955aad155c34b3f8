"""Ranks that a command starts by itself: what is done, said and returned."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.ranks import programs
from tests.ranks.fork_server import REPOSITORY, Forked
from tests.ranks.test_faults import MANY_STEPS, once, pids_of, rows_in, running, said_by
from tests.ranks.train_case import TrainCase

pytestmark = pytest.mark.slow


def start(command: list[str]) -> Forked:
    return programs.start([str(REPOSITORY / "open_instruct" / "dpo.py"), *command, "--num_processes", "2"])


def test_they_train_as_those_of_torchrun_do(dpo_case: TrainCase) -> None:
    said = said_by(process := start(dpo_case.command("own_ranks", ranks=2, max_train_steps=2)))
    assert process.returncode == 0, said
    torchrun = [*programs.TORCHRUN, "--rdzv_backend", "loopback", "--nproc_per_node", "2"]
    script = str(REPOSITORY / "open_instruct" / "dpo.py")
    said_by(programs.start([*torchrun, script, *dpo_case.command("torchruns_ranks", ranks=2, max_train_steps=2)]))
    assert json.loads((dpo_case.folder / "own_ranks" / "layout.json").read_text())["gpus_per_node"] == [2]
    assert dpo_case.trajectory("own_ranks") == dpo_case.trajectory("torchruns_ranks")
    assert "warning" not in said.replace("warning: --", "")


def test_what_they_refuse_is_the_last_word_and_exit_code_2(dpo_case: TrainCase, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    said = said_by(process := start(dpo_case.command("own_refused", ranks=2, mixer_list=[rows, "1.0"])))
    assert process.returncode == 2, said
    assert said.count("dpo.py: 1 row of 1 cannot be used") == 1 and "--on_bad_row skip" in said.splitlines()[-1], said
    assert "Traceback" not in said and "Error" not in said


def test_a_stop_ends_them_behind_a_checkpoint_with_143(dpo_case: TrainCase) -> None:
    out = dpo_case.folder / "own_stopped"
    command = dpo_case.command(out.name, ranks=2, batch=1, max_train_steps=MANY_STEPS)
    with running(start(command)) as process:
        once(lambda: rows_in(out) >= 1, process)
        process.send_signal(signal.SIGTERM)
        said = said_by(process)
    assert process.returncode == 143, said
    assert said.splitlines()[-1].startswith("SIGTERM: stopped after step "), said
    assert list(out.glob("step*/checkpoint.json"))


def test_one_that_is_killed_is_named_once_and_the_code_is_1(dpo_case: TrainCase) -> None:
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


def test_all_that_are_killed_at_once_are_told_of_by_the_command(dpo_case: TrainCase) -> None:
    out = dpo_case.folder / "own_all_killed"
    command = dpo_case.command(out.name, ranks=2, batch=1, max_train_steps=MANY_STEPS)
    with running(start(command)) as process:
        once(lambda: rows_in(out) >= 1, process)
        for pid in pids_of(process):
            os.kill(pid, signal.SIGKILL)
        said = said_by(process)
    assert process.returncode == 1, said
    assert "was ended by SIGKILL. " in said.splitlines()[-1], said
