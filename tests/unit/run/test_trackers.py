"""The trackers of --report_to: a stand-in for each that needs an account or a server, and packages
themselves.
"""

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from open_instruct.config.run_sections import LoggingSection
from open_instruct.config.tracker_access import check_trackers
from open_instruct.run.trackers import build_trackers
from tests.refusals import refused


def test_tensorboard_gets_every_scalar(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = build_trackers(
        LoggingSection(report_to=["tensorboard"]), folder=tmp_path, config={}
    )
    tracker.log({"loss": 0.5, "rewards/margin": 0.25}, step=3)
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("rewards/margin")] == [(3, 0.25)]
    assert events.Scalars("loss")[0].value == 0.5


def test_wandb_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb itself needs an account: a stand-in records the calls."""
    calls: list[Any] = []

    class FakeRun:
        def log(self, row: dict[str, float], step: int) -> None:
            calls.append((step, row))

        def finish(self) -> None:
            calls.append("finished")

    def init(**settings: Any) -> FakeRun:
        calls.append({key: settings[key] for key in ("id", "project", "name", "config", "resume")})
        return FakeRun()

    fake = types.SimpleNamespace(init=init, util=types.SimpleNamespace(generate_id=lambda: "abc"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        (tracker,) = build_trackers(
            LoggingSection(report_to=["wandb"], wandb_project_name="p"),
            folder=tmp_path,
            config={"seed": 1},
        )
        tracker.log({"loss": 0.5}, step=1)
        tracker.finish()
        fake.util.generate_id = lambda: "another"
    started = {
        "id": "abc",
        "project": "p",
        "name": tmp_path.name,
        "config": {"seed": 1},
        "resume": "allow",
    }
    assert calls == [started, (1, {"loss": 0.5}), "finished"] * 2


def test_trackio_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in, for those who have not installed it."""
    calls: list[Any] = []

    def init(**settings: Any) -> Any:
        calls.append(settings)
        log = lambda row, step: calls.append((step, row))  # noqa: E731
        return types.SimpleNamespace(
            name=settings["name"], log=log, finish=lambda: calls.append("finished")
        )

    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(init=init))
    for exp_name in ("first", "another"):
        logging = LoggingSection(report_to=["trackio"], exp_name=exp_name)
        (tracker,) = build_trackers(logging, folder=tmp_path, config={"seed": 1})
        tracker.log({"loss": 0.5}, step=1)
        tracker.finish()
    begun = {"project": "open_instruct", "name": "first", "config": {"seed": 1}, "embed": False}
    of_each = [(1, {"loss": 0.5}), "finished"]
    assert calls == [begun | {"resume": "never"}, *of_each, begun | {"resume": "allow"}, *of_each]


@pytest.mark.slow
def test_trackio_itself_has_every_step_once(tmp_path: Path) -> None:
    """In a process of its own, which has it write elsewhere."""
    pytest.importorskip("trackio")
    code = f"""
from pathlib import Path
from open_instruct.config.run_sections import LoggingSection
from open_instruct.run.trackers import build_trackers
folder = Path({str(tmp_path / "run")!r})
for step in (1, 2):
    (tracker,) = build_trackers(LoggingSection(report_to=["trackio"]), folder=folder, config={{}})
    tracker.log({{"rewards/margin": 0.25 * step}}, step=step)
    tracker.finish()
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("open_instruct")
print("TOLD", run, [(row["step"], row["rewards/margin"]) for row in SQLiteStorage.get_logs("open_instruct", run)])
"""
    (tmp_path / "run").mkdir()
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "kept"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert "TOLD run [(1, 0.25), (2, 0.5)]" in done.stdout, done.stdout + done.stderr


class FakeMlflow(types.SimpleNamespace):
    """As much of MLflow's fluent functions as a run calls."""

    def __init__(self) -> None:
        super().__init__(calls=[], fails=False)

    def get_tracking_uri(self) -> str:
        return "http://nowhere"

    def set_experiment(self, name: str) -> None:
        if self.fails:
            raise OSError("no answer")
        self.calls.append(("experiment", name))

    def start_run(self, *, run_id: str | None, run_name: str) -> Any:
        self.calls.append(("run", run_id, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))

    def log_params(self, params: dict[str, Any]) -> None:
        self.calls.append(("params", params))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if self.fails:
            raise OSError("no answer")
        self.calls.append((step, metrics))

    def end_run(self) -> None:
        self.calls.append("ended")


def test_mlflow_run_is_continued_and_outlived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    logging = LoggingSection(report_to=["mlflow"], wandb_project_name="p", exp_name="n")
    for _ in range(2):
        (tracker,) = build_trackers(logging, folder=tmp_path, config={"seed": 1})
        tracker.log({"step": 1, "loss": 0.5, "norm": None}, step=1)
        tracker.finish()
    logged = [(1, {"step": 1.0, "loss": 0.5}), "ended"]
    first = [("experiment", "p"), ("run", None, "n"), ("params", {"seed": 1}), *logged]
    assert mlflow.calls == [*first, ("experiment", "p"), ("run", "abc", "n"), *logged]
    (tracker,) = build_trackers(logging, folder=tmp_path, config={})
    mlflow.fails = True
    tracker.log({"loss": 0.5}, step=2)
    mlflow.fails = False
    tracker.log({"loss": 0.5}, step=3)
    assert mlflow.calls[-1] == ("run", "abc", "n")  # after the failure nothing is sent
    mlflow.fails = True
    with refused("remote", None, "mlflow", "http://nowhere"):
        build_trackers(logging, folder=tmp_path, config={})


def test_swanlab_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def init(**settings: Any) -> Any:
        calls.append({key: settings[key] for key in ("id", "resume", "project", "name", "mode")})
        log = lambda row, step: calls.append((step, row))  # noqa: E731
        return types.SimpleNamespace(id="abc", log=log, finish=lambda: calls.append("finished"))

    monkeypatch.setenv("SWANLAB_MODE", "cloud")
    monkeypatch.setitem(sys.modules, "swanlab", types.SimpleNamespace(init=init))
    logging = LoggingSection(report_to=["swanlab"], wandb_project_name="p", exp_name="n")
    for _ in range(2):
        (tracker,) = build_trackers(logging, folder=tmp_path, config={"seed": 1})
        tracker.log({"loss": 0.5, "norm": None}, step=1)
        tracker.finish()
    begun = {"project": "p", "name": "n", "mode": "online"}
    logged = [(1, {"loss": 0.5}), "finished"]
    first = [begun | {"id": None, "resume": "never"}, *logged]
    assert calls == [*first, begun | {"id": "abc", "resume": "allow"}, *logged]


@pytest.mark.parametrize(
    ("environ", "is_let_in"),
    [
        ({}, False),
        ({"SWANLAB_MODE": "cloud"}, False),
        ({"SWANLAB_MODE": "offline"}, True),
        ({"SWANLAB_API_KEY": "key"}, True),
        ({"SWANLAB_SAVE_DIR": "home"}, True),
    ],
)
def test_swanlab_needs_a_login_where_it_uploads(
    environ: dict[str, str], is_let_in: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swanlab.py").write_text("raise AssertionError('imported')")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text("machine api.swanlab.cn login user password key\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    if is_let_in:
        check_trackers(["swanlab"], environ)
    else:
        with refused("remote", None, "swanlab login", "SWANLAB_API_KEY", "SWANLAB_MODE=offline"):
            check_trackers(["swanlab"], environ)


@pytest.mark.parametrize("tracker", ["mlflow", "swanlab"])
def test_missing_package_of_a_tracker_is_refused_with_the_command(
    tracker: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with refused("missing_package", None, f"pip install 'open-instruct[{tracker}]'"):
        check_trackers([tracker], {})


@pytest.mark.slow
def test_mlflow_itself_has_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    for step in (1, 2):
        (tracker,) = build_trackers(
            LoggingSection(report_to=["mlflow"]), folder=tmp_path, config={"a": [step]}
        )
        tracker.log({"rewards/margin": 0.25 * step, "loss": float("nan")}, step=step)
        tracker.finish()
    run_id = (tmp_path / "mlflow_id").read_text().strip()
    history = mlflow.MlflowClient().get_metric_history(run_id, "rewards/margin")
    assert [(each.step, each.value) for each in history] == [(1, 0.25), (2, 0.5)]
