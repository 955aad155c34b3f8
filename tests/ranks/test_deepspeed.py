"""The learner on DeepSpeed takes the steps of one process of plain torch, under every stage and for every objective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from open_instruct.toys.synthetic import write_synthetic_preferences
from open_instruct.toys.tiny import write_tiny_model
from tests.ranks.launch import RanksFailed, run_ranks
from tests.ranks.test_kto import write_labelled
from tests.ranks.test_prm import write_solutions
from tests.ranks.test_reward_model import write_pairs
from tests.ranks.test_sft import write_conversations
from tests.ranks.train_case import NUM_ROWS, TrainCase, free_ports

JOBS = "tests.ranks.jobs.deepspeed_runs"
RESUMES: dict[str, Any] = {"lr_scheduler_type": "constant", "checkpointing_steps": 2, "async_checkpoints": "on"}


def of_stage(stage: int, **flags: Any) -> dict[str, Any]:
    return {"backend": "deepspeed", "deepspeed_stage": stage} | flags


def run(
    case: TrainCase, commands: list[tuple[str, dict[str, Any]]], *, ranks: int, job: str = "run", context: int = 1
) -> list[Any]:
    """Runs with a name and flags each, one after the other in the same ranks, of two microbatches a step."""
    readers = ranks // context  # of different rows
    words = [case.command(name, ranks=readers, batch=4 // readers, **flags) for name, flags in commands]
    entries = {"entries": ["dpo"] * len(words)} if job == "run" else {}
    ports = free_ports(len(words))
    return run_ranks(ranks, f"{JOBS}:{job}", timeout_s=60 + 40 * len(words), commands=words, ports=ports, **entries)


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
    own = {"loss_type": "dpo", "weight_decay": 0.1}
    case = TrainCase(model=model, rows=folder / "rows.jsonl", folder=folder, own_flags=own)
    run(case, [("base", {"prefix_sharing": "off"})], ranks=1)
    return case


def test_every_stage_takes_the_same_steps(dpo: TrainCase) -> None:
    """Also where an update that has nothing to learn from came between, and ranks run the head unequally often."""
    run(dpo, [(f"stage_{stage}", of_stage(stage)) for stage in range(4)], ranks=2, job="run_with_idle_update")
    for stage in range(4):
        assert_same(dpo, f"stage_{stage}")
        assert all(0.1 < row["shared_fraction"] < 1 for row in dpo.metrics(f"stage_{stage}"))


def test_host_memory_and_second_copies_change_nothing(dpo: TrainCase) -> None:
    in_host_memory = {"adam_offload": True, "offload": True, "activation_checkpointing": "full"}
    commands = [
        ("optimizer_in_host_memory", of_stage(1, adam_offload=True)),
        ("all_of_it", of_stage(3, deepspeed_zpg=2, **in_host_memory)),
    ]
    run(dpo, commands, ranks=4)
    for name, _ in commands:
        assert_same(dpo, name)


def test_rows_may_be_split_over_ranks(dpo: TrainCase) -> None:
    """Of which DeepSpeed knows nothing. A wrong scale would show in the norm alone, the first loss agrees anyway."""
    commands = [(f"split_{stage}", of_stage(stage, sequence_parallel_size=2)) for stage in (0, 2, 3)]
    run(dpo, commands, ranks=4, context=2)
    for name, _ in commands:
        assert_same(dpo, name)


def test_bfloat16_trains_float32_weights_as_the_other_backend_does(dpo: TrainCase) -> None:
    commands = [("fsdp", {}), *((f"bfloat16_{stage}", of_stage(stage)) for stage in (1, 3))]
    run(dpo, [(name, {"param_dtype": "bfloat16"} | flags) for name, flags in commands], ranks=2)
    for stage in (1, 3):
        assert_same(dpo, f"bfloat16_{stage}", "fsdp", rel=1e-2)


def test_every_objective_takes_the_same_steps(tmp_path: Path) -> None:
    """Under stage 3, and one with a frozen teacher beside it; of all families, one of them with tied embeddings."""
    cases = {
        entry: objective_case(tmp_path / entry, entry, family=family)
        for entry, family in (
            *(("sft", "qwen3"), ("kto", "olmo2"), ("reward_model", "llama"), ("prm", "olmo3"), ("distill", "olmo2")),
        )
    }
    for name, ranks, flags in (("base", 1, {}), ("stage_3", 2, of_stage(3))):
        words = [case.command(name, ranks=ranks, batch=4 // ranks, **flags) for case in cases.values()]
        ports = free_ports(len(words))
        run_ranks(ranks, f"{JOBS}:run", timeout_s=300, entries=list(cases), commands=words, ports=ports)
    for case in cases.values():
        assert_same(case, "stage_3")


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
    commands = [(f"broken_{stage}", of_stage(stage)) for stage in (0, 2, 3)]
    commands.append(("broken_in_bfloat16", of_stage(1, param_dtype="bfloat16")))
    for of_rank in run(dpo, commands, ranks=2, job="break_gradients"):
        for told, is_unharmed in of_rank:
            assert "the norm of the gradient is" in told and "at step 2, which was not taken" in told
            assert is_unharmed


def test_a_stopped_run_resumes_bitwise_and_elsewhere(dpo: TrainCase) -> None:
    """The same ranks and stage: bitwise. From four ranks under stage 2 to two under stage 3: the same steps."""
    stopped = RESUMES | {"max_train_steps": 2}
    run(dpo, [("moved", of_stage(2, **stopped))], ranks=4)
    commands = [("moved", of_stage(3, **RESUMES))]
    for stage in (0, 2, 3):
        commands.append((f"whole_{stage}", of_stage(stage, **RESUMES)))
        commands += [(f"resumed_{stage}", of_stage(stage, **flags)) for flags in (stopped, RESUMES)]
    run(dpo, commands, ranks=2)
    for stage in (0, 2, 3):
        assert dpo.trajectory(f"resumed_{stage}") == dpo.trajectory(f"whole_{stage}")
        assert dpo.weights_digest(f"resumed_{stage}") == dpo.weights_digest(f"whole_{stage}")
    assert_same(dpo, "moved", "whole_2")
    index = json.loads((dpo.folder / "whole_3" / "step4" / "index.json").read_text())
    assert {name.split(".")[0] for name in index["tensors"]} == {"zero"}


def test_checkpoints_of_the_other_backend_are_refused(dpo: TrainCase) -> None:
    once = RESUMES | {"max_train_steps": 2}
    run(dpo, [("of_deepspeed", of_stage(1, **once)), ("of_olmo_core", once)], ranks=1)
    for name, flags, theirs in (("of_deepspeed", {}, "deepspeed"), ("of_olmo_core", of_stage(1), "olmo_core")):
        with pytest.raises(RanksFailed, match=f"--backend was {theirs}, is "):
            run(dpo, [(name, RESUMES | flags)], ranks=1)
        (dpo.folder / name / "config.yaml").unlink()  # without it only the checkpoint tells
        with pytest.raises(RanksFailed, match=f"are of --backend {theirs}, and .* the hf_model such a run ends with"):
            run(dpo, [(name, RESUMES | flags)], ranks=1)
