"""A small training problem that the rank tests share, and how to run it."""

import contextlib
import hashlib
import json
import os
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from open_instruct.commands import export

NUM_ROWS = 22
ROWS_PER_STEP = 8
# Of a whole epoch, the last of which is short; what a command takes without the flag is of two.
STEPS_OF_AN_EPOCH = 3
# Above those that Ray gives to its workers, too. Each process of a test session has an eighth by
# itself.
OUTSIDE_THE_EPHEMERAL = range(20_000, 32_000)
NUM_SHARES = 8

OF_EVERY_RUN = {
    *(
        "step",
        "loss",
        "grad_norm",
        "lr",
        "num_tokens",
        "tokens_per_second",
        "peak_memory_gib",
        "padding_fraction",
    ),
    *(
        "shared_fraction",
        *(f"time/{part}" for part in ("data", "forward", "backward", "optimizer", "checkpoint")),
    ),
}
"""Metrics that a row of every objective has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCase:
    """Model, rows and cache of a run; 22 rows in global batches of 8, so that the last batch is
    short.

    `own_flags` are those that only its command has.
    """

    model: Path
    rows: Path
    folder: Path
    own_flags: dict[str, Any]

    def command(
        self, name: str, *, ranks: int = 1, batch: int | None = None, **flags: Any
    ) -> list[str]:
        """Flags of a run called `name` on so many data-parallel ranks, `batch` rows a
        microbatch.
        """
        per_rank = ROWS_PER_STEP // ranks
        batch = batch or per_rank
        settings: dict[str, Any] = {
            "model_name_or_path": self.model,
            "mixer_list": [self.rows, "1.0"],
            "cache_dir": self.folder / "cache",
            "output_dir": self.folder / name,
            "max_seq_length": 192,
            "param_dtype": "float32",
            "learning_rate": 1e-4,
            "warmup_ratio": 0.0,
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": per_rank // batch,
            "max_train_steps": 5,
            "checkpointing_steps": 100,
        }
        settings |= self.own_flags | flags
        words: list[str] = []
        for flag, value in settings.items():
            words.append(f"--{flag}")
            words.extend(str(word) for word in (value if isinstance(value, list) else [value]))
        return words

    def metrics(self, name: str) -> list[dict[str, float]]:
        return [
            json.loads(line)
            for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()
        ]

    def trajectory(self, name: str) -> list[tuple[float, float]]:
        """(loss, gradient norm) of every step."""
        return [(row["loss"], row["grad_norm"]) for row in self.metrics(name)]

    def is_exported_again(self, name: str) -> bool:
        """Whether `open-instruct export` makes of the newest checkpoint, byte for byte, what the
        run has left.
        """
        left, again = self.folder / name / "hf_model", self.folder / f"{name}_again"
        assert export.main([str(self.folder / name), "--output_dir", str(again)]) == 0
        of_both = [
            {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (left, again)
        ]
        assert of_both[0]
        return of_both[0] == of_both[1]

    def weights_digest(self, name: str) -> str:
        """Hash of the exported weights, name by name."""
        digest = hashlib.sha256()
        for file in sorted((self.folder / name / "hf_model").glob("*.safetensors")):
            for tensor, values in sorted(load_file(file).items()):
                digest.update(tensor.encode() + values.tobytes())
        return digest.hexdigest()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, and that neither the system nor other tests take before
    they are used.
    """
    ports: list[int] = []
    for port in islice(_own_ports(), 50 + 2 * count):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"no {count} free ports")


@cache
def _own_ports() -> Iterator[int]:
    """From a place that is not seeded, as runs within this process seed `random`: another session
    may run beside it.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = OUTSIDE_THE_EPHEMERAL[number % NUM_SHARES :: NUM_SHARES]
    return islice(cycle(own), random.SystemRandom().randrange(len(own)), None)
