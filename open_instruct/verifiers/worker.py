"""A process that scores one completion after another: JSON lines in, JSON lines out, until its input ends.

Started by `VerifierPool`, by this file's path, and killed when a verdict takes too long. It ends with its parent,
whatever ended that: an idle one because its input closes, a busy one because it is killed. What its verifiers have
started ends with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
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

from open_instruct.verifiers.registry import known_verifiers
from open_instruct.verifiers.verifier import Verifier

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PARENT_WATCH_INTERVAL_S = 1.0
MAX_PROBLEM_CHARACTERS = 500
MAX_TRACEBACK_CHARACTERS = 4000


def verdict(
    verifier: Verifier, text: str, ground_truth: Any, *, prompt: str = "", is_truncated: bool = False
) -> dict[str, Any]:
    """`{"score": …}`, or `{"problem": …, "traceback": …}` where the verifier raised."""
    try:
        return {"score": float(verifier.judge(prompt, text, ground_truth, is_truncated=is_truncated))}
    except BaseException as error:  # foreign code, which may raise anything, and exit
        return _failure(error)


def end_with_parent() -> None:
    """From here on this process is killed when its parent ends, also from within a verifier that never returns.

    On Linux the kernel sees to it. Elsewhere a thread does, which a verifier that holds on to the interpreter, as one
    very long addition would, can keep waiting.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_WATCH_INTERVAL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_group_with_us() -> None:
    """Leave a process behind, nobody's child, that kills what is left of our group once we have ended."""
    try:
        ourselves = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # not Linux, or an old one
        return
    if child := os.fork():
        os.waitpid(child, 0)
        os.close(ourselves)
        return
    if os.fork() == 0:
        select.select([ourselves], [], [])
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def main(user_verifiers: list[str]) -> None:
    end_group_with_us()
    end_with_parent()
    # What a verifier prints must not be taken for a verdict, nor may it read what is asked.
    requests, verdicts = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    worker = os.getpid()
    greeting: dict[str, Any] = {"id": 0}
    try:
        verifiers = known_verifiers(user_verifiers)
        for verifier in verifiers.values():
            verifier.load()
    except BaseException as error:
        greeting |= _failure(error)
    print(json.dumps(greeting), file=verdicts, flush=True)
    for line in requests:
        request = json.loads(line)
        number, verifier = request.pop("id"), verifiers[request.pop("verifier")]
        answer = verdict(verifier, **request)
        if os.getpid() != worker:
            os._exit(0)  # the verifier forked, and this is its child, which has nothing to answer
        print(json.dumps({"id": number, **answer}), file=verdicts, flush=True)


def _failure(error: BaseException) -> dict[str, str]:
    problem = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_PROBLEM_CHARACTERS]
    return {"problem": problem, "traceback": "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARACTERS:]}


if __name__ == "__main__":
    main(sys.argv[1:])
