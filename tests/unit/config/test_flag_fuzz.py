"""Drawn command lines: whatever is typed, the answer is a config, a plan or an InputError."""

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from open_instruct.commands.layout import main as layout_command
from open_instruct.commands.plan import PlanFlags
from open_instruct.commands.plan import main as plan_command
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.flags import Flag, list_flags
from open_instruct.config.resolved import as_flat_dict, refuse_conflicts, write_config
from open_instruct.core.errors import InputError
from open_instruct.objectives.registry import build_config_class, load_objective
from open_instruct.parallel.layout import find_layout

RUNS = {name: load_objective(name) for name in ("dpo", "kto", "sft", "grpo")}
NUMBERS = [
    *(
        "0",
        "1",
        "2",
        "3",
        "4",
        "8",
        "16",
        "64",
        "-1",
        "1_0",
        "+4",
        " 5 ",
        "٣",
        "²",
        "1e3",
        "1.5",
        "0.5",
        "1.0",
        "-0.0",
    ),
    *(
        "1e-300",
        "1e308",
        "-1e308",
        "1e999",
        "nan",
        "inf",
        "2147483647",
        "2147483648",
        "9223372036854775808",
    ),
    *("9" * 19, "9" * 400, "-" + "9" * 400, "9" * 5000, "0x10", "1e-3"),
]
ODD = [
    *(
        "",
        " ",
        "none",
        "null",
        "true",
        "false",
        "~",
        "~nobody/x",
        "\0",
        "a\0b",
        "\udc80",
        "é",
        "a" * 300,
        "x/" * 3000,
    ),
    *(
        "/",
        ".",
        "..",
        "-",
        "=",
        "8x8",
        "0x0",
        "99999x1",
        "1x99999",
        "x",
        "mine:Class",
        ":",
        "a:",
        "wandb",
        "**",
        "[",
    ),
    *(
        "memory_gib=40",
        "memory_gib=1e308",
        "memory_gib=1e-308",
        "memory_gib=nan",
        "h100",
        "blocks.*",
        "blocks.*.[",
    ),
]
STRANGE_YAML = [
    *(
        "[" * 2000,
        "{a: " * 2000,
        "- " * 2000,
        "&a [*a]",
        "? [a]: b",
        "beta: !!python/name:os.system",
        "\t- :",
        "%Y",
    ),
    "",
]
MODELS = ["model", "allenai/OLMo-2-0425-1B", "Qwen/Qwen3-0.6B", "OLMo-2-1124-7B"]


def words_of(flag: Flag, draw: random.Random) -> list[str]:
    """What someone might type after a flag: mostly a value of its kind, sometimes anything."""
    if draw.random() < 0.1:
        return draw.sample([*NUMBERS, *ODD], draw.randint(0, 3))
    if flag.choices:
        return [draw.choice(flag.choices)]
    if flag.name == "model_name_or_path":
        return [draw.choice([*MODELS, *ODD])]
    if flag.kind is list:
        return draw.choices(
            NUMBERS if flag.item_kind is int else [*NUMBERS, *ODD], k=draw.randint(0, 4)
        )
    if flag.kind is bool:
        return draw.choice([[], ["true"], ["false"]])
    if flag.kind is str:
        return [draw.choice(ODD)]
    return [draw.choice(NUMBERS[:12] if draw.random() < 0.6 else NUMBERS)]


def line_of(config_class: type, draw: random.Random) -> list[str]:
    """A command line: what must be given, mostly as it should be, and a few flags more."""
    given = {
        "model_name_or_path": [draw.choice(MODELS)],
        "mixer_list": ["rows.jsonl", "1.0"],
        "dataset_mixer_list": ["rows.jsonl", "1.0"],
        "output_dir": ["out"],
    }
    flags = list_flags(config_class)
    given = {name: words for name, words in given.items() if name in flags}
    for flag in draw.sample(list(flags.values()), draw.choice([1, 1, 1, 2, 3, 6])):
        given[flag.name] = words_of(flag, draw)
    return [word for name, words in given.items() for word in (f"--{name}", *words)]


def run(line: Sequence[str], name: str, draw: random.Random, folder: Path) -> None:
    config_class = RUNS[name].config_class
    config = parse_run(config_class, line)
    RUNS[name].validate(config)
    nodes = (
        config.parallel.num_learners_per_node
        if name == "grpo"
        else draw.choice([(1,), (8,), (8, 8), (2, 4)])
    )
    find_layout(config.parallel, nodes, config.backend)
    write_config(config, folder / "config.yaml")
    saved = parse_run(config_class, [str(folder / "config.yaml")])
    assert saved == config
    refuse_conflicts(as_flat_dict(saved), config)


def plan(line: Sequence[str], name: str, draw: random.Random, folder: Path) -> None:
    words = [] if draw.random() < 0.1 else ["--gpus_per_node", draw.choice(["1", "8", "4x8"])]
    plan_command([name, *line, *(words if "--gpus_per_node" not in line else [])])


def from_yaml(line: Sequence[str], name: str, draw: random.Random, folder: Path) -> None:
    """The same words as a file, and sometimes what no one would write by hand."""
    rows = [
        f"{word[2:]}: {json.dumps(value)}"
        for word, value in pairwise(line)
        if word.startswith("--")
    ]
    (folder / "run.yaml").write_text(
        "\n".join(rows + draw.choices(STRANGE_YAML, k=draw.randint(0, 1))), "utf-8"
    )
    run([str(folder / "run.yaml")], name, draw, folder)


def show_layout(draw: random.Random) -> None:
    flags = [f"--{name}" for name in ("fsdp_shard_degree", "fsdp_num_replicas")]
    flags += [f"--{what}_parallel_degree" for what in ("tensor", "context", "expert")]
    line = [
        "--gpus_per_node",
        *draw.choices(["1", "2", "8", "4x8", *NUMBERS, *ODD], k=draw.randint(1, 3)),
    ]
    for flag in draw.sample([*flags, "--json", "--single_gpu_mode"], 2):
        line += [flag, draw.choice([*NUMBERS, *ODD, "7B"])]
    assert layout_command(line) == 0


@pytest.mark.parametrize(
    "seeds",
    [
        range(80),
        pytest.param(range(80, 1600), marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_every_refusal_is_an_input_error(
    seeds: range,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same lines in every run; what fails names its seed."""
    monkeypatch.chdir(tmp_path)  # pages that --html names are written
    num_accepted = 0
    for seed in seeds:
        draw = random.Random(seed)
        name, walk = draw.choice([*RUNS]), draw.choice([run, run, run, run, from_yaml, plan, None])
        more = {"plan": PlanFlags} if walk is plan else {}
        line = line_of(build_config_class(name, **more), draw)
        try:
            if walk is None:
                show_layout(draw)
            else:
                walk(line, name, draw, tmp_path)
            num_accepted += 1
        except InputError as refusal:
            if not str(refusal).strip():
                pytest.fail(f"seed {seed}: refused without a word")
        except Exception as error:
            pytest.fail(
                f"seed {seed}: {type(error).__name__}: {error} of {name} "
                f"{[word[:80] for word in line]}"
            )
        finally:
            capsys.readouterr()
    assert len(seeds) / 8 < num_accepted < len(seeds) * 7 / 8  # neither all nothing nor all well
