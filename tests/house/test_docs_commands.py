"""Every command that README and docs show: its program is there, and takes the flags that it is shown with.

Those that can be run here are, by tests/ranks/test_docs_run.py; blocks of Python run in the tests of what they show.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from open_instruct.cli import COMMANDS
from open_instruct.config.parser import parse
from open_instruct.learner.deepspeed.grpo_flags import GRPOFastConfig
from open_instruct.objectives.registry import OBJECTIVES, objective_named
from open_instruct.planning.request import parse_request
from open_instruct.preview.command import parse_request as parse_preview

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(?:open-instruct|torchrun|python|sbatch|scripts/\S+) ")
# Those of the programs that start ours, and have a value each.
LAUNCHER_FLAGS = {"--rdzv_backend", "--nproc_per_node", "--nodes"}
SCRIPT = re.compile(r"(?:open_instruct|benchmarks|scripts|tests)/\S+")
PLACEHOLDER = re.compile(r"[A-Z_]+(?:\.\w+)?|NAME|\[.*")


def commands_of(page: Path) -> Iterator[str]:
    """Those that stand in its blocks, each on one line, without what they print."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        if language not in ("", "bash", "console"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            command = line.removeprefix("$ ").partition("  # ")[0].strip()
            if PROGRAM.match(f"{command} ") and (language != "console" or line.startswith("$ ")):
                yield command


COMMANDS_OF_PAGES = [
    pytest.param(command, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, command in enumerate(commands_of(page))
]


def check_flags_of_a_run(name: str, words: list[str]) -> None:
    """`FILE.yaml` stands for some file of settings, which has what the command itself lacks."""
    words = [word for word in words if not (word.endswith(".yaml") and PLACEHOLDER.fullmatch(word))]
    of_grpo = name.startswith("grpo")
    needed = {"--model_name_or_path": ["M"], "--output_dir": ["O"]}
    needed["--dataset_mixer_list" if of_grpo else "--mixer_list"] = ["R.jsonl", "1.0"]
    for flag, values in needed.items():
        words += [] if flag in words else [flag, *values]
    objective = objective_named("grpo" if of_grpo else name)
    objective.validate(parse(GRPOFastConfig if name == "grpo_fast" else objective.config_class, words))


def test_blocks_are_found() -> None:
    assert len(COMMANDS_OF_PAGES) > 40


@pytest.mark.parametrize("command", COMMANDS_OF_PAGES)
def test_it_can_be_given(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    words = shlex.split(command, comments=True)
    while "=" in words[0] and not words[0].startswith("-"):
        words = words[1:]
    if words[1:2] == ["-m"]:
        words[1:3] = [f"{words[2].replace('.', '/')}.py"]
    scripts = [index for index, word in enumerate(words) if SCRIPT.fullmatch(word)]
    assert all((REPOSITORY / words[index]).exists() for index in scripts)
    if words[0] == "open-instruct":
        assert words[1].split("|")[0] in COMMANDS
        name, words = words[1], words[2:]
    elif scripts and words[scripts[-1]].startswith("open_instruct/"):
        assert {word.partition("=")[0] for word in words[: scripts[-1]] if word.startswith("--")} <= LAUNCHER_FLAGS
        name, words = Path(words[scripts[-1]]).stem, words[scripts[-1] + 1 :]
    else:
        program = REPOSITORY / words[scripts[0]]
        sources = "".join(path.read_text() for path in ([program] if program.is_file() else program.rglob("*.py")))
        shared = "".join(path.read_text() for path in (REPOSITORY / "benchmarks" / "harness").glob("*.py"))
        for word in words[scripts[0] + 1 :]:
            assert not word.startswith("--") or f'"{word}"' in sources + shared
        return
    if name in OBJECTIVES or name.startswith("grpo"):
        check_flags_of_a_run(name, words)
    elif name == "preview":
        parse_preview(words)
    elif name == "plan" and "|" not in words[0]:
        parse_request(words)
