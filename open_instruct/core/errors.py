"""The two kinds of failure a user can meet, the signals that stop a run, and the exit codes they
end with.

What a user gave and cannot work is a `Problem`: the sentence that is shown, and beside it what
programs and tests compare in place of its words. An `InputError` carries one of them or several.
"""

import re
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Literal, ParamSpec

EXIT_INPUT = 2
EXIT_FAILURE = 1
EXIT_PREEMPTED = 143
EXIT_OF_SIGNAL = {
    signal.SIGTERM: EXIT_PREEMPTED,
    signal.SIGHUP: 129,
    signal.SIGINT: EXIT_FAILURE,
}

# What kind of problem it is. A message may be worded anew; its kind stays.
Kind = Literal[
    "unknown_flag",  # this command has no such flag
    "missing_flag",  # a flag that must be given
    "repeated_flag",  # a flag, or two that say the same, given twice
    "foreign_flag",  # another suite's, which cannot apply here
    "stray_word",  # a word that belongs to no flag
    "bad_value",  # not what the flag takes
    "out_of_range",  # a number outside the limits of its flag
    "unread_flag",  # nothing reads it without another flag
    "conflict",  # flags or settings that cannot go together
    "layout",  # degrees that do not fit the GPUs, the heads, the experts
    "missing_file",  # no such file or folder
    "unreadable_file",  # damaged, of another format, or not to be read or written by this user
    "bad_row",  # rows of a data set that cannot be used
    "bad_model",  # a model's own files contradict each other or lack something
    "unsupported_model",  # a model that is whole, and computes what we do not
    "bad_checkpoint",  # a checkpoint that is damaged or of another format
    "other_run",  # a folder or a checkpoint that belongs to a run with other settings
    "own_code",  # a function, class or program of the user's own
    "missing_package",  # not installed here
    "machine",  # what this machine has not: memory, processes, walls, a compiler
    "remote",  # a server, a hub or a cluster that does not answer or refuses
    "input",  # anything else
]
P = ParamSpec("P")


def stop_signals() -> list[signal.Signals]:
    """The signals that stop this process: not SIGINT and SIGHUP where its parent ignores them
    (`nohup`, `&`).
    """
    return [
        each
        for each in EXIT_OF_SIGNAL
        if each == signal.SIGTERM or signal.getsignal(each) != signal.SIG_IGN
    ]


class Problem(str):
    """One sentence about something the user gave, with what programs compare in place of its words.

    Example: `Problem("--num_epochs 0: must be at least 1", kind="out_of_range")` is that sentence,
    and its `flag` is `num_epochs`, its `remedy` `must be at least 1`.

    Args:
        kind: the kind of problem.
        flag: the name of the flag that it is about, without dashes; by default the first that the
            sentence names.
        remedy: what would work; by default the end of the sentence, behind its last semicolon, full
            stop or colon.
    """

    kind: Kind
    flag: str | None
    remedy: str | None

    def __new__(
        cls,
        text: str,
        *,
        kind: Kind | None = None,
        flag: str | None = None,
        remedy: str | None = None,
    ) -> "Problem":
        problem = super().__new__(cls, text)
        if isinstance(text, Problem):
            problem.kind = kind or text.kind
            problem.flag = flag or text.flag
            problem.remedy = remedy or text.remedy
            return problem
        problem.kind = kind or "input"
        problem.flag = flag or _first_flag(text)
        problem.remedy = remedy or _last_clause(text)
        return problem


def _first_flag(text: str) -> str | None:
    match = re.search(r"(?<![\w-])--([a-z]\w*)", text)
    return match.group(1) if match else None


def _last_clause(text: str) -> str | None:
    last_line = text.rstrip().rpartition("\n")[2]
    for mark in ("; ", ". ", ": "):
        _, separator, clause = last_line.rpartition(mark)
        if separator:
            return clause
    return last_line if last_line != text else None


def problems_of_kind(
    kind: Kind,
) -> Callable[[Callable[P, Iterable[str]]], Callable[P, Iterator[Problem]]]:
    """A decorator for a function that yields sentences: those that have no kind of their own are of
    this `kind`.
    """

    def decorate(find_problems: Callable[P, Iterable[str]]) -> Callable[P, Iterator[Problem]]:
        @wraps(find_problems)
        def find(*args: P.args, **kwargs: P.kwargs) -> Iterator[Problem]:
            for text in find_problems(*args, **kwargs):
                yield text if isinstance(text, Problem) else Problem(text, kind=kind)

        return find

    return decorate


class InputError(ValueError):
    """Something the user gave cannot work: a flag, a row, a file, a checkpoint.

    The message is shown as it is, without a traceback, and the process ends with code 2. It
    names the thing (flag, file, line, tensor), says what is wrong, and ends with what would work.

    Attributes:
        problems: each that the message lists.
        kind, flag, remedy: those of the first problem; see `Problem`.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: Kind | None = None,
        flag: str | None = None,
        remedy: str | None = None,
        problems: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        problem_list = tuple(Problem(problem) for problem in problems)
        self.problems = problem_list or (Problem(message, kind=kind, flag=flag, remedy=remedy),)

    @property
    def kind(self) -> Kind:
        return self.problems[0].kind

    @property
    def flag(self) -> str | None:
        return self.problems[0].flag

    @property
    def remedy(self) -> str | None:
        return self.problems[0].remedy


def refuse_first(problems: Iterable[str]) -> None:
    """:raises InputError: the first of the problems, if there are any."""
    for problem in problems:
        raise InputError(problem)


class RunError(RuntimeError):
    """The run itself failed in a way we understand: a full disk, a lost peer, a damaged checkpoint.

    The message is shown as it is, without a traceback, and the process ends with code 1.
    """
