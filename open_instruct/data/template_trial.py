"""A template that comes with a model is tried before it is rendered here, where nothing could stop it.

Jinja's sandbox keeps a template from files and programs, and not from looping without an end. Python can
interrupt its main thread alone, and prompts are rendered beside it too. So the first rendering of every
form of conversation happens in a forked process, which is killed when it takes too long.

This is no limit on memory, nor on a template that loops over the words of some later conversation only.
"""

import math
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from open_instruct.errors import InputError

TIMEOUT_S = 30.0
POLL_S = 0.5
# The share of the time that the work must have computed for, to be called endless: a machine may be busy, and a process
# that only waits may have inherited a lock that nobody opens, which says nothing of its work.
LEAST_SHARE = 0.1
PATIENCE = 10  # times the limit that a process may wait


def refuse_endless(work: Callable[[], object], *, template: str, remedy: str) -> None:
    """:raises InputError: the work, which is the template's on one conversation, takes more than `TIMEOUT_S`."""
    if not ends_in_time(work, timeout_s=TIMEOUT_S):
        raise InputError(
            f"{template} chat template does not end: it ran for {TIMEOUT_S:g} s on one conversation; {remedy}",
            kind="bad_model",
            flag="chat_template_name",
            remedy=remedy,
        )


def ends_in_time(work: Callable[[], object], *, timeout_s: float) -> bool:
    """Whether the work ends within so many seconds; it happens in a forked process, and leaves nothing.

    What it raises counts as an end: the caller will meet it. So does a process that dies, or that has
    hardly computed in all that time.

    Example: `ends_in_time(lambda: sum(range(10**12)), timeout_s=1.0)` is False.
    """
    answer, word = os.pipe()
    pid = os.fork()
    if pid == 0:
        _work_and_exit(work, answer, word, most_cpu_s=timeout_s)
    os.close(word)
    try:
        return _wait(answer, pid, timeout_s=timeout_s)
    finally:
        os.close(answer)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # who ignores SIGCHLD has nothing to wait for
            os.waitpid(pid, 0)


def _work_and_exit(work: Callable[[], object], answer: int, word: int, *, most_cpu_s: float) -> None:
    """The forked process: it runs none of the parent's handlers, and none of what the parent does at its exit."""
    # So that it ends also where its parent is killed meanwhile.
    with suppress(ValueError, OSError):
        seconds = math.ceil(most_cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
    except ValueError:
        pass  # only the main thread may, and here that is the one that forked
    try:
        os.close(answer)
        work()
    except BaseException:
        pass  # the parent will meet it
    finally:
        os.write(word, b".")
        os._exit(0)


def _wait(answer: int, pid: int, *, timeout_s: float) -> bool:
    began_s = time.monotonic()
    while (waited_s := time.monotonic() - began_s) < PATIENCE * timeout_s:
        readable, _, _ = select.select([answer], [], [], min(POLL_S, timeout_s))
        if readable:
            return True
        if waited_s >= timeout_s and _cpu_seconds(pid) >= LEAST_SHARE * timeout_s:
            return False
    return True


def _cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
