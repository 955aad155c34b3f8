"""Every file in configs/: it parses, its flags go together, and it fits the hardware that its header names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from open_instruct.config.dpo import DPOConfig, validate_dpo
from open_instruct.config.parser import parse
from open_instruct.config.sft import SFTConfig, validate_sft
from open_instruct.parallel.layout import resolve_layout, unsharded_memory_warning
from open_instruct.records import ShardLayout

REPOSITORY = Path(__file__).resolve().parents[2]
MAGNITUDES = {"M": 1e6, "B": 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the files of one folder are read as."""

    config_class: type[Any]
    validate: Callable[[Any], list[str]]
    unit: str


KINDS = {
    "dpo": Kind(config_class=DPOConfig, validate=validate_dpo, unit="pairs"),
    "sft": Kind(config_class=SFTConfig, validate=validate_sft, unit="conversations"),
}
FILES = sorted(path for kind in KINDS for path in (REPOSITORY / "configs" / kind).glob("*.yaml"))


def read(path: Path, *more: str) -> Any:
    return parse(KINDS[path.parent.name].config_class, [str(path), *more])


def header(path: Path) -> dict[str, str]:
    """The `# name: value` lines that a program can read."""
    return dict(re.findall(r"^# (\w+): (.+)$", path.read_text(), flags=re.MULTILINE))


def nodes(path: Path) -> list[int]:
    return [int(word) for word in header(path)["gpus_per_node"].split()]


def layout_of(path: Path) -> ShardLayout:
    parallel = read(path).parallel
    return resolve_layout(
        nodes(path),
        fsdp_shard_degree=parallel.fsdp_shard_degree,
        fsdp_num_replicas=parallel.fsdp_num_replicas,
        tensor_parallel_degree=parallel.tensor_parallel_degree,
        single_device=parallel.single_gpu_mode,
    )


def launch_words(path: Path) -> list[str]:
    """The words of the command in the header that starts one of our scripts, its continuation lines joined."""
    comment = "\n".join(
        line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")
    )
    commands = re.findall(r"^(?:torchrun|python) (?:.*\\\n)*.*$", comment, flags=re.MULTILINE)
    (command,) = (command for command in commands if "open_instruct/" in command)
    return shlex.split(command.replace("\\\n", " "))


def test_all_files_of_configs_are_known() -> None:
    assert {path.parent.name for path in FILES} == set(KINDS)
    assert sorted((REPOSITORY / "configs").rglob("*.*")) == FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
class TestFile:
    def test_flags_are_good(self, path: Path) -> None:
        assert KINDS[path.parent.name].validate(read(path)) == []

    def test_the_global_batch_is_what_the_header_says(self, path: Path) -> None:
        optim = read(path).optim
        world = layout_of(path).data_parallel_world_size
        num_rows = optim.per_device_train_batch_size * optim.gradient_accumulation_steps * world
        assert num_rows == int(header(path)[f"global_batch_{KINDS[path.parent.name].unit}"])

    def test_the_training_state_fits(self, path: Path) -> None:
        words = header(path)
        num_params = round(float(words["num_params"][:-1]) * MAGNITUDES[words["num_params"][-1]])
        memory_gib = float(words.get("device_memory_gib", "4"))
        warning = unsharded_memory_warning(layout_of(path), num_params=num_params, device_memory_gib=memory_gib)
        assert warning is None

    def test_the_launch_command_starts_this_file_on_these_nodes(self, path: Path) -> None:
        words = launch_words(path)
        script = words.index(f"open_instruct/{path.parent.name}.py")
        launcher, ours = words[1:script], words[script + 1 :]
        flags = dict(zip(launcher[::2], launcher[1::2], strict=True))
        num_nodes = int(flags.get("--nnodes", "1"))
        assert [int(flags.get("--nproc_per_node", "1"))] * num_nodes == nodes(path)
        assert ours[0] == str(path.relative_to(REPOSITORY))
        read(path, *ours[1:])


def test_only_the_file_that_says_so_straddles_nodes() -> None:
    straddling = [path.stem for path in FILES if layout_of(path).straddles_nodes]
    assert straddling == ["olmo2_32b_32gpu_tp"]
