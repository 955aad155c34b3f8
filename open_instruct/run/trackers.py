"""The trackers of `--report_to`, which get each row of metrics and resume with the run."""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from open_instruct.config.run_sections import LoggingSection
from open_instruct.core.errors import InputError
from open_instruct.core.files import replace_text
from open_instruct.run.run_directory import is_number

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A receiver of metrics: a run of wandb or trackio, or an object with the same methods."""

    def log(self, row: dict[str, Any], step: int) -> None: ...

    def finish(self) -> None: ...


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


class MlflowRun:
    """A run of MLflow, at `MLFLOW_TRACKING_URI` or its default; OUT/mlflow_id has its id.

    A server that fails during a run ends the tracking, and not the run.
    """

    def __init__(self, folder: Path, logging: LoggingSection, config: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow = mlflow
        self._has_failed = False
        run_id = _read_word(folder / "mlflow_id")
        try:
            mlflow.set_experiment(logging.wandb_project_name)
            run = mlflow.start_run(run_id=run_id or None, run_name=_name_run(folder, logging))
            if not run_id:
                # MLflow takes each parameter once; a resumed run may have other values.
                mlflow.log_params(dict(config))
        except Exception as error:
            raise InputError(
                f"--report_to mlflow: no run can be begun at {mlflow.get_tracking_uri()}: "
                f"{error}; set MLFLOW_TRACKING_URI, or leave mlflow out: metrics.jsonl is always "
                "written",
                kind="remote",
            ) from error
        replace_text(folder / "mlflow_id", run.info.run_id)

    def log(self, row: Mapping[str, Any], step: int) -> None:
        if self._has_failed:
            return
        numbers = {name: float(value) for name, value in row.items() if is_number(value)}
        try:
            self._mlflow.log_metrics(numbers, step=step)
        except Exception as error:
            self._has_failed = True
            log.warning(
                "mlflow gets no rows from step %d on (%s); metrics.jsonl has them all", step, error
            )

    def finish(self) -> None:
        try:
            self._mlflow.end_run()
        except Exception as error:
            log.warning("the run of mlflow cannot be ended: %s", error)


class SwanLabRun:
    """A run of SwanLab, whose id is in OUT/swanlab_id; its files are in OUT/swanlog."""

    def __init__(self, folder: Path, logging: LoggingSection, config: Mapping[str, Any]) -> None:
        import swanlab

        run_id = _read_word(folder / "swanlab_id")
        # `cloud` is what older versions call it.
        mode = os.environ.get("SWANLAB_MODE", "online").lower().replace("cloud", "online")
        try:
            self._run = swanlab.init(
                id=run_id or None,
                resume="allow" if run_id else "never",
                project=logging.wandb_project_name,
                name=_name_run(folder, logging),
                config=dict(config),
                log_dir=str(folder / "swanlog"),
                mode=mode,
            )
        except Exception as error:
            raise InputError(
                f"--report_to swanlab: no run can be begun: {error}; set SWANLAB_MODE=offline, or "
                "leave swanlab out: metrics.jsonl is always written",
                kind="remote",
            ) from error
        replace_text(folder / "swanlab_id", self._run.id)

    def log(self, row: Mapping[str, Any], step: int) -> None:
        self._run.log({name: value for name, value in row.items() if is_number(value)}, step=step)

    def finish(self) -> None:
        self._run.finish()


def build_trackers(
    logging: LoggingSection, *, folder: Path, config: Mapping[str, Any]
) -> list[Tracker]:
    """Begin the trackers of `--report_to`, once `check_trackers` has accepted them; on rank 0.

    Raises:
        InputError: a tracker cannot begin its run.
    """
    return [
        begin(folder, logging, config)
        for name, begin in TRACKERS.items()
        if name in logging.report_to
    ]


def _begin_wandb(folder: Path, logging: LoggingSection, config: Mapping[str, Any]) -> Tracker:
    """A resumed run continues the wandb run whose id is in OUT/wandb_id."""
    import wandb

    run_id = _read_word(folder / "wandb_id") or wandb.util.generate_id()
    replace_text(folder / "wandb_id", run_id)
    return wandb.init(
        id=run_id,
        resume="allow",
        project=logging.wandb_project_name,
        entity=logging.wandb_entity,
        name=_name_run(folder, logging),
        config=dict(config),
        dir=str(folder),
    )


def _begin_trackio(folder: Path, logging: LoggingSection, config: Mapping[str, Any]) -> Tracker:
    """Begin, or resume, the trackio run named in OUT/trackio_name, on this machine."""
    import trackio

    name = _read_word(folder / "trackio_name")
    run = trackio.init(
        project=logging.wandb_project_name,
        name=name or _name_run(folder, logging),
        resume="allow" if name else "never",
        config=dict(config),
        embed=False,
    )
    replace_text(folder / "trackio_name", run.name)
    return run


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": _begin_wandb,
    "trackio": _begin_trackio,
    "mlflow": MlflowRun,
    "swanlab": SwanLabRun,
}


def _name_run(folder: Path, logging: LoggingSection) -> str:
    return logging.exp_name or folder.resolve().name


def _read_word(file: Path) -> str:
    """The word in a file; "" without one."""
    return file.read_text().strip() if file.exists() else ""
