"""Every file in configs/: it parses, its flags go together, and it fits the hardware that its header names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from open_instruct.config.dpo import DPOConfig, validate_dpo
from open_instruct.config.parser import parse
from open_instruct.parallel.layout import resolve_layout, unsharded_memory_warning
from open_instruct.records import ShardLayout

REPOSITORY = Path(__file__).resolve().parents[2]
DPO_FILES = sorted((REPOSITORY / "configs" / "dpo").glob("*.yaml"))
MAGNITUDES = {"M": 1e6, "B": 1e9}


def header(path: Path) -> dict[str, str]:
    """The `# name: value` lines that a program can read."""
    return dict(re.findall(r"^# (\w+): (.+)$", path.read_text(), flags=re.MULTILINE))


def nodes(path: Path) -> list[int]:
    return [int(word) for word in header(path)["gpus_per_node"].split()]


def layout_of(path: Path) -> ShardLayout:
    parallel = parse(DPOConfig, [str(path)]).parallel
    return resolve_layout(
        nodes(path),
        fsdp_shard_degree=parallel.fsdp_shard_degree,
        fsdp_num_replicas=parallel.fsdp_num_replicas,
        tensor_parallel_degree=parallel.tensor_parallel_degree,
        single_device=parallel.single_gpu_mode,
    )


def launch_words(path: Path) -> list[str]:
    """The words of the torchrun command in the header, its continuation lines joined."""
    comment = "\n".join(
        line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")
    )
    (command,) = re.findall(r"^torchrun (?:.*\\\n)*.*$", comment, flags=re.MULTILINE)
    return shlex.split(command.replace("\\\n", " "))


def test_all_files_of_configs_are_known() -> None:
    assert len(DPO_FILES) >= 5
    assert sorted((REPOSITORY / "configs").rglob("*.*")) == DPO_FILES


@pytest.mark.parametrize("path", DPO_FILES, ids=lambda path: path.stem)
class TestDPO:
    def test_flags_are_good(self, path: Path) -> None:
        assert validate_dpo(parse(DPOConfig, [str(path)])) == []

    def test_the_global_batch_is_what_the_header_says(self, path: Path) -> None:
        optim = parse(DPOConfig, [str(path)]).optim
        world = layout_of(path).data_parallel_world_size
        pairs = optim.per_device_train_batch_size * optim.gradient_accumulation_steps * world
        assert pairs == int(header(path)["global_batch_pairs"])

    def test_the_training_state_fits(self, path: Path) -> None:
        words = header(path)
        num_params = round(float(words["num_params"][:-1]) * MAGNITUDES[words["num_params"][-1]])
        memory_gib = float(words.get("device_memory_gib", "4"))
        warning = unsharded_memory_warning(layout_of(path), num_params=num_params, device_memory_gib=memory_gib)
        assert warning is None

    def test_the_launch_command_starts_this_file_on_these_nodes(self, path: Path) -> None:
        words = launch_words(path)
        script = words.index("open_instruct/dpo.py")
        launcher, ours = words[1:script], words[script + 1 :]
        flags = dict(zip(launcher[::2], launcher[1::2], strict=True))
        num_nodes = int(flags.get("--nnodes", "1"))
        assert [int(flags["--nproc_per_node"])] * num_nodes == nodes(path)
        assert ours[0] == str(path.relative_to(REPOSITORY))
        parse(DPOConfig, [str(path), *ours[1:]])


def test_only_the_file_that_says_so_straddles_nodes() -> None:
    straddling = [path.stem for path in DPO_FILES if layout_of(path).straddles_nodes]
    assert straddling == ["olmo2_32b_32gpu_tp"]
