"""A process that scores one completion after another: JSON lines in, JSON lines out, until its input ends.

Started by `VerifierPool`, which kills it when a verdict takes too long. It ends with its parent, whatever ended that:
an idle one because its input closes, a busy one because it is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time

from open_instruct.verifiers.registry import known_verifiers

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PARENT_WATCH_INTERVAL_S = 1.0


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


def main(user_verifiers: list[str]) -> None:
    end_with_parent()
    # What a verifier prints must not be taken for a verdict.
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    verifiers = known_verifiers(user_verifiers)
    print(json.dumps({"ready": True}), file=verdicts, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, object]
        try:
            answer = {"score": float(verifiers[request["verifier"]].score(request["text"], request["ground_truth"]))}
        except Exception as error:  # foreign code, which may raise anything
            answer = {"problem": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=verdicts, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
