"""wandb and tensorboard, for those who asked for them with `--report_to`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from open_instruct.config.sections import LoggingSection
from open_instruct.run.metrics_log import Tracker
from open_instruct.whole_file import replace_text


class TensorBoardTracker:
    """Scalars under OUT/tensorboard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """One wandb run; a resumed run continues it by the id kept in OUT/wandb_id."""

    def __init__(self, folder: Path, logging: LoggingSection, config: Mapping[str, Any]) -> None:
        import wandb

        id_file = folder / "wandb_id"
        run_id = id_file.read_text().strip() if id_file.exists() else wandb.util.generate_id()
        replace_text(id_file, run_id)
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            project=logging.wandb_project_name,
            entity=logging.wandb_entity,
            name=logging.exp_name or folder.resolve().name,
            config=dict(config),
            dir=str(folder),
        )

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        self._run.finish()


def build_trackers(logging: LoggingSection, *, folder: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """The trackers named in `--report_to`, which `check_trackers` has accepted. Call on rank 0 only."""
    trackers: list[Tracker] = []
    if "tensorboard" in logging.report_to:
        trackers.append(TensorBoardTracker(folder))
    if "wandb" in logging.report_to:
        trackers.append(WandbTracker(folder, logging, config))
    return trackers
