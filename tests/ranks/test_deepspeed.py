"""The learner on DeepSpeed takes the steps of one process of plain torch, under every stage and for every objective."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from open_instruct.toys.synthetic import write_synthetic_preferences
from open_instruct.toys.tiny import write_tiny_model
from tests.ranks.launch import run_ranks
from tests.ranks.test_kto import write_labelled
from tests.ranks.test_prm import write_solutions
from tests.ranks.test_reward_model import write_pairs
from tests.ranks.test_sft import write_conversations
from tests.ranks.train_case import NUM_ROWS, TrainCase, free_ports

JOB = "tests.ranks.jobs.deepspeed_runs:run"
SAVES: dict[str, Any] = {"checkpointing_steps": 2, "async_checkpoints": "on"}
MOVES: dict[str, Any] = {"ref_policy_update_freq": 2, "alpha": 0.5}
BFLOAT16: dict[str, Any] = {"param_dtype": "bfloat16"}


def of_stage(stage: int, **flags: Any) -> dict[str, Any]:
    """Blocks are recomputed where that is asked for: it takes a third more time, and is the default of the command."""
    return {"backend": "deepspeed", "deepspeed_stage": stage, "activation_checkpointing": "none"} | flags


def run(runs: list[dict[str, Any]], *, ranks: int) -> list[Any]:
    """Runs of `a_run`, one after the other in the same ranks. Returns what each rank was told of each."""
    return run_ranks(ranks, JOB, timeout_s=60 + 40 * len(runs), runs=runs, ports=free_ports(len(runs)))


def a_run(case: TrainCase, name: str, flags: dict[str, Any], *, readers: int, **settings: Any) -> dict[str, Any]:
    """Of two microbatches a step, where `readers` ranks have different rows."""
    return {"command": case.command(name, ranks=readers, batch=4 // readers, **flags), **settings}


def assert_same(case: TrainCase, name: str, other: str = "base", rel: float = 1e-5) -> None:
    ours, theirs = case.trajectory(name), case.trajectory(other)
    assert len(ours) == len(theirs) == 5
    for step, (one, two) in enumerate(zip(ours, theirs, strict=True), start=1):
        assert one == pytest.approx(two, rel=rel), f"{name} differs from {other} at step {step}"


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    """Weight decay makes two groups of the parameters."""
    folder = tmp_path_factory.mktemp("dpo")
    model = write_tiny_model(folder / "model", family="olmo2", size="tiny")
    write_synthetic_preferences(folder / "rows.jsonl", num_rows=NUM_ROWS, seed=1)
    own = {"loss_type": "dpo", "weight_decay": 0.1, "lr_scheduler_type": "constant"}
    case = TrainCase(model=model, rows=folder / "rows.jsonl", folder=folder, own_flags=own)
    runs = {"base": {}, "moving_base": MOVES}
    run([a_run(case, name, {"prefix_sharing": "off"} | flags, readers=1) for name, flags in runs.items()], ranks=1)
    return case


STEPPED_BY = {"FusedAdam": of_stage(3), "CPUAdam": of_stage(2, adam_offload=True)}


@pytest.fixture(scope="module")
def on_two(dpo: TrainCase) -> TrainCase:
    runs = [a_run(dpo, f"{s}", of_stage(s, **SAVES), readers=2, persists=True, does="idle") for s in range(4)]
    bfloat16 = {"fsdp": SAVES, "bfloat16_1": of_stage(1), "bfloat16_3": of_stage(3)}
    runs += [a_run(dpo, name, BFLOAT16 | flags, readers=2) for name, flags in bfloat16.items()]
    runs += [a_run(dpo, "bfloat16_split", of_stage(2, tensor_parallel_degree=2, **BFLOAT16), readers=1)]
    runs += [a_run(dpo, f"moving_{stage}", of_stage(stage, **MOVES, **SAVES), readers=2) for stage in (0, 1, 3)]
    runs += [a_run(dpo, by, STEPPED_BY[by], readers=2, adam=by) for by in STEPPED_BY]
    assert run(runs, ranks=2) == [[None] * len(runs)] * 2
    return dpo


@pytest.fixture(scope="module")
def on_four(dpo: TrainCase) -> TrainCase:
    in_host_memory = {"adam_offload": True, "offload": True, "activation_checkpointing": "auto"}
    runs = [
        a_run(dpo, "optimizer_in_host_memory", of_stage(1, adam_offload=True, **SAVES), readers=4),
        a_run(dpo, "all_in_host_memory", of_stage(3, deepspeed_zpg=2, **in_host_memory), readers=4),
        *(a_run(dpo, f"rows_{stage}", of_stage(stage, sequence_parallel_size=2), readers=2) for stage in (0, 2, 3)),
        a_run(dpo, "matrices_1", of_stage(1, tensor_parallel_degree=2), readers=2),
        a_run(dpo, "matrices_3", of_stage(3, tensor_parallel_degree=2, **MOVES, **SAVES), readers=2),
    ]
    assert run(runs, ranks=4) == [[None] * len(runs)] * 4
    return dpo


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_takes_the_same_steps(on_two: TrainCase, stage: int) -> None:
    """Also where an update that has nothing to learn from came between, and ranks run the head unequally often."""
    assert_same(on_two, f"{stage}")
    assert all(0.1 < row["shared_fraction"] < 1 for row in on_two.metrics(f"{stage}"))


@pytest.mark.parametrize("name", ["optimizer_in_host_memory", "all_in_host_memory"])
def test_host_memory_and_second_copies_change_nothing(on_four: TrainCase, name: str) -> None:
    assert_same(on_four, name)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_rows_may_be_split_over_ranks(on_four: TrainCase, stage: int) -> None:
    """Of which DeepSpeed knows nothing. A wrong scale would show in the norm alone, the first loss agrees anyway."""
    assert_same(on_four, f"rows_{stage}")


@pytest.mark.parametrize(("name", "base"), [("matrices_1", "base"), ("matrices_3", "moving_base")])
def test_matrices_may_be_split_over_ranks(on_four: TrainCase, name: str, base: str) -> None:
    """Of a model that normalises over all heads, of which a rank has some; one with a reference that moves."""
    assert_same(on_four, name, base)
    ours, theirs = (tensors_of(on_four.folder / each / "hf_model") for each in (name, base))
    assert ours.keys() == theirs.keys()
    for tensor, values in ours.items():
        assert np.abs(values - theirs[tensor]).max() < 5e-5, tensor


def tensors_of(folder: Path) -> dict[str, Any]:
    return {name: values for file in folder.glob("*.safetensors") for name, values in load_file(file).items()}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_reference_may_follow_the_policy(on_two: TrainCase, stage: int) -> None:
    assert_same(on_two, f"moving_{stage}", "moving_base")
    assert on_two.trajectory("moving_base")[2] != on_two.trajectory("base")[2]


def test_bfloat16_trains_float32_weights_as_the_other_backend_does(on_two: TrainCase) -> None:
    for name in ("1", "3", "split"):
        assert_same(on_two, f"bfloat16_{name}", "fsdp", rel=1e-2)


@pytest.mark.parametrize("name", [*STEPPED_BY])
def test_whose_adam_it_is_changes_no_step(on_two: TrainCase, name: str) -> None:
    assert_same(on_two, name)


def test_every_objective_takes_the_same_steps(tmp_path: Path) -> None:
    """Under stage 3, and one with a frozen teacher beside it; of all families, one of them with tied embeddings.

    Where a head of a whole vocabulary is learned, also with matrices split over both ranks.
    """
    cases = {
        entry: objective_case(tmp_path / entry, entry, family=family)
        for entry, family in (
            *(("sft", "qwen3"), ("kto", "olmo2"), ("reward_model", "llama"), ("prm", "olmo3"), ("distill", "olmo2")),
        )
    }
    split = of_stage(2, tensor_parallel_degree=2)
    run([a_run(case, "base", {}, readers=1, entry=entry) for entry, case in cases.items()], ranks=1)
    runs = [
        a_run(case, "stage_3", of_stage(3, activation_checkpointing="auto"), readers=2, entry=entry)
        for entry, case in cases.items()
    ]
    runs += [a_run(cases[entry], "split", split, readers=1, entry=entry) for entry in ("sft", "kto")]
    assert run(runs, ranks=2) == [[None] * len(runs)] * 2
    for case in cases.values():
        assert_same(case, "stage_3")
    for entry in ("sft", "kto"):
        assert_same(cases[entry], "split")


def objective_case(folder: Path, entry: str, *, family: str) -> TrainCase:
    rows, own = folder / "rows.jsonl", dict[str, Any]()
    model = write_tiny_model(folder / "model", family=family, size="tiny", tie=entry == "sft")
    if entry == "kto":
        write_synthetic_preferences(folder / "pairs.jsonl", num_rows=NUM_ROWS, seed=1)
        write_labelled(folder / "pairs.jsonl", rows)
    elif entry == "reward_model":
        write_pairs(rows, num_rows=NUM_ROWS, seed=1)
        own["max_seq_length"] = 448
    elif entry == "prm":
        write_solutions(rows, num_rows=NUM_ROWS, seed=1)
    else:
        write_conversations(rows, num_rows=NUM_ROWS, seed=1)
    if entry == "distill":
        own["teacher_model_name_or_path"] = write_tiny_model(folder / "teacher", family=family, size="tiny", seed=1)
    return TrainCase(model=model, rows=rows, folder=folder, own_flags=own)


def test_a_broken_gradient_is_no_step(dpo: TrainCase) -> None:
    stages = {f"broken_{stage}": of_stage(stage) for stage in (0, 2, 3)}
    stages["broken_in_bfloat16"] = of_stage(1, **BFLOAT16)
    runs = [a_run(dpo, name, flags, readers=2, does="break") for name, flags in stages.items()]
    for of_rank in run(runs, ranks=2):
        for told, is_unharmed in of_rank:
            assert "the norm of the gradient is" in told and "at step 2, which was not taken" in told
            assert is_unharmed


def stopped_after(case: TrainCase, name: str, stopped: str, *, step: int = 2) -> None:
    """`stopped` is the run `name` as it would be, had it ended with the checkpoint of `step`."""
    shutil.copytree(case.folder / name, case.folder / stopped, ignore=shutil.ignore_patterns("step*", "hf_model"))
    shutil.copytree(case.folder / name / f"step{step}", case.folder / stopped / f"step{step}")


def test_a_stopped_run_resumes_bitwise_and_elsewhere(on_two: TrainCase, on_four: TrainCase) -> None:
    """The same ranks and stage: bitwise. From four ranks to two under another stage: the same steps."""
    same = {"0": of_stage(0), "2": of_stage(2), "3": of_stage(3), "moving_3": of_stage(3, **MOVES)}
    elsewhere = {
        "optimizer_in_host_memory": (of_stage(3), "base"),
        "matrices_3": (of_stage(2, tensor_parallel_degree=2, **MOVES), "moving_base"),
    }
    runs = []
    for name, flags in (same | {name: flags for name, (flags, _) in elsewhere.items()}).items():
        stopped_after(on_two, name, f"{name}_resumed")
        readers = 2 // flags.get("tensor_parallel_degree", 1)
        as_before: dict[str, Any] = {"persists": True, "does": "idle"} if name in "023" else {}
        runs.append(a_run(on_two, f"{name}_resumed", SAVES | flags, readers=readers, **as_before))
    assert run(runs, ranks=2) == [[None] * len(runs)] * 2
    for name in same:
        assert on_two.trajectory(f"{name}_resumed") == on_two.trajectory(name)
        assert on_two.weights_digest(f"{name}_resumed") == on_two.weights_digest(name)
    for name, (_, base) in elsewhere.items():
        assert_same(on_two, f"{name}_resumed", base)
    index = json.loads((on_two.folder / "3" / "step4" / "index.json").read_text())
    assert {name.split(".")[0] for name in index["tensors"]} == {"zero"}


def test_checkpoints_of_another_kind_are_refused(on_two: TrainCase, on_four: TrainCase) -> None:
    """Those of the other backend, and where ranks split matrices otherwise: the way over is an export."""
    of_config = {"1": (SAVES, "--backend was deepspeed, is"), "fsdp": (of_stage(1, **SAVES), "--backend was olmo_core")}
    told = {
        "1": (SAVES, "are of --backend deepspeed, and"),
        "fsdp": (of_stage(1, **SAVES), "are of --backend olmo_core, and"),
        "matrices_3": (of_stage(3, **MOVES, **SAVES), "are of another --tensor_parallel_degree than 1: give theirs"),
    }
    runs, expected = [], []
    for kind, refusals in (("config", of_config), ("checkpoint", told)):
        for name, (flags, words) in refusals.items():
            stopped_after(on_two, name, f"{name}_of_{kind}")
            if kind == "checkpoint":
                (on_two.folder / f"{name}_of_{kind}" / "config.yaml").unlink()  # without it only the checkpoint tells
            dtype = BFLOAT16 if name == "fsdp" else {}
            runs.append(a_run(on_two, f"{name}_of_{kind}", dtype | flags, readers=1))
            expected.append(words)
    (of_rank,) = run(runs, ranks=1)
    for (said, _), words in zip(of_rank, expected, strict=True):
        assert words in said
    assert all("the hf_model such a run ends with" in said for said, _ in of_rank[len(of_config) :])
