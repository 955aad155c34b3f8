"""Commands as the docs show them, one after the other in one process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from open_instruct.cli import main
from tests.ranks import programs


def run_all(commands: Sequence[tuple[str, list[str], str]], hub: str, out: Path) -> int:
    """Run each (folder, words behind `open-instruct`, stdin), and write [exit code, what it said, CPU seconds] of all.

    `hub` is the address of what is to be taken for the hub.
    """
    SubprocessHandler._popen = programs._fork_rank  # type: ignore[method-assign]
    constants.ENDPOINT, constants.HF_HUB_DISABLE_XET = hub, True
    outcomes = []
    for folder, words, stdin in commands:
        os.chdir(folder)
        environment = dict(os.environ)
        sys.stdin, sys.argv = io.StringIO(stdin), ["open-instruct", *words]
        began_s, said = time.process_time(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(words)
        for name in os.environ.keys() - environment.keys():  # the place among ranks, of a run that was one itself
            del os.environ[name]
        outcomes.append((code, said.getvalue(), time.process_time() - began_s))
    out.write_text(json.dumps(outcomes))
    return 0
