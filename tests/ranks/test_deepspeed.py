"""The learner on DeepSpeed takes the steps of one process of plain torch, under every stage and for
every objective.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from scripts.demo_data.pairs import write_synthetic_preferences
from tests.ranks.launch import run_ranks
from tests.ranks.objective_rows import write_objective_case
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import NUM_ROWS, STEPS_OF_AN_EPOCH, TrainCase, free_ports

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.deepspeed_runs:run"
SAVES: dict[str, Any] = {"checkpointing_steps": 2, "async_checkpoints": "on"}
MOVES: dict[str, Any] = {"ref_policy_update_freq": 2, "alpha": 0.5}
BFLOAT16: dict[str, Any] = {"param_dtype": "bfloat16"}
# At ten times this rate five steps of FSDP2 are 6e-5 off one process too: a first step of Adam has
# one length for all.
LORA: dict[str, Any] = {"use_lora": True, "lora_r": 8, "lora_alpha": 16, "learning_rate": 2e-4}


def of_stage(stage: int, **flags: Any) -> dict[str, Any]:
    """Blocks are recomputed where that is asked for: it takes a third more time, and is the default
    of the command.
    """
    return {
        "backend": "deepspeed",
        "deepspeed_stage": stage,
        "activation_checkpointing": "none",
    } | flags


def run(runs: list[dict[str, Any]], *, ranks: int) -> list[Any]:
    """Runs of `a_run`, one after the other in the same ranks.

    Returns what each rank was told of each.
    """
    return run_ranks(ranks, JOB, runs=runs, ports=free_ports(len(runs)))


def a_run(
    case: TrainCase, name: str, flags: dict[str, Any], *, readers: int, **settings: Any
) -> dict[str, Any]:
    """Of two microbatches a step, where `readers` ranks have different rows."""
    return {"command": case.command(name, ranks=readers, batch=4 // readers, **flags), **settings}


def assert_same(case: TrainCase, name: str, other: str = "base", rel: float = 1e-5) -> None:
    ours, theirs = case.trajectory(name), case.trajectory(other)
    assert len(ours) == len(theirs) == STEPS_OF_AN_EPOCH
    for step, (one, two) in enumerate(zip(ours, theirs, strict=True), start=1):
        assert one == pytest.approx(two, rel=rel), f"{name} differs from {other} at step {step}"


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    """Weight decay makes two groups of the parameters."""
    folder = tmp_path_factory.mktemp("dpo")
    model = write_shallow_model(folder / "model", family="olmo2")
    write_synthetic_preferences(folder / "rows.jsonl", num_rows=NUM_ROWS, seed=1)
    own = {"loss_type": "dpo", "weight_decay": 0.1, "lr_scheduler_type": "constant"}
    own["max_train_steps"] = STEPS_OF_AN_EPOCH
    case = TrainCase(model=model, rows=folder / "rows.jsonl", folder=folder, own_flags=own)
    runs = {"base": held_out_rows(case), "moving_base": MOVES, "adapters_base": LORA}
    run(
        [
            a_run(case, name, {"prefix_sharing": "off"} | flags, readers=1)
            for name, flags in runs.items()
        ],
        ranks=1,
    )
    return case


def held_out_rows(case: TrainCase) -> dict[str, Any]:
    return {"eval_mixer_list": [case.rows, "3"], "eval_steps": 2}


DROPOUT = LORA | {"lora_dropout": 0.1, "activation_checkpointing": "full"}
STEPPED_BY = {"moving_1": "CPUAdam", "adapters_3": "FusedAdam"}


@pytest.fixture(scope="module")
def on_two(dpo: TrainCase) -> TrainCase:
    saves = SAVES | held_out_rows(dpo)
    runs = [
        a_run(dpo, f"{s}", of_stage(s, **saves), readers=2, persists=True, does="idle")
        for s in range(4)
    ]
    bfloat16 = {"fsdp": SAVES, "bfloat16_1": of_stage(1), "bfloat16_3": of_stage(3)}
    runs += [a_run(dpo, name, BFLOAT16 | flags, readers=2) for name, flags in bfloat16.items()]
    runs += [
        a_run(dpo, "bfloat16_split", of_stage(2, tensor_parallel_degree=2, **BFLOAT16), readers=1)
    ]
    moving = {0: {}, 1: {"adam_offload": True}, 3: SAVES}
    more = {f"moving_{stage}": of_stage(stage, **MOVES, **flags) for stage, flags in moving.items()}
    more |= {f"adapters_{stage}": of_stage(stage, **LORA) for stage in (0, 3)}
    runs += [
        a_run(dpo, name, flags, readers=2, persists="adapters" in name, adam=STEPPED_BY.get(name))
        for name, flags in more.items()
    ]
    runs += [a_run(dpo, "adapters_bfloat16", of_stage(1, **LORA, **BFLOAT16), readers=2)]
    runs += [a_run(dpo, "adapters_dropout", of_stage(3, **DROPOUT, **SAVES), readers=2)]
    assert run(runs, ranks=2) == [[None] * len(runs)] * 2
    return dpo


@pytest.fixture(scope="module")
def on_four(dpo: TrainCase) -> TrainCase:
    all_in_host_memory = {"adam_offload": True, "offload": True, "activation_checkpointing": "auto"}
    nearby = {"sequence_parallel_size": 2, "deepspeed_zpg": 2, **all_in_host_memory}
    runs = {
        "rows_0": of_stage(0, sequence_parallel_size=2),
        "rows_2": of_stage(2, sequence_parallel_size=2, adam_offload=True, **SAVES),
        "rows_3": of_stage(3, **nearby),
        "adapters_rows": of_stage(3, **nearby, **LORA, **SAVES),
        "matrices_1": of_stage(1, tensor_parallel_degree=2),
        "matrices_3": of_stage(3, tensor_parallel_degree=2, **MOVES, **SAVES),
    }
    told = run([a_run(dpo, name, flags, readers=2) for name, flags in runs.items()], ranks=4)
    assert told == [[None] * len(runs)] * 4
    return dpo


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_takes_the_same_steps(on_two: TrainCase, stage: int) -> None:
    """Also where an update that has nothing to learn from came between, and ranks run the head
    unequally often.
    """
    assert_same(on_two, f"{stage}")
    assert all(0.1 < row["shared_fraction"] < 1 for row in on_two.metrics(f"{stage}"))
    assert on_two.is_exported_again(f"{stage}")


def held_out(case: TrainCase, name: str) -> list[dict[str, float]]:
    return [
        json.loads(line) for line in (case.folder / name / "eval.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("stage", range(4))
def test_held_out_rows_are_scored_between_steps(on_two: TrainCase, stage: int) -> None:
    ours, theirs = held_out(on_two, f"{stage}"), held_out(on_two, "base")
    assert [row["step"] for row in ours] == [0, 2, 3]
    for one, two in zip(ours, theirs, strict=True):
        assert one == pytest.approx(two, rel=1e-5, abs=1e-6)
    assert on_two.metrics(f"{stage}")[1]["eval/loss"] == ours[1]["eval/loss"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_rows_may_be_split_over_ranks(on_four: TrainCase, stage: int) -> None:
    """Of which DeepSpeed knows nothing. A wrong scale would show in the norm alone, the first loss
    agrees anyway.

    Nor does host memory change anything, where stage 2 has its optimizer, and stage 3 all, with
    second copies.
    """
    assert_same(on_four, f"rows_{stage}")
    assert on_four.metrics(f"rows_{stage}")[0]["rewards/accuracy"] == 0


@pytest.mark.parametrize(("name", "base"), [("matrices_1", "base"), ("matrices_3", "moving_base")])
def test_matrices_may_be_split_over_ranks(on_four: TrainCase, name: str, base: str) -> None:
    """Of a model that normalises over all heads, of which a rank has some; one with a reference
    that moves.
    """
    assert_same(on_four, name, base)
    ours, theirs = (tensors_of(on_four.folder / each / "hf_model") for each in (name, base))
    assert ours.keys() == theirs.keys()
    for tensor, values in ours.items():
        assert np.abs(values - theirs[tensor]).max() < 5e-5, tensor


def tensors_of(folder: Path) -> dict[str, Any]:
    return {
        name: values
        for file in folder.glob("*.safetensors")
        for name, values in load_file(file).items()
    }


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_reference_may_follow_the_policy(on_two: TrainCase, stage: int) -> None:
    assert_same(on_two, f"moving_{stage}", "moving_base")
    assert on_two.trajectory("moving_base")[2] != on_two.trajectory("base")[2]


def test_bfloat16_trains_float32_weights_as_the_other_backend_does(on_two: TrainCase) -> None:
    for name in ("1", "3", "split"):
        assert_same(on_two, f"bfloat16_{name}", "fsdp", rel=1e-2)


@pytest.mark.parametrize("name", [*STEPPED_BY])
def test_kernel_of_adam_changes_no_step(on_two: TrainCase, name: str) -> None:
    log = (on_two.folder / name / "run.log").read_text()
    assert re.search(rf"optimizer: (DeepSpeed)?{STEPPED_BY[name]}$", log, flags=re.MULTILINE)
    assert_same(on_two, name, f"{name.partition('_')[0]}_base")


@pytest.mark.parametrize("name", ["0", "3", "rows"])
def test_adapters_learn_the_same(on_two: TrainCase, on_four: TrainCase, name: str) -> None:
    """Beside a frozen model that is whole on each rank, or shared; what is left of them is the
    same, merged too.
    """
    assert_same(on_two, f"adapters_{name}", "adapters_base")
    ours, theirs = (on_two.folder / f"adapters_{each}" for each in (name, "base"))
    # Adam steps as far for a gradient that is rounding as for any other, and an adapter is a few
    # steps long.
    for folder, rel in (("adapter", 5e-3), ("hf_model", 1e-3)):
        expected = tensors_of(theirs / folder)
        found = tensors_of(ours / folder)
        assert found.keys() == expected.keys()
        for tensor, values in found.items():
            assert np.linalg.norm(values - expected[tensor]) <= rel * np.linalg.norm(
                expected[tensor]
            ), tensor


def test_adapters_are_computed_with_in_bfloat16(on_two: TrainCase) -> None:
    assert_same(on_two, "adapters_bfloat16", "adapters_base", rel=2e-2)


SPLIT = ("sft", "distill")


def test_every_objective_takes_the_same_steps(tmp_path: Path) -> None:
    """Under stage 3, and one with a frozen teacher beside it; of all families, one of them with
    tied embeddings.

    Where a head of a whole vocabulary is learned, also with matrices split over both ranks; a
    teacher's too, by layers of another kind, or it is gone by then.
    """
    cases = {
        entry: write_objective_case(tmp_path / entry, entry, family=family)
        for entry, family in (
            *(("sft", "qwen3"), ("kto", "olmo3"), ("reward_model", "llama"), ("distill", "olmo2")),
        )
    }
    split = of_stage(2, tensor_parallel_degree=2)
    # One learns from what it is without adapters, and the other has a head that is trained whole.
    adapters = {
        "distill": LORA | {"teacher_model_name_or_path": cases["distill"].model},
        "reward_model": LORA,
    }
    runs = [a_run(case, "base", {}, readers=1, entry=entry) for entry, case in cases.items()]
    runs += [
        a_run(cases[entry], "adapters_base", adapters[entry], readers=1, entry=entry)
        for entry in adapters
    ]
    kept = {"teacher_top_k": 40}
    runs.append(a_run(cases["distill"], "kept_base", kept, readers=1, entry="distill"))
    run(runs, ranks=1)
    runs = [
        a_run(case, "stage_3", of_stage(3, activation_checkpointing="auto"), readers=2, entry=entry)
        for entry, case in cases.items()
    ]
    runs += [a_run(cases[entry], "split", split, readers=1, entry=entry) for entry in SPLIT]
    runs.append(a_run(cases["distill"], "kept_split", split | kept, readers=1, entry="distill"))
    runs += [
        a_run(cases[entry], "adapters", of_stage(3, **adapters[entry]), readers=2, entry=entry)
        for entry in adapters
    ]
    assert run(runs, ranks=2) == [[None] * len(runs)] * 2
    for entry in adapters:
        assert_same(cases[entry], "adapters", "adapters_base")
    for case in cases.values():
        assert_same(case, "stage_3")
    for entry in SPLIT:
        assert_same(cases[entry], "split")
    assert_same(cases["distill"], "kept_split", "kept_base")


def test_reward_model_in_bfloat16(tmp_path: Path) -> None:
    """Its matrix has the dtype of all, which DeepSpeed wants, and is stepped in float32; scores are
    float32 as ever.
    """
    case = write_objective_case(tmp_path, "reward_model", family="llama")
    run([a_run(case, "base", {}, readers=1, entry="reward_model")], ranks=1)
    flags = {str(stage): of_stage(stage, **BFLOAT16) for stage in (2, 3)}
    flags["adapters"] = of_stage(2, **BFLOAT16, **LORA)
    runs = [
        a_run(case, name, each, readers=2, entry="reward_model") for name, each in flags.items()
    ]
    assert run(runs, ranks=2) == [[None] * len(runs)] * 2
    assert "command: reward_model\n" in (case.folder / "base" / "config.yaml").read_text()
    exact = case.metrics("base")
    for name in flags:
        rows = case.metrics(name)
        assert len(rows) == STEPS_OF_AN_EPOCH
        for row, other in zip(rows[:1] if name == "adapters" else rows, exact, strict=False):
            assert row["loss"] == pytest.approx(other["loss"], rel=2e-2)


def test_broken_gradient_is_no_step(dpo: TrainCase) -> None:
    stages = {f"broken_{stage}": of_stage(stage) for stage in (0, 2, 3)}
    stages["broken_in_bfloat16"] = of_stage(1, **BFLOAT16)
    runs = [a_run(dpo, name, flags, readers=2, does="break") for name, flags in stages.items()]
    for of_rank in run(runs, ranks=2):
        for told, is_unharmed in of_rank:
            assert (
                "the norm of the gradient is" in told and "at step 2, which was not taken" in told
            )
            assert is_unharmed


def stopped_after(case: TrainCase, name: str, stopped: str, *, step: int = 2) -> None:
    """`stopped` is the run `name` as it would be, had it ended with the checkpoint of `step`."""
    shutil.copytree(
        case.folder / name,
        case.folder / stopped,
        ignore=shutil.ignore_patterns("step*", "hf_model"),
    )
    shutil.copytree(case.folder / name / f"step{step}", case.folder / stopped / f"step{step}")


def test_stopped_run_resumes_bitwise_and_elsewhere(on_two: TrainCase, on_four: TrainCase) -> None:
    """The same ranks and stage: bitwise.

    From four ranks to two under another stage: the same steps.
    """
    same = {"0": of_stage(0), "2": of_stage(2), "moving_3": of_stage(3, **MOVES)}
    same |= {"adapters_dropout": of_stage(3, **DROPOUT)}
    elsewhere = {
        "adapters_rows": (of_stage(2, **LORA), "adapters_base"),
        "rows_2": (of_stage(3), "base"),
        "matrices_3": (of_stage(2, tensor_parallel_degree=2, **MOVES), "moving_base"),
    }
    runs = []
    for name, flags in (same | {name: flags for name, (flags, _) in elsewhere.items()}).items():
        stopped_after(on_two, name, f"{name}_resumed")
        readers = 2 // flags.get("tensor_parallel_degree", 1)
        as_before: dict[str, Any] = {"persists": True, "does": "idle"} if name in "02" else {}
        runs.append(a_run(on_two, f"{name}_resumed", SAVES | flags, readers=readers, **as_before))
    assert run(runs, ranks=2) == [[None] * len(runs)] * 2
    for name in same:
        assert on_two.trajectory(f"{name}_resumed") == on_two.trajectory(name)
        assert on_two.weights_digest(f"{name}_resumed") == on_two.weights_digest(name)
    for name, (_, base) in elsewhere.items():
        assert_same(on_two, f"{name}_resumed", base)
    index = json.loads((on_two.folder / "3" / "step3" / "index.json").read_text())
    assert {name.split(".")[0] for name in index["tensors"]} == {"zero"}
    index = json.loads((on_two.folder / "adapters_dropout" / "step3" / "index.json").read_text())
    assert index["tensors"] and all("lora_" in name for name in index["tensors"])


FLAGS_LEFT_OUT = {"backend": "olmo_core", "tensor_parallel_degree": 1}


def test_checkpoints_of_another_kind_are_refused(on_two: TrainCase, on_four: TrainCase) -> None:
    """Those of the other backend, and where ranks split matrices otherwise: the way over is an
    export.
    """
    of_config = {
        "1": (SAVES, "--backend was deepspeed, is"),
        "fsdp": (of_stage(1, **SAVES), "--backend was olmo_core"),
    }
    told = {
        "1": (SAVES, "are of another --backend than olmo_core: give theirs"),
        "fsdp": (of_stage(1, **SAVES), "are of another --backend than deepspeed: give theirs"),
        "matrices_3": (
            of_stage(3, **MOVES, **SAVES),
            "are of another --tensor_parallel_degree than 1: give theirs",
        ),
    }
    runs, expected = [], []
    for kind, refusals in (("config", of_config), ("checkpoint", told)):
        for name, (flags, words) in refusals.items():
            stopped_after(on_two, name, f"{name}_of_{kind}")
            # Where config.yaml has been changed, only the checkpoint tells.
            if kind == "checkpoint":
                path = on_two.folder / f"{name}_of_{kind}" / "config.yaml"
                config = yaml.safe_load(path.read_text())
                flag = "tensor_parallel_degree" if "matrices" in name else "backend"
                config[flag] = flags.get(flag, FLAGS_LEFT_OUT[flag])
                path.write_text(yaml.safe_dump(config))
            dtype = BFLOAT16 if name == "fsdp" else {}
            runs.append(a_run(on_two, f"{name}_of_{kind}", dtype | flags, readers=1))
            expected.append(words)
    (of_rank,) = run(runs, ranks=1)
    for (said, _), words in zip(of_rank, expected, strict=True):
        assert words in said
    assert all("the hf_model such a run ends with" in said for said, _ in of_rank[len(of_config) :])
