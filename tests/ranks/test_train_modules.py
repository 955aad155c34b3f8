"""Our train modules in OLMo-core's own Trainer: the scripts of examples/olmo_core, beside our loop.

Four ranks are two pretended nodes, so the model is sharded over two and there are two replicas.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from open_instruct.commands import convert
from open_instruct.models.heads.value_head import draw_score_matrix
from tests.ranks.grpo_case import GRPOCase
from tests.ranks.jobs.grpo_steps import make_samples
from tests.ranks.jobs.train_modules import EVALUATED_IDS
from tests.ranks.launch import run_ranks
from tests.ranks.objective_rows import write_objective_case
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_olmo_core import logits_of_stock
from tests.ranks.train_case import ROWS_PER_STEP, TrainCase, free_ports

FAMILIES = {"prm": "qwen3"}  # transformers has a class of it with a new head
EXAMPLES_JOB = "tests.ranks.jobs.train_modules:run_each"
HOME_JOB = "tests.ranks.jobs.train_modules:train_at_home"
NUM_STEPS = 5
STOP_AFTER = 3
TOLERANCE = 1e-6
# Of the scripts, in the words of our flags.
OWN_FLAGS: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0.4,
    "max_train_steps": NUM_STEPS,
    "max_seq_length": 192,
}
GRPO_FLAGS: dict[str, Any] = {
    "loss_fn": "dapo",
    "beta": 0.05,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0.4,
}

Rows = list[dict[str, float]]


def run_examples(num_ranks: int, cases: list[dict[str, Any]]) -> list[Rows]:
    """What rank 0 notes of each; the others are told of no metrics."""
    results = run_ranks(
        num_ranks,
        EXAMPLES_JOB,
        num_nodes=max(1, num_ranks // 2),
        cases=cases,
        ports=free_ports(len(cases)),
    )
    rows: list[Rows] = results[0]
    return rows


def run_own_loop(entry: str, case: TrainCase, num_ranks: int) -> Rows:
    flags = OWN_FLAGS | ({"loss_type": "dpo"} if entry == "dpo" else {})
    name = f"own_{num_ranks}"
    run_ranks(
        num_ranks,
        "tests.ranks.jobs.train_runs:run_each",
        num_nodes=max(1, num_ranks // 2),
        commands=[case.command(name, ranks=num_ranks, batch=2, **flags)],
        ports=free_ports(1),
        entry=entry,
    )
    return case.metrics(name)


def assert_same_steps(rows: Rows, expected_rows: Rows) -> None:
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for row, expected in zip(rows, expected_rows, strict=True):
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=TOLERANCE), name
    losses = [row["loss"] for row in rows]
    assert len(set(losses)) == NUM_STEPS, "something is learned"


@pytest.mark.parametrize(
    ("num_ranks", "entries"),
    [
        pytest.param(1, ["kto"], marks=pytest.mark.slow),
        pytest.param(1, ["sft", "reward_model", "prm"], marks=pytest.mark.extended),
        pytest.param(4, ["sft", "kto", "reward_model", "prm"], marks=pytest.mark.extended),
    ],
    ids=["kto-1", "others-1", "all-4"],
)
def test_trainer_has_the_losses_of_our_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, entries: list[str]
) -> None:
    monkeypatch.setenv("OPEN_INSTRUCT_CACHE", str(tmp_path / "cache"))
    cases = {
        entry: write_objective_case(tmp_path / entry, entry, family=FAMILIES.get(entry, "olmo2"))
        for entry in entries
    }
    runs = [
        {"name": entry, "arguments": [str(case.model), str(case.rows), str(case.folder / "theirs")]}
        for entry, case in cases.items()
    ]
    for entry, rows in zip(entries, run_examples(num_ranks, runs), strict=True):
        assert_same_steps(rows, run_own_loop(entry, cases[entry], num_ranks))


@pytest.mark.slow
def test_run_that_was_stopped_and_resumed_has_the_losses_of_our_loop_on_two_by_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPEN_INSTRUCT_CACHE", str(tmp_path / "cache"))
    case = write_objective_case(tmp_path / "dpo", "dpo", family="olmo2")

    def make_run(folder: str, **more: Any) -> dict[str, Any]:
        arguments = [str(case.model), str(case.rows), str(case.folder / folder)]
        return {"name": "dpo", "arguments": arguments, **more}

    whole, stopped, resumed = run_examples(
        4, [make_run("whole"), make_run("halves", stop_after=STOP_AFTER), make_run("halves")]
    )
    assert len(stopped) == STOP_AFTER
    assert stopped + resumed == whole
    assert_same_steps(whole, run_own_loop("dpo", case, 4))


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.extended)],
)
def test_trainer_has_the_losses_of_our_grpo_learner(tmp_path: Path, num_ranks: int) -> None:
    case = GRPOCase(tmp_path)
    vocab_size = json.loads((case.model / "config.json").read_text())["vocab_size"]
    lines = []
    for step in range(NUM_STEPS):
        for sample in make_samples(ROWS_PER_STEP, seed=step, vocab_size=vocab_size):
            ids, start = sample.document.token_ids, sample.document.responses[0].start
            row = {
                "prompt_ids": ids[:start],
                "completion_ids": ids[start:],
                "logprobs": sample.engine_logprobs,
                "advantage": sample.advantage,
            }
            lines.append(json.dumps(row) + "\n")
    completions = tmp_path / "completions.jsonl"
    completions.write_text("".join(lines))
    arguments = [str(case.model), str(completions), str(tmp_path / "theirs")]
    halves = [*arguments[:2], str(tmp_path / "halves")]
    whole, stopped, resumed = run_examples(
        num_ranks,
        [
            {"name": "grpo", "arguments": arguments},
            {"name": "grpo", "arguments": halves, "stop_after": STOP_AFTER},
            {"name": "grpo", "arguments": halves},
        ],
    )
    assert stopped + resumed == whole
    own = case.case("own", completions=[ROWS_PER_STEP] * NUM_STEPS, flags=GRPO_FLAGS)
    results = run_ranks(
        num_ranks,
        "tests.ranks.jobs.grpo_steps:run_each",
        num_nodes=max(1, num_ranks // 2),
        cases=[own],
        ports=free_ports(1),
    )
    assert_same_steps(whole, results[0][0])


def make_home(case: TrainCase, folder: Path) -> dict[str, str]:
    """The arguments of a run from the case's model as a checkpoint of OLMo-core."""
    start = folder / "olmo_core"
    assert convert.main([str(case.model), str(start)]) == 0
    return {
        "folder": str(start),
        "rows": str(case.rows),
        "tokenizer": str(case.model),
        "output_dir": str(folder / "OUT"),
    }


@pytest.mark.extended
@pytest.mark.parametrize(
    "sharding",
    [{"tensor_parallel_degree": 2}, {"context_parallel_degree": 2}, {"is_stock": True}],
    ids=["tensor", "context", "olmo_cores_own_configs"],
)
def test_losses_stay_however_the_model_is_sharded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharding: dict[str, Any]
) -> None:
    monkeypatch.setenv("OPEN_INSTRUCT_CACHE", str(tmp_path / "cache"))
    case = write_objective_case(tmp_path / "sft", "sft", family="olmo2")
    arguments = make_home(case, tmp_path)
    (whole,) = run_ranks(1, HOME_JOB, **arguments, num_epochs=1)
    arguments["output_dir"] = str(tmp_path / "SPLIT")
    split, *_ = run_ranks(4, HOME_JOB, **arguments, num_epochs=1, **sharding)
    for row, expected in zip(split["rows"], whole["rows"], strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.extended
def test_trainer_starts_from_olmo_cores_checkpoint_and_leaves_such_that_are_opened_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPEN_INSTRUCT_CACHE", str(tmp_path / "cache"))
    case = write_objective_case(tmp_path / "sft", "sft", family="olmo2")
    arguments = make_home(case, tmp_path)
    (first,) = run_ranks(1, HOME_JOB, **arguments, num_epochs=1)
    (second,) = run_ranks(1, HOME_JOB, **arguments, num_epochs=2)
    steps = [row["step"] for row in first["rows"] + second["rows"]]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert (first["history"], second["history"]) == (3, 6)
    expected = run_own_loop("sft", case, 1)[0]["loss"]
    assert first["rows"][0]["loss"] == pytest.approx(expected, abs=TOLERANCE)
    assert first["rows"][0]["train/CE loss"] == pytest.approx(expected, abs=TOLERANCE)

    left = tmp_path / "OUT" / "step6"
    ids = torch.tensor(EVALUATED_IDS)
    logits = logits_of_stock(left, ids)[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert second["evaluations"][-1] == pytest.approx(float(loss), abs=1e-5)
    converted = tmp_path / "hf"
    assert convert.main([str(left), str(converted)]) == 0
    for folder in (converted, tmp_path / "OUT" / "hf_model"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.testing.assert_close(model(ids).logits[:, :-1], logits, atol=1e-5, rtol=1e-5)


@pytest.mark.extended
def test_exported_reward_model_is_opened_by_its_class(tmp_path: Path) -> None:
    folder = write_shallow_model(tmp_path / "model", family="qwen3")
    out = tmp_path / "hf_model"
    run_ranks(
        1, "tests.ranks.jobs.train_modules:export_reward_model", folder=str(folder), out=str(out)
    )
    model = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    assert model.config.num_labels == 1
    width = model.config.hidden_size
    drawn = draw_score_matrix(width, seed=7)
    torch.testing.assert_close(model.score.weight, drawn, atol=1e-2, rtol=1e-2)
