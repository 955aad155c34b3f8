"""Faults of DPO and SFT runs: what is said, with which exit code, and what the same command does
next.

The table of faults is docs/reliability.md; those of GRPO's fleet are in tests/fleet/test_grpo.py.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from open_instruct.parallel import heartbeats
from scripts.demo_data.pairs import write_synthetic_preferences
from tests.ranks import programs
from tests.ranks.fork_server import REPOSITORY, Forked
from tests.ranks.train_case import TrainCase, free_ports

pytestmark = pytest.mark.extended

TIMEOUT_S = 600.0
# A run that takes long enough to be met anywhere in it.
MANY_STEPS = 4000
# From the line that tells of a long pass into the pass itself.
INTO_IT_S = 0.5


Process = subprocess.Popen[str] | Forked
P = TypeVar("P", bound=Process)


def words_of(command: list[str], ranks: int) -> list[str]:
    torchrun = [
        *programs.TORCHRUN,
        "--nproc_per_node",
        str(ranks),
        "--master_port",
        str(free_ports(1)[0]),
    ]
    return [
        *(torchrun if ranks > 1 else ()),
        str(REPOSITORY / "open_instruct" / "dpo.py"),
        *command,
    ]


def start(command: list[str], *, ranks: int = 1, constants: dict[str, Any] | None = None) -> Forked:
    return programs.start(words_of(command, ranks), constants=constants)


def start_python(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """As `start`, but a Python that has imported nothing yet."""
    return subprocess.Popen(
        [sys.executable, *words_of(command, ranks=1)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    )


def pids_of(process: Process) -> list[int]:
    """The ranks that torchrun has started, in rank order, which is that of its children."""
    return [
        int(pid)
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]


@contextmanager
def running(process: P) -> Iterator[P]:
    try:
        yield process
    finally:
        with suppress(OSError):
            for pid in [*pids_of(process), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()


def said_by(process: Process) -> str:
    said, _ = process.communicate(timeout=TIMEOUT_S)
    return said


def once(is_so: Callable[[], bool], process: Process) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.01)


def rows_in(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def logged(folder: Path, words: str) -> bool:
    log = folder / "run.log"
    return log.exists() and words in log.read_text()


def our_lines(said: str) -> list[str]:
    """What is not torchrun's report."""
    return [line for line in said.splitlines() if "dpo.py:" in line]


class TestLostRanks:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_killed_rank_is_named(self, dpo_case: TrainCase, rank: int) -> None:
        out = dpo_case.folder / f"killed_{rank}"
        command = dpo_case.command(
            out.name, ranks=3, batch=1, max_train_steps=MANY_STEPS, checkpointing_steps=2
        )
        with running(start(command, ranks=3)) as process:
            once(lambda: rows_in(out) >= 3, process)
            pid = pids_of(process)[rank]
            os.kill(pid, signal.SIGKILL)
            said = said_by(process)
        assert process.returncode == 1
        # torchrun shows it once more in its report.
        lines = [line for line in our_lines(said) if line.startswith("dpo.py:")]
        assert len(lines) == 1, said
        assert f"rank {rank} (host " in lines[0] and f"pid {pid}) was lost while " in lines[0]
        assert "step" in lines[0] and "killed or crashed" in lines[0]
        assert "Run the same command again to go on from the last checkpoint" in lines[0]
        assert "gloo" not in said and "Connection closed" not in said

    def test_stopped_rank_is_named_within_two_minutes(self, dpo_case: TrainCase) -> None:
        assert heartbeats.SILENT_S < 120
        # For as long as that, but not as long as in earnest.
        silence = {"open_instruct.parallel.heartbeats:SILENT_S": 8.0}
        out = dpo_case.folder / "stopped_rank"
        command = dpo_case.command(out.name, ranks=2, batch=1, max_train_steps=MANY_STEPS)
        with running(start(command, ranks=2, constants=silence)) as process:
            once(lambda: rows_in(out) >= 2, process)
            pid = pids_of(process)[1]
            os.kill(pid, signal.SIGSTOP)
            once(lambda: "was lost while" in process.said(), process)  # far below --dist_timeout_s
            os.kill(pid, signal.SIGKILL)  # for which torchrun would wait half a minute
            said = said_by(process)
        assert process.returncode == 1
        (line,) = [line for line in our_lines(said) if line.startswith("dpo.py:")]
        assert f"rank 1 (host {os.uname().nodename}, pid {pid}) was lost while " in line
        assert "its process is stopped" in line


class TestSignals:
    def stopped(self, command: list[str], out: Path, words: str, number: int) -> tuple[int, str]:
        with running(start(command)) as process:
            once(lambda: logged(out, words), process)
            time.sleep(INTO_IT_S)
            process.send_signal(number)
            said = said_by(process)
        return process.returncode, said

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
    def test_signal_before_the_first_step_leaves_nothing(
        self, dpo_case: TrainCase, number: int, code: int
    ) -> None:
        out = dpo_case.folder / f"early_{number}"
        # Whatever the tests do.
        heeding = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        with running(start_python(dpo_case.command(out.name), **heeding)) as process:
            once(lambda: b"libtorch" in Path(f"/proc/{process.pid}/maps").read_bytes(), process)
            process.send_signal(number)
            said = said_by(process)
        assert process.returncode == code, said
        assert "while starting. " in said.splitlines()[-1]
        assert (
            "There is no checkpoint yet: the same command, given again, starts from the beginning."
        ) in said
        assert "Traceback" not in said

    def test_signal_in_the_reference_pass_ends_the_run(self, dpo_case: TrainCase) -> None:
        rows = dpo_case.folder / "many_rows.jsonl"
        write_synthetic_preferences(rows, num_rows=6000, seed=2)
        out = dpo_case.folder / "in_reference"
        command = dpo_case.command(out.name, mixer_list=[rows, "1.0"], batch=1)
        code, said = self.stopped(command, out, "to compute", signal.SIGTERM)
        assert code == 143, said
        assert (
            "SIGTERM while scoring rows (reference log-probs). There is no checkpoint yet"
            in said.splitlines()[-1]
        )
        assert "Traceback" not in said
        assert not (out / "run.lease").exists()

    def test_signal_to_torchrun_in_the_reference_pass_ends_the_run(
        self, dpo_case: TrainCase
    ) -> None:
        rows = dpo_case.folder / "more_rows.jsonl"
        write_synthetic_preferences(rows, num_rows=6000, seed=3)
        out = dpo_case.folder / "in_reference_of_two"
        command = dpo_case.command(out.name, ranks=2, mixer_list=[rows, "1.0"], batch=1)
        with running(start(command, ranks=2)) as process:
            once(lambda: logged(out, "to compute"), process)
            time.sleep(INTO_IT_S)
            process.send_signal(signal.SIGTERM)
            said = said_by(process)
        # The launcher stops one rank after the other: rank 0 may first meet, and tell, what ended
        # rank 1.
        lines = [
            line for line in our_lines(said) if line.startswith(("dpo.py:", "[rank 1] dpo.py:"))
        ]
        assert len(lines) == 1, said
        assert "SIGTERM while scoring rows" in lines[0]
        assert "gloo" not in said


class TestFullDisk:
    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Path]:
        """One mebibyte, which a checkpoint of the tiny model does not fit in."""
        if os.getuid() != 0:
            pytest.skip("mounting needs root")
        disk = tmp_path / "disk"
        disk.mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
        ).returncode:
            pytest.skip("mounting is not allowed here")
        yield disk
        subprocess.run(["umount", "-l", str(disk)], check=True)

    def test_disk_of_the_whole_run_fills(self, dpo_case: TrainCase, small_disk: Path) -> None:
        out = small_disk / "out"
        command = dpo_case.command("unused", checkpointing_steps=2)
        command[command.index("--output_dir") + 1] = str(out)
        said = said_by(start(command))
        self.check(said)

    def test_disk_that_is_full_from_the_start_is_refused(
        self, dpo_case: TrainCase, small_disk: Path
    ) -> None:
        with suppress(OSError), (small_disk / "other").open("wb") as other:
            other.write(bytes(2 << 20))
        out = small_disk / "out"
        command = dpo_case.command("unused")
        command[command.index("--output_dir") + 1] = str(out)
        self.check(said_by(start(command)))

    def test_disk_that_fills_between_two_checkpoints_leaves_the_first(
        self, dpo_case: TrainCase
    ) -> None:
        """As a quota does: files may not grow beyond what the rows of some steps take."""
        out = dpo_case.folder / "quota"

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))

        command = dpo_case.command(
            out.name, max_train_steps=MANY_STEPS, checkpointing_steps=MANY_STEPS
        )
        said_by(start([*command, "--cache_logprobs_only"]))  # which needs larger files
        process = start_python(command, preexec_fn=limit)
        said = said_by(process)
        assert process.returncode == 1, said
        self.check(said)
        assert all(
            json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()[:-1]
        )

    def check(self, said: str) -> None:
        *_, last = said.splitlines()
        assert "make room" in last or "free some space" in last, said
        assert "again" in last
        assert not [
            line
            for line in said.splitlines()
            if line.startswith(("Traceback", "--- Logging error"))
        ], said


def test_second_run_in_the_folder_is_refused_and_the_first_goes_on(dpo_case: TrainCase) -> None:
    out = dpo_case.folder / "two_runs"
    command = dpo_case.command(out.name, max_train_steps=MANY_STEPS)
    with running(start(command)) as first:
        once(lambda: rows_in(out) >= 1, first)
        second = start(command)
        said = said_by(second)
        assert second.returncode == 2
        assert f"in use by process {first.pid} on {os.uname().nodename}" in said
        before = rows_in(out)
        once(lambda: rows_in(out) > before + 2, first)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    steps = [
        json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()[:-1]
    ]
    assert steps == list(range(1, len(steps) + 1))
    # Its predecessor is dead, so the next one is refused nothing.
    with running(start(command)) as third:
        once(lambda: rows_in(out) >= 1, third)
