"""How many ranks a command starts by itself, and what it says of GPUs that stay idle."""

import pytest

from open_instruct.commands import process
from open_instruct.commands.run_flags import find_backend, parse_run
from open_instruct.config.sharding_sections import RanksSection
from open_instruct.objectives.dpo import DPOConfig, validate_dpo
from open_instruct.parallel import launch
from open_instruct.parallel.launch import (
    count_ranks_to_start,
    find_idle_gpus,
    refuse_other_rank_count,
)
from tests.refusals import refused

REQUIRED = [
    "--model_name_or_path",
    "model",
    "--mixer_list",
    "rows.jsonl",
    "1.0",
    "--output_dir",
    "out",
]


@pytest.mark.parametrize(
    ("asked", "environ", "num_gpus", "number"),
    [
        (None, {}, 8, None),
        ("4", {}, 0, 4),
        ("1", {}, 8, None),
        ("auto", {}, 8, 8),
        ("auto", {}, 1, None),
        ("auto", {}, 0, None),
        ("4", {"WORLD_SIZE": "4"}, 8, None),  # a rank itself
    ],
)
def test_ranks_are_started_by_launcher_or_command(
    asked: str | None,
    environ: dict[str, str],
    num_gpus: int,
    number: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_count_gpus", lambda: num_gpus)
    assert count_ranks_to_start(asked, environ) == number


def test_layout_is_checked_for_the_ranks_that_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    backend = find_backend("olmo_core")
    assert process._check_nodes(RanksSection(num_processes="6", fsdp_shard_degree=3), backend) == 6
    with refused("layout", "fsdp_shard_degree", "4", "6"):
        process._check_nodes(RanksSection(num_processes="6", fsdp_shard_degree=4), backend)


@pytest.mark.parametrize("asked", ["0", "-1", "many", "1.5", "1025"])
def test_number_of_processes_that_cannot_be(asked: str) -> None:
    with refused("bad_value", "num_processes", f"{asked}"):
        validate_dpo(parse_run(DPOConfig, [*REQUIRED, f"--num_processes={asked}"]))


def test_launcher_that_started_another_number() -> None:
    for asked in (None, "auto", "2"):
        refuse_other_rank_count(asked, 2)
    with refused("conflict", "num_processes", "4", "1 process"):
        refuse_other_rank_count("4", 1)


def test_gpus_that_stay_idle_are_told_of_once_nobody_has_said_that_one_is_meant() -> None:
    told = find_idle_gpus(RanksSection(), num_ranks=1, num_gpus=8)
    assert (
        told is not None
        and told.startswith("this machine has 8 GPUs")
        and "--num_processes auto" in told
    )
    told = find_idle_gpus(RanksSection(num_processes="auto"), num_ranks=1, num_gpus=8)
    assert told is not None and "WORLD_SIZE is set" in told
    for parallel, num_ranks, num_gpus in (
        (RanksSection(), 1, 1),
        (RanksSection(), 1, 0),
        (RanksSection(), 2, 8),
        (RanksSection(num_processes="1"), 1, 8),
        (RanksSection(single_gpu_mode=True), 1, 8),
    ):
        assert find_idle_gpus(parallel, num_ranks=num_ranks, num_gpus=num_gpus) is None
