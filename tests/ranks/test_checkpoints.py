"""Checkpoints are read bitwise under any layout; damaged ones are gone around, by all ranks alike;
none runs code.
"""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from open_instruct.checkpoints.step_folder import read_manifest, write_manifest
from open_instruct.models.box_files import write_hashed
from tests.ranks.grpo_case import GRPOCase
from tests.ranks.launch import run_ranks
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import free_ports

JOBS = "tests.ranks.jobs.checkpoints"
HSDP_2X2 = {"num_learners_per_node": 4, "fsdp_shard_degree": 2}
FSDP_2_TP_2 = {"num_learners_per_node": 4, "fsdp_shard_degree": 2, "tensor_parallel_degree": 2}
FSDP_2, TP_2 = (
    {"num_learners_per_node": 2},
    {"num_learners_per_node": 2, "tensor_parallel_degree": 2},
)
ONE = {"num_learners_per_node": 1}
MOVING = {"beta": 0.05, "ref_policy_update_freq": 1, "alpha": 0.5, "learning_rate": 1e-2}

# What is trained, the layout that saves, and those that load.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
    "adamw": ({"weight_decay": 0.1}, HSDP_2X2, [HSDP_2X2, FSDP_2_TP_2, FSDP_2, TP_2, ONE]),
    "skip_step": (
        {"optimizer": "skip_step_adamw", **MOVING},
        FSDP_2_TP_2,
        [FSDP_2_TP_2, FSDP_2, ONE],
    ),
    "muon": ({"optimizer": "muon"}, HSDP_2X2, [HSDP_2X2, FSDP_2]),
    "adamw_8bit": ({"optimizer": "adamw_8bit"}, HSDP_2X2, [HSDP_2X2, FSDP_2, ONE]),
    # Where tensor ranks cut rows, blocks of these are shorter.
    "adamw_8bit_split": ({"optimizer": "adamw_8bit"}, FSDP_2_TP_2, [FSDP_2_TP_2, TP_2]),
    "tied": ({"family": "qwen3"}, FSDP_2, [HSDP_2X2, FSDP_2, TP_2, ONE]),
    "one": ({"single_gpu_mode": True, "param_dtype": "bfloat16"}, ONE, [ONE]),
}


def list_flags(case: GRPOCase, name: str, **flags: Any) -> list[str]:
    family = flags.pop("family", None)
    if family is not None:
        # A vocabulary that no number of ranks divides.
        model = case.folder / f"{name}_model"
        flags["model_name_or_path"] = write_shallow_model(
            model, family=family, tie=True, vocab_size=389, layers=1
        )
    return case.case(name, flags=flags)["flags"]


def with_layout(flags: list[str], layout: dict[str, Any]) -> list[str]:
    return [*flags, *(word for name, value in layout.items() for word in (f"--{name}", str(value)))]


@pytest.fixture(scope="module")
def grpo_case(tmp_path_factory: pytest.TempPathFactory) -> GRPOCase:
    """Of one layer: what is saved of it is saved of each."""
    return GRPOCase(tmp_path_factory.mktemp("grpo"), layers=1)


Results = list[list[dict[str, Any]]]


def call(job: str, num_ranks: int, cases: list[list[str]], **arguments: Any) -> Results:
    """For each case, what every rank returned."""
    ports = free_ports(len(cases))
    of_ranks = run_ranks(num_ranks, f"{JOBS}:{job}", cases=cases, ports=ports, **arguments)
    return [list(of_case) for of_case in zip(*of_ranks, strict=True)]


@pytest.mark.extended
def test_any_layout_finds_the_very_bits(grpo_case: GRPOCase) -> None:
    flags = {name: list_flags(grpo_case, name, **own) for name, (own, _, _) in RUNS.items()}
    saved: dict[str, list[dict[str, Any]]] = {}
    for num_ranks in (1, 2, 4):
        names = [
            name
            for name, (_, layout, _) in RUNS.items()
            if layout["num_learners_per_node"] == num_ranks
        ]
        cases = [with_layout(flags[name], RUNS[name][1]) for name in names]
        saved |= dict(zip(names, call("save_each", num_ranks, cases, num_saved=2), strict=True))
    for num_ranks in (1, 2, 4):
        wanted = [
            (name, layout)
            for name, (_, _, layouts) in RUNS.items()
            for layout in layouts
            if layout["num_learners_per_node"] == num_ranks
        ]
        results = call(
            "load_each", num_ranks, [with_layout(flags[name], layout) for name, layout in wanted]
        )
        for (name, layout), found in zip(wanted, results, strict=True):
            check_found(name, found, saved[name], of_same_layout=layout == RUNS[name][1])


def check_found(
    name: str, found: list[dict[str, Any]], saved: list[dict[str, Any]], *, of_same_layout: bool
) -> None:
    for rank, theirs in enumerate(found):
        assert theirs["found"] == {"mark": 2} and theirs["warnings"] == []
        for kind in ("tensors", "values", "trainer"):
            assert theirs[kind] == saved[0][kind], f"{kind} of {name}"
        if of_same_layout:
            assert theirs["random_state"] == saved[rank]["random_state"]
    names = saved[0]["tensors"]
    assert any(tensor.startswith("optim.") for tensor in names)
    assert any(tensor.endswith("exp_avg_scales") for tensor in names) == name.startswith(
        "adamw_8bit"
    )
    assert any(tensor.startswith("reference.") for tensor in names) == (name == "skip_step")


@pytest.mark.extended
def test_moments_come_back_from_the_host(grpo_case: GRPOCase) -> None:
    """A run may go on without --adam_offload: with an AdamW that has settings of its own."""
    flags = with_layout(list_flags(grpo_case, "from_host"), ONE)
    ((saved,),) = call("save_from_host", 1, [flags])
    ((found,),) = call("load_each", 1, [flags])
    assert "error" not in found, found["error"]
    assert found["tensors"] == saved["tensors"] and found["found"] == {"mark": 2}


@pytest.mark.extended
def test_moments_of_another_kind_are_refused_by_the_flag(grpo_case: GRPOCase) -> None:
    """Where no config.yaml tells of it."""
    optimizers = ("adamw", "adamw_8bit")
    flags = [
        with_layout(list_flags(grpo_case, f"kept_as_{each}", optimizer=each), ONE)
        for each in optimizers
    ]
    call("save_each", 1, flags, num_saved=1)
    others = [
        [{"adamw": "adamw_8bit", "adamw_8bit": "adamw"}.get(word, word) for word in each]
        for each in flags
    ]
    for (found,) in call("load_each", 1, others):
        assert found["error"].startswith(
            "InputError: the checkpoints in --output_dir are of another --optimizer than"
        )
        assert "give theirs again, or start in another --output_dir" in found["error"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flipped(name: str) -> Callable[[Path], None]:
    return lambda run: flip(run / "step2" / name)


def cut_short(run: Path) -> None:
    path = run / "step2" / "rank1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def half_written(run: Path) -> None:
    shutil.copytree(run / "step2", run / "step3-tmp")
    (run / "step3-tmp" / "checkpoint.json").unlink()


def plant(run: Path) -> None:
    """Where checkpoints of OLMo-core's own format are unpickled: in one of ours, and in a newer one
    of its own.
    """
    for folder in (run / "step2", run / "step9"):
        for name in ("train", "model_and_optim"):
            (folder / name).mkdir(parents=True)
        for name in ("train/rank0.pt", "train/rank1.pt", "rank0.pt"):
            torch.save(Opens(run / "ran"), folder / name)
        for name in (
            ".metadata",
            "model_and_optim/.metadata",
            "model_and_optim/__0_0.distcp",
            "__0_0.distcp",
        ):
            (folder / name).write_bytes(pickle.dumps(Opens(run / "ran")))
        (folder / ".metadata.json").write_text("{}")


class Opens:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def put_another_step(run: Path) -> None:
    """Into the trainer's state, as who knows the format would."""
    folder = run / "step2"
    state = json.loads((folder / "rank0.json").read_bytes())
    state["dict"] = [
        [name, -5 if name == "global_step" else value] for name, value in state["dict"]
    ]
    (folder / "rank0.json").unlink()
    written = {"rank0.json": write_hashed(folder / "rank0.json", [json.dumps(state).encode()])}
    manifest = read_manifest(folder)
    (folder / "checkpoint.json").unlink()
    write_manifest(folder, replace(manifest, files={**manifest.files, **written}))


def damage_both(run: Path) -> None:
    flip(run / "step2" / "index.json")
    flip(run / "step1" / "rank0.json")


# What is done to a run of two checkpoints, the step it goes on from, and what is said of which
# file.
DAMAGES: dict[str, tuple[Callable[[Path], None], int, str]] = {
    **{
        name: (flipped(name), 1, f"{name} is not what was written")
        for name in (
            *("checkpoint.json", "index.json", "rank0.json", "rank1.json"),
            *("rank0.safetensors", "rank1.safetensors"),
        )
    },
    "missing": (
        lambda run: (run / "step2" / "rank1.safetensors").unlink(),
        1,
        "rank1.safetensors is missing",
    ),
    "cut": (cut_short, 1, "rank1.safetensors is not what was written"),
    "half": (half_written, 2, ""),
    "planted": (plant, 2, "step9/checkpoint.json is missing"),
    "copied": (
        lambda run: shutil.copytree(run / "step2", run / "step9"),
        2,
        "step9 is a copy of another checkpoint",
    ),
    "another step": (
        put_another_step,
        0,
        "rank0.json is of step -5, and checkpoint.json of step 2",
    ),
    "both": (damage_both, 0, "index.json is not what was written"),
}


@pytest.mark.extended
def test_damaged_and_planted_checkpoints(grpo_case: GRPOCase, tmp_path: Path) -> None:
    flags = list_flags(grpo_case, "damaged")
    call("save_each", 2, [with_layout(flags, FSDP_2)], num_saved=2)
    at = flags.index("--output_dir") + 1
    whole = Path(flags[at])
    cases = []
    for name, (change, _, _) in DAMAGES.items():
        run = tmp_path / name
        shutil.copytree(whole, run)
        change(run)
        cases.append(with_layout([*flags[:at], str(run), *flags[at + 1 :]], FSDP_2))
    for (name, (_, step, told)), of_ranks in zip(
        DAMAGES.items(), call("load_each", 2, cases), strict=True
    ):
        run = tmp_path / name
        left = sorted(path.name for path in run.glob("step*"))
        assert not (run / "ran").exists(), "a pickle was loaded"
        if name == "both":
            for rank in of_ranks:
                assert rank["error"].startswith("RunError: no checkpoint in")
                assert told in rank["error"] and "rank0.json" in rank["error"]
                assert "--overwrite_output_dir" in rank["error"]
            assert left == ["step1", "step2"], "what is damaged is left where it is"
            continue
        if name == "another step":
            for rank in of_ranks:
                assert (
                    told in rank["error"]
                    and "Remove that folder to go on from the one before it" in rank["error"]
                )
            continue
        for rank in of_ranks:
            assert rank["found"] == {"mark": step}, name
            if told:
                (warning,) = rank["warnings"]
                assert told in warning and f"Going on from step{step}" in warning
        if step == 1:
            assert left == ["step1", "step2-damaged"]
        else:
            assert left == (
                ["step1", "step2", "step9-damaged"]
                if name in ("planted", "copied")
                else ["step1", "step2"]
            )


@pytest.mark.extended
@pytest.mark.parametrize("in_background", ["off", "on"])
def test_checkpoint_fails_on_all_ranks_when_it_fails_on_one(
    grpo_case: GRPOCase, in_background: str
) -> None:
    flags = with_layout(
        list_flags(grpo_case, f"faults_{in_background}", async_checkpoints=in_background), FSDP_2
    )
    of_ranks = run_ranks(2, f"{JOBS}:faults_of_one_rank", flags=flags)
    assert of_ranks[0] == of_ranks[1]
    written, read, step, left = of_ranks[0]
    assert "the checkpoint of step 2 cannot be written" in written and "rank 1: " in written
    assert "File too large" in written and "unharmed" in written
    assert "step1 cannot be read" in read and "rank 1: " in read and "Input/output error" in read
    assert (step, left) == ("at step 1", "step1")


@pytest.mark.extended
def test_checkpoints_of_a_thread_are_those_of_a_run_that_waits(grpo_case: GRPOCase) -> None:
    modes = ("off", "on")
    flags = [
        list_flags(grpo_case, f"async_{mode}", async_checkpoints=mode, **MOVING) for mode in modes
    ]
    call(
        "save_each",
        2,
        [with_layout(each, FSDP_2) for each in flags],
        num_saved=3,
        copies_after_s=1.0,
    )
    waited, written = (dict(files_of(Path(output_of(each)))) for each in flags)
    assert {name.split("/")[0] for name in waited} == {"step1", "step2", "step3"}
    assert written == waited


@pytest.mark.extended
def test_many_saves_on_four_ranks(grpo_case: GRPOCase) -> None:
    flags = with_layout(
        list_flags(grpo_case, "many", async_checkpoints="on", keep_last_n_checkpoints=2), HSDP_2X2
    )
    left = run_ranks(4, f"{JOBS}:save_many", flags=flags, num_saves=30)
    assert left[0] == ["step29", "step30"], "rank 0 removes the older ones"


def output_of(flags: list[str]) -> str:
    return flags[flags.index("--output_dir") + 1]


def files_of(run: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(run.glob("step*/*")):
        yield str(path.relative_to(run)), path.read_bytes()
