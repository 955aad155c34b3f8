"""The one table of metrics: it knows every number that our runs write, and lets users' own be."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from open_instruct.core.metrics import metric_entry, metric_table, sort_metrics
from open_instruct.report.charts import build_series
from open_instruct.run.metrics_log import describe_step
from tests.docs.pages import REPOSITORY

FAMILIES = "rewards|logps|time|rho|logprob_diff|staleness|sequence_length|tokens_per_second|verifier|eval|loss|slowest_\\w+"
NAME = re.compile(
    rf"(?:{FAMILIES}|learners|loaders|engines|allocation_retries)/[\w@]+(?:/\w+)?|(?:num|peak|grad)_\w+"
)
ROOMS = ("objectives", "losses", "training", "rl", "run")
# Of the same form, and no metrics.
OTHERS = re.compile(
    r"verifier/NAME|rewards/square|learners/\d.*|loss/function|num_(?!tokens|ver|rej|tra|gen).*|grad_(?!norm$).*|peak_(?!m|r).*"
)


def numbers_of_runs(value: Any) -> Iterator[str]:
    """The names in every row of metrics that is in a recorded file."""
    if isinstance(value, dict):
        if "grad_norm" in value:
            yield from value.keys() - {"step"}
        for inner in value.values():
            yield from numbers_of_runs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers_of_runs(inner)


def names_in_sources() -> Iterator[str]:
    for room in ROOMS:
        for path in (REPOSITORY / "open_instruct" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def names_in_docs() -> Iterator[str]:
    for path in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]:
        yield from re.findall(r"`([\w/@]+)`", path.read_text(encoding="utf-8"))


def known(names: Iterator[str]) -> set[str]:
    return {name for name in names if NAME.fullmatch(name) and not OTHERS.fullmatch(name)}


class TestTable:
    def test_metric_table_has_metrics_of_recorded_runs(self) -> None:
        runs = json.loads(
            (REPOSITORY / "tests" / "ranks" / "recorded_runs.json").read_text(encoding="utf-8")
        )
        names = set(numbers_of_runs(runs))
        assert {"rewards/margin", "clip_fraction", "lr"} <= names
        assert [name for name in names if not metric_entry(name).meaning] == []

    @pytest.mark.parametrize("names", [names_in_sources, names_in_docs])
    def test_metric_table_has_metrics_of_sources_and_docs(self, names: Any) -> None:
        found = known(names())
        assert {
            "rewards/chosen",
            "eval/preference_accuracy",
            "sequence_length/mean",
            "time/sync",
        } & found
        assert sorted(name for name in found if not metric_entry(name).meaning) == []

    def test_every_line_of_it_is_reached_and_read(self) -> None:
        for entry in metric_table():
            assert metric_entry(entry.name.replace("*", "x")) is entry
            assert (
                entry.meaning
                and entry.meaning == entry.meaning.strip(" .")
                and "|" not in entry.meaning
            )

    def test_held_out_rows_have_the_names_of_the_steps(self) -> None:
        assert metric_entry("eval/rewards/margin") is metric_entry("rewards/margin")
        assert metric_entry("eval/reward") is not metric_entry("reward")

    def test_rates_and_counts_are_exact(self) -> None:
        assert all(
            metric_entry(name).exact
            for name in ("lr", "num_tokens", "allocation_retries/max", "num_mine")
        )
        assert not metric_entry("loss").exact and not metric_entry("mine").exact


class TestOrder:
    def test_reward_comes_before_what_explains_it(self) -> None:
        names = [
            "mine/b",
            "clip_fraction",
            "a_mine",
            "lr",
            "loss",
            "reward",
            "time/step",
            "sequence_length/mean",
        ]
        assert sort_metrics(names) == [
            *("reward", "loss", "sequence_length/mean", "clip_fraction", "lr", "time/step"),
            *("a_mine", "mine/b"),
        ]

    def test_number_of_ones_own_is_drawn_without_a_meaning(self) -> None:
        rows = [{"step": step, "mine/b": step, "loss": 1.0 / step} for step in (1, 2)]
        assert list(build_series(rows)["columns"]) == ["loss", "mine/b"]
        assert (metric_entry("mine/b").group, metric_entry("mine/b").meaning) == ("Others", "")

    def test_steps_line_has_the_followed_ones_in_its_order(self) -> None:
        row = {
            "tokens_per_second": 1234.0,
            "rewards/accuracy": 0.5,
            "loss": 0.25,
            "rewards/margin": 0.125,
            "lr": 1.0,
        }
        assert describe_step(row) == "loss 0.2500  margin +0.1250  accuracy 0.50  1,234 tok/s"
        assert "accuracy" not in describe_step(row | {"rewards/margin": 0})  # all are ties


def test_file_has_a_line_for_each() -> None:
    text = (Path(REPOSITORY) / "open_instruct" / "core" / "metrics.json").read_text(
        encoding="utf-8"
    )
    assert len(text.splitlines()) == len(metric_table()) + 2 + 2 * len(json.loads(text))
