"""The two kinds of failure a user can meet, and the exit codes they end with."""

EXIT_INPUT = 2
EXIT_FAILURE = 1
EXIT_PREEMPTED = 143


class InputError(ValueError):
    """Something the user gave cannot work: a flag, a row, a file, a checkpoint.

    The message is shown as it is, without a traceback, and the process ends with code 2. It
    names the thing (flag, file, line, tensor), says what is wrong, and ends with what would work.
    """


class RunError(RuntimeError):
    """The run itself failed in a way we understand: a full disk, a lost peer, a damaged checkpoint.

    The message is shown as it is, without a traceback, and the process ends with code 1.
    """
