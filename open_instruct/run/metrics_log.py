"""One row of metrics a step: to `metrics.jsonl`, to the terminal, and to the trackers asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Protocol

from olmo_core.train.callbacks import Callback

from open_instruct.parallel.peers import doing
from open_instruct.run.console import Console
from open_instruct.run.run_directory import rows_of
from open_instruct.whole_file import replace_text

# Names that OLMo-core records, and what scripts read.
RENAMED = {
    "optim/total grad norm": "grad_norm",
    "optim/LR (group 0)": "lr",
    "optim/step skipped": "step_skipped",
}
# Recorded by OLMo-core and left to run.log: counts that our own loader keeps otherwise.
LEFT_OUT = ("throughput/", "checkpoint/", "train/", "optim/")


class Tracker(Protocol):
    """Where metrics go beside the file: wandb, tensorboard."""

    def log(self, step: int, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """Append-only rows of JSON, one a step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep_until(self, step: int) -> None:
        """Drop rows after `step`: a resumed run writes them again."""
        if self.path.exists():
            replace_text(self.path, "".join(f"{json.dumps(row)}\n" for row in self.rows() if row["step"] <= step))

    def rows(self) -> list[dict[str, Any]]:
        """What has been written so far, but for lines that a crash cut short or a disk damaged."""
        return list(rows_of(self.path))

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row. A number that JSON cannot say, the norm of a gradient that was left out, is null."""
        said = {
            name: None if isinstance(value, float) and not isfinite(value) else value for name, value in row.items()
        }
        with self.path.open("a") as file:
            file.write(json.dumps(said, allow_nan=False) + "\n")


@dataclass
class MetricsLog(Callback):
    """Writes the metrics of every step on rank 0, and measures tokens per second on all."""

    # Before the checkpointer, so that writing a checkpoint does not count as slow training.
    priority: ClassVar[int] = 2

    file: MetricsFile | None = None
    console: Console = field(default_factory=lambda: Console(speaks=False))
    trackers: Sequence[Tracker] = ()

    _step_began_s: float = 0.0
    _tokens_before: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)
    _show: Callable[[int, str], None] | None = None

    def pre_train(self) -> None:
        first_step, num_steps = self.step, self.trainer.max_steps or 0
        if self.file is not None:
            self.file.keep_until(first_step)
            self._show = self._stack.enter_context(self.console.training(first_step=first_step, num_steps=num_steps))

    def pre_load_batch(self) -> None:
        doing(f"training step {self.step + 1}")
        self._step_began_s = time.perf_counter()
        self._tokens_before = self.trainer.global_train_tokens_seen

    def post_train_batch(self) -> None:
        doing(f"finishing step {self.step}")
        num_tokens = self.trainer.global_train_tokens_seen - self._tokens_before
        self.trainer.record_metric("tokens_per_second", num_tokens / (time.perf_counter() - self._step_began_s))

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        # Saving a checkpoint flushes the step's metrics first and records its own duration after.
        if self.file is None or "loss" not in metrics:
            return
        row = {"step": step} | row_of(metrics)
        self.file.append(row)
        for tracker in self.trackers:
            tracker.log(step, row)
        if self._show is not None:
            self._show(step, numbers_of_step(row))

    def on_error(self, exc: BaseException) -> None:
        self._stack.close()

    def post_train(self) -> None:
        self._stack.close()

    def close(self) -> None:
        self._stack.close()
        for tracker in self.trackers:
            tracker.close()


def row_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """What of the recorded metrics is written down, under the names that scripts read."""
    named = {RENAMED.get(name, name): value for name, value in metrics.items()}
    return {
        name: int(value) if name == "num_tokens" else value
        for name, value in named.items()
        if not name.startswith(LEFT_OUT)
    }


def numbers_of_step(row: Mapping[str, float]) -> str:
    """The numbers that a person follows, in one line."""
    parts = [f"loss {row['loss']:.4f}"]
    if "rewards/margin" in row:
        parts.append(f"margin {row['rewards/margin']:+.4f}")
        parts.append(f"acc {row['rewards/accuracy']:.2f}")
    if "tokens_per_second" in row:
        parts.append(f"{row['tokens_per_second']:,.0f} tok/s")
    parts.append(f"{row['peak_memory_gib']:.2f} GiB")
    return "  ".join(parts)
