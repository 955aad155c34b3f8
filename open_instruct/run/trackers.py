"""wandb, trackio and tensorboard, for those who asked for them with `--report_to`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from open_instruct.config.resolved import as_flat_dict
from open_instruct.config.sections import LoggingSection
from open_instruct.config.training import LearnerConfig
from open_instruct.run.metrics_log import MetricsLog, Tracker, numbers_of_step
from open_instruct.run.opened import Run
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


class TrackioTracker:
    """One trackio run, on this machine; a resumed run continues it by the name kept in OUT/trackio_name."""

    def __init__(self, folder: Path, logging: LoggingSection, config: Mapping[str, Any]) -> None:
        import trackio

        name_file = folder / "trackio_name"
        is_begun = name_file.exists()
        self._run = trackio.init(
            project=logging.wandb_project_name,
            name=name_file.read_text().strip() if is_begun else logging.exp_name or folder.resolve().name,
            resume="allow" if is_begun else "never",
            config=dict(config),
            embed=False,
        )
        replace_text(name_file, self._run.name)

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
    if "trackio" in logging.report_to:
        trackers.append(TrackioTracker(folder, logging, config))
    return trackers


@contextmanager
def logging_steps(
    run: Run, config: LearnerConfig, *, first_step: int, num_steps: int
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """A function that is told the number and the metrics of every step: rank 0 writes and shows them.

    Rows after `first_step` that an earlier run left are dropped: they are written again.
    """
    if run.process.rank != 0:
        yield lambda step, row: None
        return
    trackers = build_trackers(config.logging, folder=run.directory.path, config=as_flat_dict(config))
    with (
        closing(MetricsLog(run.directory.metrics, trackers, run.console.warn)) as log,
        run.console.training(first_step=first_step, num_steps=num_steps) as show,
    ):
        log.keep_until(first_step)

        def on_step(step: int, row: Mapping[str, float]) -> None:
            log.write({"step": step} | dict(row))
            show(step, numbers_of_step(row))

        yield on_step
