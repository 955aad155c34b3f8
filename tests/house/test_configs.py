"""Every file in configs/: it parses, its flags go together, and it fits the hardware that its
header names.
"""

import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from open_instruct.cluster.placement import FleetShape
from open_instruct.commands.plan import parse_request
from open_instruct.commands.run_flags import parse_run
from open_instruct.core.errors import InputError
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.objectives.registry import OBJECTIVES, load_objective
from open_instruct.parallel.layout import find_layout
from open_instruct.planning.plan import make_plan
from open_instruct.planning.subject.read_shape import model_shape

REPOSITORY = Path(__file__).resolve().parents[2]
MAGNITUDES = {"M": 1e6, "B": 1e9}


KINDS = {name: load_objective(name) for name in (*OBJECTIVES, "grpo")}
SCRIPTS = {name: f"open_instruct/{name}.py" for name in OBJECTIVES} | {
    "grpo": "open_instruct/grpo_olmo_core_actor.py"
}
CLUSTER_SCRIPT = "scripts/launch_ray_slurm.sh"
FILES = sorted(path for kind in KINDS for path in (REPOSITORY / "configs" / kind).glob("*.yaml"))
TORCHRUN_FILES = [path for path in FILES if path.parent.name != "grpo"]
GRPO_FILES = [path for path in FILES if path.parent.name == "grpo"]


def units_of(kind: str) -> str:
    """What a global batch is counted in."""
    return f"{load_objective(kind).rows.unit}s"


def name_of(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def read(path: Path, *more: str) -> Any:
    return parse_run(KINDS[path.parent.name].config_class, [str(path), *more])


def header(path: Path) -> dict[str, str]:
    """The `# name: value` lines that a program can read."""
    return dict(re.findall(r"^# (\w+): (.+)$", path.read_text(), flags=re.MULTILINE))


def nodes(path: Path) -> list[int]:
    return [int(word) for word in header(path)["gpus_per_node"].split()]


def layout_of(path: Path) -> ShardLayout:
    config = read(path)
    num_gpus = config.parallel.num_learners_per_node if path in GRPO_FILES else nodes(path)
    return find_layout(config.parallel, num_gpus, config.backend)


def is_built_in(model: str) -> bool:
    """Whether a plan knows its shape by its name."""
    with suppress(InputError):
        return bool(model_shape(model))
    return False


def model_of(path: Path) -> str:
    return str(read(path).model.model_name_or_path)


def launch_words(path: Path) -> tuple[list[str], list[str]]:
    """The command in the header that starts one of our scripts, as the words before the script and
    after it.
    """
    comment = "\n".join(
        line.removeprefix("#").strip()
        for line in path.read_text().splitlines()
        if line.startswith("#")
    )
    commands = re.findall(
        r"^(?:open-instruct|torchrun|python|sbatch) (?:.*\\\n)*.*$", comment, flags=re.MULTILINE
    )
    ours = f"open-instruct {path.parent.name} "
    (command,) = (
        command for command in commands if "open_instruct/" in command or command.startswith(ours)
    )
    words = shlex.split(command.replace("\\\n", " "))
    if command.startswith(ours):
        return words[:2], words[2:]
    on_deepspeed = path in GRPO_FILES and read(path).parallel.backend == "deepspeed"
    script = words.index(
        "open_instruct/grpo_fast.py" if on_deepspeed else SCRIPTS[path.parent.name]
    )
    return words[:script], words[script + 1 :]


def test_all_files_of_configs_are_known() -> None:
    assert {path.parent.name for path in FILES} == set(KINDS)
    assert sorted((REPOSITORY / "configs").rglob("*.*")) == FILES


@pytest.mark.parametrize("path", FILES, ids=name_of)
class TestFile:
    def test_flags_are_good(self, path: Path) -> None:
        assert KINDS[path.parent.name].validate(read(path)) == []

    def test_launch_command_starts_this_file(self, path: Path) -> None:
        _, ours = launch_words(path)
        assert ours[0] == str(path.relative_to(REPOSITORY))
        assert KINDS[path.parent.name].validate(read(path, *ours[1:])) == []


@pytest.mark.parametrize("path", TORCHRUN_FILES, ids=name_of)
class TestTorchrunFile:
    def test_global_batch_is_what_the_header_says(self, path: Path) -> None:
        optim = read(path).optim
        world = layout_of(path).data_parallel_world_size
        num_rows = optim.per_device_train_batch_size * optim.gradient_accumulation_steps * world
        unit = units_of(path.parent.name)
        if getattr(read(path).data, "packing_strategy", "step") == "bfd":
            unit = "rows"
        assert num_rows == int(header(path)[f"global_batch_{unit}"])

    def test_launch_command_names_these_nodes(self, path: Path) -> None:
        (_, *launcher), ours = launch_words(path)
        if launcher == [path.parent.name]:
            assert [int(read(path, *ours[1:]).parallel.num_processes)] == nodes(path)
            return
        flags = dict(zip(launcher[::2], launcher[1::2], strict=True))
        num_nodes = int(flags.get("--nnodes", "1"))
        assert [int(flags.get("--nproc_per_node", "1"))] * num_nodes == nodes(path)


@pytest.mark.parametrize("path", GRPO_FILES, ids=name_of)
class TestGRPOFile:
    def test_steps_are_what_the_header_says(self, path: Path) -> None:
        config, words = read(path), header(path)
        assert config.num_completions_per_step == int(words["completions_per_step"])
        assert config.num_steps == int(words["num_steps"])

    def test_learners_and_engines_take_all_devices(self, path: Path) -> None:
        config = read(path)
        assert FleetShape.of(config.fleet, config.parallel).num_devices == sum(nodes(path))

    def test_each_node_has_room_for_its_learners(self, path: Path) -> None:
        learners = read(path).parallel.num_learners_per_node
        assert len(learners) <= len(nodes(path))
        assert all(
            num <= gpus
            for num, gpus in zip(
                sorted(learners), sorted(nodes(path))[-len(learners) :], strict=True
            )
        )

    def test_launch_command_names_these_nodes(self, path: Path) -> None:
        launcher, ours = launch_words(path)
        if len(nodes(path)) == 1:
            assert launcher == ["python"]
            assert read(path, *ours[1:]).fleet.ray_address is None
        else:  # the script adds --ray_address
            assert launcher == ["sbatch", "--nodes", str(len(nodes(path))), CLUSTER_SCRIPT]
            assert (REPOSITORY / CLUSTER_SCRIPT).is_file()


FOR_GPUS = [path for path in FILES if "device_memory_gib" in header(path)]


def test_configs_for_gpus_name_models_that_a_plan_knows() -> None:
    """The tiny ones name folders that a demo leaves beside them, or has not left yet."""
    assert [path for path in FILES if is_built_in(model_of(path))] == FOR_GPUS


@pytest.mark.parametrize("path", FOR_GPUS, ids=name_of)
def test_plan_fits_with_room(path: Path) -> None:
    memory_gib = header(path)["device_memory_gib"]
    gpu = "h100" if memory_gib == "80" else f"memory_gib={memory_gib}"
    words = [path.parent.name, str(path), "--gpus_per_node", *map(str, nodes(path)), "--gpu", gpu]
    assert make_plan(parse_request(words).setting).has_room


def test_only_files_that_say_so_straddle_nodes() -> None:
    straddling = [path.stem for path in FILES if layout_of(path).straddles_nodes]
    says_so = [path.stem for path in FILES if "`layout` warns of it" in path.read_text()]
    assert len(straddling) > 1
    assert straddling == says_so
