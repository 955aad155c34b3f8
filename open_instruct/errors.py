"""The two kinds of failure a user can meet, the signals that stop a run, and the exit codes they end with."""

import signal
from collections.abc import Mapping

EXIT_INPUT = 2
EXIT_FAILURE = 1
EXIT_PREEMPTED = 143
EXIT_OF_SIGNAL = {signal.SIGTERM: EXIT_PREEMPTED, signal.SIGHUP: 129, signal.SIGINT: EXIT_FAILURE}


def stop_signals() -> list[signal.Signals]:
    """The signals that stop this process: not SIGINT and SIGHUP where its parent ignores them (`nohup`, `&`)."""
    return [each for each in EXIT_OF_SIGNAL if each == signal.SIGTERM or signal.getsignal(each) != signal.SIG_IGN]


class InputError(ValueError):
    """Something the user gave cannot work: a flag, a row, a file, a checkpoint.

    The message is shown as it is, without a traceback, and the process ends with code 2. It
    names the thing (flag, file, line, tensor), says what is wrong, and ends with what would work.
    """


def refuse_first(problems: Mapping[str, bool]) -> None:
    """:raises InputError: the first of the problems that is there."""
    if problem := next((problem for problem, is_there in problems.items() if is_there), None):
        raise InputError(problem)


class RunError(RuntimeError):
    """The run itself failed in a way we understand: a full disk, a lost peer, a damaged checkpoint.

    The message is shown as it is, without a traceback, and the process ends with code 1.
    """
