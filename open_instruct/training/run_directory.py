"""The folder a run leaves behind, and its log."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_instruct.errors import InputError
from open_instruct.records import ShardLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """Paths of everything a run writes. Only rank 0 writes, but for checkpoints and the exported model."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def layout(self) -> Path:
        return self.path / "layout.json"

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def pids(self) -> Path:
        return self.path / "pids.json"

    @property
    def hf_model(self) -> Path:
        return self.path / "hf_model"

    def create(self, *, overwrite: bool) -> None:
        """Make the folder; with `overwrite`, first remove what an earlier run of ours left there.

        :raises InputError: if the folder cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if overwrite:
                self._remove_earlier_run()
        except OSError as error:
            raise InputError(
                f"--output_dir {self.path} cannot be written ({error.strerror}): choose another folder"
            ) from error
        if not os.access(self.path, os.W_OK):
            raise InputError(f"--output_dir {self.path} cannot be written: choose another folder")

    def _remove_earlier_run(self) -> None:
        # Only names that a run writes: the folder may hold the user's own files.
        for step in self.path.glob("step*"):
            if step.name.removeprefix("step").split("-")[0].isdigit():
                shutil.rmtree(step)
        for folder in (self.hf_model, self.path / "tensorboard", self.path / "traces"):
            shutil.rmtree(folder, ignore_errors=True)
        own_files = self.config, self.layout, self.log, self.metrics, self.evaluations
        for file in (*own_files, self.path / "wandb_id", self.path / "pids.json"):
            file.unlink(missing_ok=True)

    def write_layout(self, layout: ShardLayout) -> None:
        self.layout.write_text(json.dumps(layout.as_json(), indent=2) + "\n")

    def write_evaluation(self, row: dict[str, Any]) -> None:
        """One row a step: a second evaluation of the same step replaces the first."""
        rows: list[dict[str, Any]] = []
        if self.evaluations.exists():
            rows = [json.loads(line) for line in self.evaluations.read_text().splitlines()]
        rows = [earlier for earlier in rows if earlier["step"] < row["step"]] + [row]
        self.evaluations.write_text("".join(json.dumps(each) + "\n" for each in rows))


def log_to(path: Path, *, rank: int) -> None:
    """Send the log of rank 0, and warnings of every rank, to `path`; the terminal is the console's alone."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    # One line a shard read or a request made would bury the run's own.
    for chatty in ("urllib3", "filelock", "fsspec", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
