"""Checks one after the other, each in a process of its own that is ended at its time limit with all
it started.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import REPOSITORY

from gpu_check.listed import Check
from gpu_check.outcomes import FAILED, NOT_RUN, PASSED, Outcome

NUM_LAST_LINES = 40
LEAST_S = 15.0
"""A check that has less time than this left is not started."""
MOST_TO_END_S = 10.0

MARK_VARIABLE = "GPU_CHECK"
"""Ranks of torchrun and Ray's servers lead sessions of their own; they inherit this one from the
check.
"""

Command = Callable[[Check, Path, Path], Sequence[str]]
"""The words that start a check, from it, the file for its findings and a folder to work in."""


def run_check(
    check: Check, command: Command, *, limit_s: float, log: Path, environment: dict[str, str]
) -> Outcome:
    """Run it for at most `limit_s`; what it writes is added to `log`."""
    work = Path(tempfile.mkdtemp(prefix=f"gpu_check_{check.name}_"))
    mark = uuid.uuid4().hex
    result, output = work / "result.json", work / "output.txt"
    began_s = time.monotonic()
    why: list[str] = []
    try:
        with output.open("wb") as file:
            process = subprocess.Popen(
                command(check, result, work),
                cwd=REPOSITORY,
                env=environment | {MARK_VARIABLE: mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
                if code < 0:
                    why.append(f"ended by {signal.Signals(-code).name}")
            except subprocess.TimeoutExpired:
                why.append(f"not done after {limit_s:.0f} s")
            finally:
                end_group(process)
                end_marked(mark)
        text = output.read_text(encoding="utf-8", errors="replace")
        with log.open("a", encoding="utf-8") as file:
            file.write(f"===== {check.name}\n{text}\n")
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    finally:
        shutil.rmtree(work, ignore_errors=True)
    why += found.get("failures", [])
    if process.returncode != 0 and not why:
        why.append(f"ended with code {process.returncode}")
    return Outcome(
        name=check.name,
        title=check.title,
        state=FAILED if why else PASSED,
        why=why,
        seconds=round(time.monotonic() - began_s, 1),
        headline=found.get("headline", ""),
        notes=found.get("notes", []),
        tables=found.get("tables", []),
        last_lines=text.splitlines()[-NUM_LAST_LINES:] if why else [],
    )


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process that leads its session, and all that it left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_marked(mark: str) -> None:
    """End the processes that inherited the mark, until none of them is left to start another."""
    entry = f"{MARK_VARIABLE}={mark}".encode()
    ends_s = time.monotonic() + MOST_TO_END_S  # what a driver holds does not end at once
    while time.monotonic() < ends_s:
        pids = [
            int(folder.name) for folder in Path("/proc").glob("[0-9]*") if has_entry(folder, entry)
        ]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def has_entry(folder: Path, entry: bytes) -> bool:
    """Whether a process that lives has the entry in its environment."""
    try:
        # Of one that has ended it is empty.
        return entry in (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # it is another user's, or gone
        return False


def check_command(rehearse: bool) -> Command:
    def command(check: Check, result: Path, work: Path) -> list[str]:
        words = [
            sys.executable,
            "-m",
            "gpu_check.one",
            check.module,
            "--result",
            str(result),
            "--work",
            str(work),
        ]
        return [*words, "--rehearse"] if rehearse else words

    return command


def check_environment(rehearse: bool) -> dict[str, str]:
    """That of the checks: they find this checkout first, ask no hub, and see no GPU in a
    rehearsal.
    """
    folders = [str(REPOSITORY), str(REPOSITORY / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if rehearse:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return environment


def run_all(
    checks: Sequence[Check],
    *,
    only: Sequence[str],
    limit_s: float,
    command: Command,
    environment: dict[str, str],
    log: Path,
    show: Callable[[list[Outcome]], None],
) -> list[Outcome]:
    """All outcomes, in order;

    `show` is given those there are after each check. They share `limit_s`.
    """
    ends_s = time.monotonic() + limit_s
    outcomes: list[Outcome] = []
    for check in checks:
        left_s = ends_s - time.monotonic()
        if only and check.name not in only:
            reason = "not asked for"
        elif left_s < min(LEAST_S, limit_s):
            reason = f"the {limit_s:.0f} s for all checks were over"
        else:
            reason = ""
        if reason:
            outcomes.append(
                Outcome(name=check.name, title=check.title, state=NOT_RUN, why=[reason])
            )
        else:
            limited_s = min(check.limit_s, left_s)
            outcomes.append(
                run_check(check, command, limit_s=limited_s, log=log, environment=environment)
            )
        show(outcomes)
    return outcomes
