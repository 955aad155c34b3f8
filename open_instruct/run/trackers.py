"""wandb, trackio and tensorboard, for those who asked for them with `--report_to`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from open_instruct.config.resolved import as_flat_dict
from open_instruct.config.sections import LoggingSection
from open_instruct.config.training import LearnerConfig
from open_instruct.run.metrics_log import MetricsLog, Tracker, step_words
from open_instruct.run.opened import Run
from open_instruct.whole_file import replace_text


class TensorBoard:
    """Scalars under OUT/tensorboard."""

    def __init__(self, folder: Path, logging: LoggingSection, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, row: Mapping[str, float], step: int) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


def _wandb_run(folder: Path, logging: LoggingSection, config: Mapping[str, Any]) -> Tracker:
    """A resumed run continues the wandb run whose id is kept in OUT/wandb_id."""
    import wandb

    run_id = _kept(folder / "wandb_id") or wandb.util.generate_id()
    replace_text(folder / "wandb_id", run_id)
    return wandb.init(
        id=run_id,
        resume="allow",
        project=logging.wandb_project_name,
        entity=logging.wandb_entity,
        name=logging.exp_name or folder.resolve().name,
        config=dict(config),
        dir=str(folder),
    )


def _trackio_run(folder: Path, logging: LoggingSection, config: Mapping[str, Any]) -> Tracker:
    """On this machine; a resumed run continues the trackio run whose name is kept in OUT/trackio_name."""
    import trackio

    name = _kept(folder / "trackio_name")
    run = trackio.init(
        project=logging.wandb_project_name,
        name=name or logging.exp_name or folder.resolve().name,
        resume="allow" if name else "never",
        config=dict(config),
        embed=False,
    )
    replace_text(folder / "trackio_name", run.name)
    return run


def _kept(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": _wandb_run,
    "trackio": _trackio_run,
}


def build_trackers(logging: LoggingSection, *, folder: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """The trackers named in `--report_to`, which `check_trackers` has accepted. Call on rank 0 only."""
    return [begin(folder, logging, config) for name, begin in TRACKERS.items() if name in logging.report_to]


@contextmanager
def logging_steps(
    run: Run, config: LearnerConfig, *, first_step: int, num_steps: int
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Yields a function to call with the number and the metrics of every step: rank 0 writes and shows them.

    Rows after `first_step` that an earlier start left are dropped, as they are written again.
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
            show(step, step_words(row))

        yield on_step
