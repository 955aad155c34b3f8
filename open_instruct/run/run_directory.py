"""The folder that a run leaves behind, and its log."""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from open_instruct.config.lora import LoRASection
from open_instruct.config.run_sections import RunSection
from open_instruct.core.errors import InputError
from open_instruct.core.files import describe_special_file, replace_text
from open_instruct.core.records import BestStep
from open_instruct.core.shard_layout import ShardLayout

RUN_FILES = (
    "config.yaml",
    "layout.json",
    "run.log",
    "metrics.jsonl",
    "eval.jsonl",
    "best.json",
    "pids.json",
    "plan.json",
    "wandb_id",
    "trackio_name",
    "mlflow_id",
    "swanlab_id",
)
# A lease is renewed every few seconds; clocks of two machines may be some seconds apart.
LEASE_SILENCE_S = 60.0
RunState = Literal["ended", "running", "stopped"]
WAY_OUT = "move it away, or take another folder"


class RunDirectory:
    """Paths of everything a run writes.

    Only rank 0 writes, but for checkpoints and the exported model.
    """

    def __init__(self, *, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.layout = path / "layout.json"
        self.log = path / "run.log"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "eval.jsonl"
        self.best = path / "best.json"
        self.pids = path / "pids.json"
        self.plan = path / "plan.json"
        self.hf_model = path / "hf_model"
        self.olmo_core_model = path / "olmo_core_model"
        self.engine_model = path / "engine_model"
        self.adapter = path / "adapter"
        self.critic = path / "critic"
        self.exports = {
            "adapter": self.adapter,
            "critic": self.critic,
            "trained model for OLMo-core": self.olmo_core_model,
            "trained model": self.hf_model,
        }

    def create(self) -> None:
        """Make the folder.

        :raises InputError: if the folder cannot be made or written.
        """
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path, os.W_OK):
            raise InputError(
                f"--output_dir {self.path} cannot be written: choose another folder",
                kind="unreadable_file",
            )
        self.refuse_foreign_files()

    def refuse_unusable(self) -> None:
        """Refuse a folder that `create` would refuse, without making it.

        :raises InputError: see `create`.
        """
        above = next(each for each in (self.path, *self.path.absolute().parents) if each.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            kind = "a folder that cannot be written" if above.is_dir() else "a file"
            raise InputError(
                f"--output_dir {self.path} cannot be written ({above} is {kind}): choose another "
                "folder",
                kind="unreadable_file",
            )
        self.refuse_foreign_files()

    def refuse_foreign_files(self) -> None:
        """:raises InputError: something else has the name of a run's file or checkpoint."""
        for name in (*RUN_FILES, "run.lock", "run.lease"):
            kind = describe_special_file(self.path / name)
            if kind:
                raise InputError(
                    f"{self.path / name} is {kind}, and a run has a file there: {WAY_OUT}",
                    kind="other_run",
                )
        for step in self._find_steps():
            if not step.is_dir():
                kind = describe_special_file(step) or "a file"
                problem = f"{step} is {kind}, and a run has the folder of a checkpoint there"
                raise InputError(f"{problem}: {WAY_OUT}", kind="other_run")

    def has_live_lease(self) -> bool:
        """Whether a process holds the folder and renewed its lease lately, by our own clock."""
        try:
            return time.time() - (self.path / "run.lease").stat().st_mtime < LEASE_SILENCE_S
        except OSError:
            return False

    def find_state(self) -> RunState:
        """Whether the run has left its model (`ended`), a process is at work on it, or neither."""
        if self.hf_model.exists() or self.adapter.exists():
            return "ended"
        return "running" if self.has_live_lease() else "stopped"

    def has_results(self) -> bool:
        """Whether a run has left a checkpoint or an export here."""
        return any(path.is_dir() for path in (*self.exports.values(), *self._find_steps()))

    def _find_steps(self) -> Iterator[Path]:
        """What has the name of a checkpoint, `step12`."""
        for path in self.path.glob("step*"):
            if path.name.removeprefix("step").isdecimal():
                yield path

    def remove_partials(self) -> None:
        """Remove files that a killed run left half written."""
        for name in RUN_FILES:
            for leftover in self.path.glob(f".{name}.*-*.partial"):
                leftover.unlink(missing_ok=True)

    def remove_earlier_run(self) -> None:
        """Remove the names that a run writes, and no file of the user's; the lock stays.

        :raises InputError: a file cannot be removed.
        """
        with self._writing():
            for step in self.path.glob("step*"):
                if step.name.removeprefix("step").split("-")[0].isdigit():
                    shutil.rmtree(step)
            beside = [self.path / name for name in ("tensorboard", "swanlog", "traces")]
            beside.append(self.engine_model)
            for folder in (*self.exports.values(), *beside):
                shutil.rmtree(folder, ignore_errors=True)
            for name in RUN_FILES:
                (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"--output_dir {self.path} cannot be written ({error.strerror}): choose another "
                "folder",
                kind="unreadable_file",
            ) from error

    def write_layout(self, layout: ShardLayout) -> None:
        replace_text(self.layout, json.dumps(layout.as_json(), indent=2) + "\n")

    def write_plan(self, memory: Mapping[str, Any]) -> None:
        """Write the planned memory, if there is a plan, to be compared with the measured memory."""
        if memory:
            replace_text(self.plan, json.dumps(memory) + "\n")
        else:
            self.plan.unlink(missing_ok=True)  # an earlier one

    def read_data_parallel_world_size(self) -> int | None:
        """The data-parallel world size in the saved layout; None if it cannot be read."""
        try:
            saved_layout = json.loads(self.layout.read_text(encoding="utf-8"))
            return int(saved_layout["num_replicas"]) * int(saved_layout["shard_degree"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write_pids(self, *, driver: int, learners: Sequence[int], engines: Sequence[int]) -> None:
        """The process ids of a run, for people and scripts, while it lives.

        Learners are in rank order.
        """
        pids = {
            "driver": driver,
            "learners": learners,
            "engines": engines,
        }
        replace_text(self.pids, json.dumps(pids) + "\n")

    def write_best_step(self, best: BestStep | None) -> None:
        """Write `best.json`, for people and scripts, or remove it where there is no best step."""
        if best is None:
            self.best.unlink(missing_ok=True)
        else:
            replace_text(self.best, json.dumps(asdict(best)) + "\n")

    def read_best_step(self) -> BestStep | None:
        """The step in `best.json`; None if that cannot be read."""
        try:
            return BestStep(**json.loads(self.best.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write_evaluation(self, row: dict[str, Any]) -> None:
        """Write a row, in place of those of the same step and later ones."""
        rows = [each for each in read_rows(self.evaluations) if each["step"] < row["step"]]
        text = "".join(json.dumps(each) + "\n" for each in [*rows, row])
        replace_text(self.evaluations, text)


def find_export_folder(run: RunSection, adapters: LoRASection | None) -> Path:
    """The folder of the model or adapter that the run of these flags ends with."""
    directory = RunDirectory(path=Path(run.output_dir))
    if adapters is not None and adapters.export == "adapter":
        return directory.adapter
    return directory.hf_model


def is_number(value: Any) -> bool:
    """Whether `value` is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file whose objects have a `step`; damaged and half lines are skipped."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
            is_row = is_number(row["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if is_row:
            yield row


def start_log(path: Path, *, rank: int) -> None:
    """Send the log of rank 0, and warnings of every rank, to `path` and not to the terminal."""
    # With a full disk, logging would print a traceback for every line and bury the run's own
    # message.
    logging.raiseExceptions = False
    handler = logging.FileHandler(path)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s")
    )
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    # Libraries that log every shard or request would bury the run's own lines.
    for chatty in ("urllib3", "filelock", "fsspec", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
