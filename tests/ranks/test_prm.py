"""Process reward models: no cut of a batch changes one, a stopped run goes on, transformers opens what comes out."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.ranks.objective_case import (
    assert_opens_whole,
    assert_resumed_bitwise,
    assert_same,
    read,
    stopped_and_not,
    train,
    write,
)
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import NUM_ROWS, OF_EVERY_RUN, STEPS_OF_AN_EPOCH, TrainCase


def write_solutions(path: Path, *, num_rows: int, seed: int) -> None:
    """Sums step by step; from the first wrong one on all are. Some labels are soft."""
    draw, rows = random.Random(seed), []
    for _ in range(num_rows):
        total, wrong_from, numbers = 0, draw.randint(1, 6), [draw.randint(1, 9) for _ in range(draw.randint(2, 6))]
        steps, labels = [], list[Any]()
        for number, summand in enumerate(numbers):
            right = number < wrong_from
            steps.append(f"{total} + {summand} = {total + summand + (0 if right else 1)}")
            labels.append(draw.choice([right, 0.9 if right else 0.2]))
            total += summand
        rows.append({"prompt": f"{' + '.join(map(str, numbers))}?\n", "completions": steps, "labels": labels})
    write(path, rows)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    folder = tmp_path_factory.mktemp("prm")
    write_solutions(folder / "rows.jsonl", num_rows=NUM_ROWS, seed=1)
    write_solutions(folder / "held_out.jsonl", num_rows=12, seed=2)
    model = write_shallow_model(folder / "model", family="qwen3", tie=True)
    own = {"eval_mixer_list": [folder / "held_out.jsonl", "1.0"], "max_train_steps": STEPS_OF_AN_EPOCH}
    return TrainCase(model=model, rows=folder / "rows.jsonl", folder=folder, own_flags=own)


@pytest.fixture(scope="module")
def one_process(case: TrainCase) -> TrainCase:
    train(
        "prm",
        1,
        case.command("base"),
        case.command("padded", packing=False, batch=2),
        *stopped_and_not(case),
        case.command("whole_data", max_train_steps=1, per_device_train_batch_size=NUM_ROWS, learning_rate=1e-9),
    )
    return case


def assert_same_as_base(case: TrainCase, *names: str) -> None:
    for name in names:
        assert_same(case, name, "base", ("loss", "accuracy"), num_steps=STEPS_OF_AN_EPOCH)


def test_cutting_does_not_matter(one_process: TrainCase) -> None:
    assert_same_as_base(one_process, "padded")


def test_ranks_do_not_matter(one_process: TrainCase) -> None:
    context = {"context_parallel_degree": 2, "batch": 4}
    train("prm", 2, one_process.command("fsdp_2", ranks=2), one_process.command("context_2", **context))
    train("prm", 4, one_process.command("hsdp_2x2", ranks=4, fsdp_shard_degree=2, batch=1))
    assert_same_as_base(one_process, "fsdp_2", "context_2", "hsdp_2x2")


def test_a_stopped_run_resumes_bitwise(one_process: TrainCase) -> None:
    assert_resumed_bitwise(one_process)


def test_the_loss_is_that_of_transformers_where_the_steps_end(one_process: TrainCase) -> None:
    tokenizer = AutoTokenizer.from_pretrained(one_process.model)
    model = AutoModelForCausalLM.from_pretrained(one_process.model, dtype=torch.float32)
    words = tokenizer.convert_tokens_to_ids(["+", "-"])
    losses = []
    for row in read(one_process.rows):
        ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        for step, label in zip(row["completions"], row["labels"], strict=True):
            ids += tokenizer(step + "\n", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                right, wrong = model(torch.tensor([ids])).logits[0, -1, words].double().softmax(0).log().tolist()
            losses.append(-(label * right + (1 - label) * wrong))
    (first,) = one_process.metrics("whole_data")
    assert first["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_metrics_have_the_names_scripts_read_and_transformers_opens_the_model(one_process: TrainCase) -> None:
    assert all(set(row) == OF_EVERY_RUN | {"accuracy"} for row in one_process.metrics("base"))
    assert_opens_whole(one_process.folder / "base")
    config = json.loads((one_process.folder / "base" / "hf_model" / "config.json").read_text())
    assert (config["prm_step_end"], config["prm_reward_tokens"]) == ("\n", ["+", "-"])
