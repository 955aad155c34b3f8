"""A process that scores one completion after another: JSON lines in, JSON lines out, until its input ends.

Started by `VerifierPool`, which kills it when a verdict takes too long. It ends with its parent, whose end closes
its input, whatever ended it.
"""

from __future__ import annotations

import json
import os
import sys

from open_instruct.verifiers.registry import known_verifiers


def main(user_verifiers: list[str]) -> None:
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
