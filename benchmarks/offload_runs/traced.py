"""The device's memory in a step of our DPO as rank 0 of a pretended world, beside
trl_programs/dpo_traced.py.

Run by `offload_vs_trl.py`; its word is a case as JSON.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from open_instruct.planning.subject.read_shape import public_models
from tests.fake_cuda.cases import leave_weights_alone
from tests.fake_cuda.device import load_hooks, pretend_cuda
from tests.fake_cuda.memory import TracedCase, traced


@dataclass(frozen=True)
class Cut(TracedCase):
    """A public model of so many layers; documents have a prompt of so many tokens, a step so many
    microbatches.
    """

    num_layers: int = 4
    prompt: int = 8
    microbatches: int = 2

    @property
    def fields(self) -> dict[str, Any]:
        return public_models()[self.family] | {"num_hidden_layers": self.num_layers}

    @property
    def words(self) -> list[str]:
        words = super().words
        words[words.index("--gradient_accumulation_steps") + 1] = str(self.microbatches)
        return words

    def lengths(self, num_rows: int, num_replies: int) -> list[list[int]]:
        return [[self.prompt, *(self.longest - self.prompt,) * num_replies]] * num_rows


def main(words: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        load_hooks(folder)
        pretend_cuda()
        leave_weights_alone()
        print(json.dumps(traced(Cut(**json.loads(words)), folder / "run")))


if __name__ == "__main__":
    main(sys.argv[1])
