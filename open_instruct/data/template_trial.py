"""A template that comes with a model is tried before it is rendered here, where nothing could stop it.

Jinja's sandbox keeps a template from files and programs, and not from looping without an end. Python can
interrupt its main thread alone, and prompts are rendered beside it too. So the first rendering of every
form of conversation happens in a forked process, which is killed when it has computed for too long.

This is no limit on memory, nor on a template that loops over the words of some later conversation only.
"""

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from open_instruct.errors import InputError

MAX_CPU_S = 30.0
POLL_S = 0.5
# A process that waits and does not compute may have inherited a lock that nobody opens: that says nothing of its work.
WALL_PER_CPU = 10.0


def refuse_endless(work: Callable[[], object], *, template: str, remedy: str) -> None:
    """:raises InputError: the work, which is the template's on one conversation, takes more than `MAX_CPU_S`."""
    if not ends_in_time(work, cpu_s=MAX_CPU_S):
        raise InputError(
            f"{template} chat template does not end: it computed for {MAX_CPU_S:g} s on one conversation; {remedy}",
            kind="bad_model",
            flag="chat_template_name",
            remedy=remedy,
        )


def ends_in_time(work: Callable[[], object], *, cpu_s: float) -> bool:
    """Whether the work ends within so many seconds of CPU time; it happens in a forked process, and leaves nothing.

    What it raises counts as an end: the caller will meet it. So does a process that dies, or that was kept
    waiting: only time that was computed speaks against the work, so a busy machine does not.

    Example: `ends_in_time(lambda: sum(range(10**12)), cpu_s=1.0)` is False.
    """
    answer, word = os.pipe()
    pid = os.fork()
    if pid == 0:
        _work_and_exit(work, answer, word)
    os.close(word)
    try:
        return _waits_for(answer, pid, cpu_s=cpu_s)
    finally:
        os.close(answer)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # who ignores SIGCHLD has nothing to wait for
            os.waitpid(pid, 0)


def _work_and_exit(work: Callable[[], object], answer: int, word: int) -> None:
    """The forked process: it runs none of the parent's handlers, and none of what the parent does at its exit."""
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


def _waits_for(answer: int, pid: int, *, cpu_s: float) -> bool:
    deadline_s = time.monotonic() + cpu_s * WALL_PER_CPU
    while time.monotonic() < deadline_s:
        readable, _, _ = select.select([answer], [], [], min(POLL_S, cpu_s))
        if readable:
            return True
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            if times.user + times.system >= cpu_s:
                return False
    return True
