"""When a learner or an engine is said to be slow against the others, and when not."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from open_instruct.learner.measure import speed
from open_instruct.learner.measure.speed import LEAST_TOKENS, OwnPace
from open_instruct.parallel.processes import host_of_cores
from open_instruct.run.metrics_log import MetricsLog
from open_instruct.run.slowness import SlownessWatch, slowest, slowest_loader


def told(what: str, token_s: list[float | None], *, before: list[float | None] | None = None) -> list[str]:
    """In the second of two looks."""
    watch = SlownessWatch()
    assert list(watch.after_step(slowest(what, token_s if before is None else before))) == []
    return list(watch.after_step(slowest(what, token_s)))


def test_it_is_named_with_figures_and_what_to_do() -> None:
    (line,) = told("learner", [0.004, 0.004, 0.012, 0.005])
    assert line.startswith(
        "learner-2 takes 3.0 times as long as the other learners for a token (12 ms, their median 4): all others wait"
    )
    assert "nvidia-smi" in line and "leave that node out" in line
    (line,) = told("engine", [0.01, 0.031])
    assert line.startswith("engine-1 takes 3.1 times as long as the other engines for a token (31 ms, their median 10)")


@pytest.mark.parametrize(
    "token_s", [[0.01], [None, 0.01], [None, None], [0.01, 0.014], [0.01, 0.011, 0.009, 0.0145], []]
)
def test_those_that_are_alike_or_unknown_are_not_told_of(token_s: list[float | None]) -> None:
    assert told("learner", token_s) == []


def test_processes_that_share_the_cores_of_a_host_are_not_compared() -> None:
    """Which of them waits for a core is chance; a host may still be slower than another."""
    paces: list[float | None] = [0.001, 0.0041, None, 0.002]
    assert slowest("learner", paces, ["laptop"] * 4) == {}
    row = slowest("learner", [0.01, 0.002, 0.003, 0.007, 0.006], ["a", "a", "a", "b", "b"])
    assert row == {
        "slowest_learner": 4.0,
        "slowest_learner/times": pytest.approx(3.0),
        "learners/token_s": 0.002,
    }
    assert slowest("learner", paces, [None] * 4) == slowest("learner", paces) != {}
    assert host_of_cores("cpu") and host_of_cores("cuda") is None


def test_two_looks_in_a_row_must_find_one() -> None:
    assert told("learner", [0.01, 0.03], before=[0.01, 0.01]) == []
    # The ranks of a slow node take turns as the slowest.
    (line,) = told("learner", [0.01, 0.01, 0.01, 0.031, 0.03], before=[0.01, 0.01, 0.01, 0.03, 0.031])
    assert line.startswith("learner-3 takes 3.1 times")


def test_one_that_waits_for_rows_alone_is_told_of() -> None:
    watch = SlownessWatch()
    # All wait alike: of that the whole run's speed tells.
    assert list(watch.after_step(slowest_loader([0.5, 0.6, 0.55]))) == []
    assert list(watch.after_step(slowest_loader([0.02, 0.01, 0.45]))) == []
    (line,) = watch.after_step(slowest_loader([0.02, 0.01, 0.45]))
    assert line.startswith("learner-2 waits for its own rows for 45% of its time (the others' median is 2%)")
    assert list(watch.after_step(slowest_loader([0.02, 0.01, 0.9]))) == []
    assert slowest_loader([0.9]) == {}


def test_each_is_told_of_once(tmp_path: Path) -> None:
    said: list[str] = []
    log = MetricsLog(tmp_path / "metrics.jsonl", warn=said.append)
    for step in range(1, 41):
        row = slowest("learner", [0.01, 0.03]) if step % 10 == 0 else {}
        log.write({"step": step, "loss": 0.5} | row | (slowest("engine", [0.2, 0.1]) if step in (25, 30) else {}))
    assert [line.split(" takes")[0] for line in said] == ["after step 20 learner-1", "after step 30 engine-0"]
    assert log.rows()[9]["slowest_learner"] == 1.0 and log.rows()[9]["slowest_learner/times"] == pytest.approx(3)


def test_the_pace_of_a_rank_is_that_of_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where hooks before and behind it wait for others."""
    now_s = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    class Head(torch.nn.Module):
        def forward(self, hidden_BTD: torch.Tensor, logits_to_keep: torch.Tensor | None = None) -> torch.Tensor:
            pass_time(0.02)
            return hidden_BTD

    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: now_s))
    head = Head()
    head.register_forward_pre_hook(lambda *_: pass_time(0.1), prepend=True)
    pace = OwnPace(head, torch.device("cpu"))
    head.register_forward_hook(lambda *_: pass_time(0.1))
    assert pace.read() is None
    head(torch.zeros(1, 400, 2))
    assert pace.read() == pytest.approx(0.00005)
    head(torch.zeros(1, 800, 2), logits_to_keep=torch.zeros(1, 400))
    head(torch.zeros(1, LEAST_TOKENS - 1, 2))  # takes as long
    assert pace.read() == pytest.approx(0.00005)
    assert pace.read() is None
    head(torch.zeros(1, LEAST_TOKENS - 1, 2))
    assert pace.read() is None


def test_a_warning_goes_to_the_log_where_nobody_else_listens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        log = MetricsLog(tmp_path / "metrics.jsonl")
        for step in (10, 20):
            log.write({"step": step, "loss": 0.5} | slowest("learner", [0.01, 0.05]))
    assert "after step 20 learner-1 takes 5.0 times" in caplog.text
