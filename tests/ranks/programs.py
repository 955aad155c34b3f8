"""Commands of users, but forked where everything is imported already: `python FILE ...`, and
torchrun of it.

The file is run as the main program, torchrun is the true one, and so is the agent of a file that
starts ranks by itself; only that no Python is started anew is different.
"""

import importlib
import logging
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)

from tests.ranks.fork_server import REPOSITORY, Forked, exit_after

TORCHRUN = ["-m", "torch.distributed.run"]


def start(
    words: list[str],
    *,
    environment: dict[str, str] | None = None,
    cwd: Path = REPOSITORY,
    constants: dict[str, Any] | None = None,
    ignored: Sequence[int] = (),
) -> Forked:
    """Start what `python WORDS` would; torchrun, as in `[*TORCHRUN, "--nproc_per_node", "2",
    "FILE", ...]`, too.

    `constants` of modules ("package.module:NAME") are what they say in it, and in the ranks.
    """
    return Forked(
        _with_constants, constants or {}, words, environment=environment, cwd=cwd, ignored=ignored
    )


def _with_constants(constants: dict[str, Any], words: list[str]) -> int:
    for place, value in constants.items():
        module, _, name = place.partition(":")
        assert hasattr(importlib.import_module(module), name)
        setattr(sys.modules[module], name, value)
    return _run_program(words)


def _run_program(words: list[str]) -> int:
    SubprocessHandler._popen = _fork_rank  # type: ignore[method-assign]
    if words[: len(TORCHRUN)] == TORCHRUN:
        return torchrun(words[len(TORCHRUN) :])
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")
    return 0


def torchrun(words: list[str]) -> int:
    """What stands behind it, in this process; its ranks are forks once `_fork_rank` is there."""
    from torch.distributed import run

    run.main(words)
    return 0


def _fork_rank(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
    return _ForkedRank(args, env)


class _ForkedRank(subprocess.Popen[bytes]):
    """`python -u FILE ...` as a fork of its launcher."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str]) -> None:
        _, unbuffered, *self._words = command
        assert unbuffered == "-u"
        self._environment = environment
        super().__init__(command)

    def _execute_child(self, *arguments: Any) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            exit_after(self._become)
        self._child_created = True

    def _become(self) -> None:
        os.setsid()
        # A new Python knows nothing of what its launcher leaves out.
        logging.disable(logging.NOTSET)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, own)
        os.environ.clear()
        os.environ.update(self._environment)
        raise SystemExit(_run_program(self._words))
