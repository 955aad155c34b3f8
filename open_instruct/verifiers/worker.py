"""A process that scores one completion after another: JSON lines in, JSON lines out, until its input ends.

`VerifierPool` starts it by this file's path, and ends it when a verdict takes too long. On Linux the process that the
pool starts is a guard, and the worker is its child. All processes that the worker's verifiers start, daemons too,
become children of the guard, which kills them when the worker ends, when the pool ends the guard, or when the pool's
process is gone. Elsewhere the worker ends with its parent, and its process group with the pool.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

if "open_instruct" not in sys.modules:
    # The package alone: with its parent on the path, what else lies there could be imported in place of a library.
    _spec = spec_from_file_location("open_instruct", Path(__file__).resolve().parents[1] / "__init__.py")
    assert _spec is not None and _spec.loader is not None
    sys.modules["open_instruct"] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["open_instruct"])

from open_instruct.config.rollout_sections import RewardSection
from open_instruct.parallel import processes
from open_instruct.verifiers.event_loop import awaited
from open_instruct.verifiers.registry import known_verifiers
from open_instruct.verifiers.verifier import Verifier, said, without_key
from open_instruct.wording import counted

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PR_SET_CHILD_SUBREAPER = 36
PARENT_WATCH_INTERVAL_S = 1.0
GUARD_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
MAX_TRACEBACK_CHARACTERS = 4000


def verdicts(verifier: Verifier, **asked: Any) -> dict[str, Any]:
    """`{"scores": […]}`, or `{"problem": …, "traceback": …}` where the verifier raised, or for one of the scores.

    `asked` are the arguments of `Verifier.judge_all`.
    """
    try:
        scores = awaited(verifier.judge_all(**asked))
        if len(scores) != (num_asked := len(asked["completions"])):
            raise ValueError(
                f"{counted(len(scores), 'reward')} for {counted(num_asked, 'completion')}: return one for each"
            )
        return {"scores": [_failure(each) if isinstance(each, BaseException) else float(each) for each in scores]}
    except BaseException as error:  # foreign code, which may raise anything, and exit
        return _failure(error)


def end_with_parent() -> None:
    """Have this process killed when its parent ends, also while a verifier runs that never returns.

    On Linux the kernel does it. Elsewhere a thread does, which has to wait for a verifier that keeps the interpreter,
    such as one with a very long multiplication.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_WATCH_INTERVAL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def leave_a_guard() -> None:
    """Continue as a child of this process, which becomes the guard: see the top of this file. Linux only."""
    if sys.platform != "linux":
        return
    prctl = ctypes.CDLL(None).prctl
    parent = os.getppid()
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, GUARD_SIGNALS)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whose own parent has ended becomes our child, in any session
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        return
    # The pool is to see by the end of its pipes that the worker has ended.
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    while os.getppid() == parent and worker not in _reaped(os.WNOHANG):
        if signal.sigwait(GUARD_SIGNALS) == signal.SIGTERM:
            break
    while children := processes.children(os.getpid()):
        for child in children:
            os.kill(child, signal.SIGKILL)  # not yet reaped: this is no other's id
        _reaped(0)
    os._exit(0)


def _reaped(options: int) -> list[int]:
    """The ids of children that have ended; without WNOHANG it waits for the first."""
    ended: list[int] = []
    with contextlib.suppress(ChildProcessError):
        while child := os.waitpid(-1, options)[0]:
            ended.append(child)
            options = os.WNOHANG
    return ended


def main(flags: RewardSection) -> None:
    leave_a_guard()
    end_with_parent()
    # Requests and answers get descriptors of their own, so that a verifier that prints or reads does not meet them.
    requests = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    worker = os.getpid()
    greeting: dict[str, Any] = {"id": 0}
    try:
        verifiers = known_verifiers(flags)
        for verifier in verifiers.values():
            verifier.load()
    except BaseException as error:
        greeting |= _failure(error)
    print(json.dumps(greeting), file=answers, flush=True)
    for line in requests:
        request = json.loads(line)
        number = request.pop("id")
        verifier = verifiers[request.pop("verifier")]
        answer = verdicts(verifier, **request)
        if os.getpid() != worker:
            os._exit(0)  # the verifier forked, and this is its child, which has nothing to answer
        print(json.dumps({"id": number, **answer}), file=answers, flush=True)


def _failure(error: BaseException) -> dict[str, str]:
    shown = without_key("".join(traceback.format_exception(error)))
    return {"problem": said(error), "traceback": shown[-MAX_TRACEBACK_CHARACTERS:]}


if __name__ == "__main__":
    main(RewardSection(**json.loads(sys.argv[1])))
