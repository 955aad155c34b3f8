"""What the rank tests of objectives share: how runs are started, and what is the same in two of
them.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.ranks.launch import run_ranks
from tests.ranks.train_case import TrainCase, free_ports

JOB = "tests.ranks.jobs.train_runs:run_each"
STEADY: dict[str, Any] = {"lr_scheduler_type": "constant", "checkpointing_steps": 2}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(entry: str, num_ranks: int, *commands: list[str]) -> None:
    run_ranks(num_ranks, JOB, commands=list(commands), ports=free_ports(len(commands)), entry=entry)


def stopped_and_not(case: TrainCase) -> list[list[str]]:
    """A run, and the same one stopped after two steps and resumed."""
    return [
        case.command("undisturbed", **STEADY),
        case.command("resumed", **STEADY | {"max_train_steps": 2}),
        case.command("resumed", **STEADY),
    ]


def assert_resumed_bitwise(case: TrainCase) -> None:
    assert case.trajectory("resumed") == case.trajectory("undisturbed")
    assert case.weights_digest("resumed") == case.weights_digest("undisturbed")


def assert_same(
    case: TrainCase, name: str, base: str, numbers: Iterable[str], *, num_steps: int
) -> None:
    """The numbers of every step, and the held-out ones where there are any."""
    ours, theirs = case.metrics(name), case.metrics(base)
    assert len(ours) == len(theirs) == num_steps
    for row, expected in zip(ours, theirs, strict=True):
        for number in (*numbers, "grad_norm"):
            assert row[number] == pytest.approx(expected[number], rel=1e-5, abs=1e-6), (
                f"{name}: {number}"
            )
    if (case.folder / base / "eval.jsonl").exists():
        held_out = (read(case.folder / run / "eval.jsonl") for run in (name, base))
        for row, expected in zip(*held_out, strict=True):
            assert without_lists(row) == pytest.approx(
                without_lists(expected), rel=1e-4, abs=1e-5
            ), name


def without_lists(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not isinstance(value, list)}


def assert_opens_whole(folder: Path) -> AutoModelForCausalLM:
    """The exported model, as transformers opens it, with all of its tensors and no others."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder / "hf_model", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model
