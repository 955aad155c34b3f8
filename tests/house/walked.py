"""Trains one step of DPO on one pair, and prints as JSON what that pair's way to its gradient passes.

    python walked.py --flag value ...

`files` are those of the package that execute something between the row and the gradient; `moves` counts calls from one
of them into another, by way of a library's code or not.
"""

import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

# Of others' code only calls back into ours count, and it is imported before anything is: watched, that takes a minute.
import olmo_core.train.train_module  # noqa: F401
import transformers.models.auto.modeling_auto  # noqa: F401

import open_instruct
from open_instruct.dpo import main

# What the way consists of, each from its call to its return: tokenising the row, building the step, the gradient.
PARTS = {
    "data/token_dataset.py": "load_token_dataset",
    "packing/steps.py": "step_batch",
    "learner/policy.py": "forward_backward",
}


class Walk:
    """A profiler that counts while a part of the way is executed, in any thread, and each part once."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.files: set[str] = set()
        self.moves: Counter[tuple[str, str]] = Counter()
        self._left = dict(PARTS)
        self._inside: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = self._ours(frame)
        if file is None:
            return
        if event == "call" and self._inside is None and self._left.get(file) == frame.f_code.co_name:
            del self._left[file]
            self._inside = frame
        if self._inside is None:
            return
        if event == "call":
            self.files.add(file)
            caller = frame.f_back
            while caller is not None and self._ours(caller) is None:
                caller = caller.f_back
            source = None if caller is None else self._ours(caller)
            if source not in (None, file):
                self.moves[source, file] += 1
        elif event == "return" and frame is self._inside:
            self._inside = None

    def _ours(self, frame: FrameType) -> str | None:
        path = frame.f_code.co_filename
        return path.removeprefix(self.root) if path.startswith(self.root) else None


if __name__ == "__main__":
    walk = Walk(f"{Path(open_instruct.__file__).parent}/")
    threading.setprofile(walk)
    sys.setprofile(walk)
    code = main(sys.argv[1:])
    sys.setprofile(None)
    assert code == 0 and not walk._left, f"exit code {code}; never called: {walk._left}"
    print(
        json.dumps({"files": sorted(walk.files), "moves": [[*way, times] for way, times in walk.moves.most_common()]})
    )
