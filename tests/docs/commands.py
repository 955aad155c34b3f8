"""Commands as the docs show them, one after the other in one process."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from open_instruct.cli import main
from tests.ranks import programs

PROGRAMS = {"open-instruct": main, "torchrun": programs.torchrun}


def run_all(commands: Sequence[tuple[str, list[str]]], hub: str, out: Path) -> int:
    """Run each (folder, words), and write [exit code, what it said, CPU seconds] of all.

    `hub` is the address of what is to be taken for the hub.
    """
    SubprocessHandler._popen = programs._fork_rank  # type: ignore[method-assign]
    constants.ENDPOINT, constants.HF_HUB_DISABLE_XET = hub, True
    outcomes = []
    for folder, command in commands:
        os.chdir(folder)
        environment = dict(os.environ)
        sys.argv = command
        began_s, said = _cpu_s(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = PROGRAMS[command[0]](command[1:])
        for name in os.environ.keys() - environment.keys():  # the place among ranks, of a run that was one itself
            del os.environ[name]
        outcomes.append((code, said.getvalue(), _cpu_s() - began_s))
    out.write_text(json.dumps(outcomes))
    return 0


def _cpu_s() -> float:
    """Of this process, and of its ranks that have ended."""
    return sum(os.times()[:4])
