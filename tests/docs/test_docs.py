"""README and docs, pasted: every page's blocks from top to bottom into one folder, which begins
empty.

Every command is parsed, too. What a page asks its reader to bring is there, tiny (`samples.py`);
what is not run, and why, stands in `LEFT_OUT`. GRPO's commands are checked by `--check`, but for
those in `FLEETS`, which run.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from open_instruct.cli import COMMANDS
from open_instruct.commands.plan import parse_request
from open_instruct.commands.preview import parse_request as parse_preview
from open_instruct.commands.run_flags import parse_run
from open_instruct.objectives.registry import OBJECTIVES, load_objective
from open_instruct.training.deepspeed.grpo_flags import GRPOFastConfig
from tests.docs.pages import PAGES, REPOSITORY, commands_of, find_blocks, write_script
from tests.docs.samples import EARLIER_RUNS, LEFT_OUT, lay_out
from tests.docs.terminal import Terminal
from tests.ranks.shallow import write_shallow_model
from tests.unit.run.hub.fake_hub import FakeHub, fake_hub

# --- every command is parsed
# ----------------------------------------------------------------------------

# Those of the programs that start ours, and have a value each.
LAUNCHER_FLAGS = {"--rdzv_backend", "--rdzv_endpoint", "--nproc_per_node", "--nodes"}
# Of a plan, which reads the shape of a model that a page has made.
SHAPE_OF_TINY = "allenai/OLMo-2-0425-1B"
SCRIPT = re.compile(r"(?:open_instruct|benchmarks|scripts|tests)/\S+")
PLACEHOLDER = re.compile(r"[A-Z_]+(?:\.\w+)?|NAME|\[.*")
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
    objective = load_objective("grpo" if of_grpo else name)
    objective.validate(
        parse_run(GRPOFastConfig if name == "grpo_fast" else objective.config_class, words)
    )


def test_pages_have_commands() -> None:
    assert len(COMMANDS_OF_PAGES) > 40


@pytest.mark.parametrize("command", COMMANDS_OF_PAGES)
def test_command_of_a_page_is_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert {
            word.partition("=")[0] for word in words[: scripts[-1]] if word.startswith("--")
        } <= LAUNCHER_FLAGS
        name, words = Path(words[scripts[-1]]).stem, words[scripts[-1] + 1 :]
    else:
        program = REPOSITORY / words[scripts[0]]
        sources = "".join(
            path.read_text() for path in ([program] if program.is_file() else program.rglob("*.py"))
        )
        shared = "".join(
            path.read_text() for path in (REPOSITORY / "benchmarks" / "harness").glob("*.py")
        )
        for word in words[scripts[0] + 1 :]:
            assert not word.startswith("--") or f'"{word}"' in sources + shared
        return
    if name in OBJECTIVES or name.startswith("grpo"):
        check_flags_of_a_run(name, words)
    elif name == "preview":
        parse_preview(words)
    elif name == "plan" and "|" not in words[0]:
        parse_request([SHAPE_OF_TINY if word == "tiny" else word for word in words])


# --- pages are pasted
# ----------------------------------------------------------------------------------

SCRIPTS = {page: script for page in PAGES if (script := write_script(page))}
PASTED = [
    pytest.param(
        page,
        id=page.stem,
        marks=pytest.mark.slow if page.stem in ("README", "quick_start") else pytest.mark.extended,
    )
    for page in SCRIPTS
]


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def terminal(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path_factory.mktemp("terminal"), hub.endpoint)
    yield terminal
    terminal.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shallow_model(
        tmp_path_factory.mktemp("model") / "tiny", family="olmo2", is_narrow=False
    )


@pytest.mark.parametrize("page", PASTED)
def test_blocks_of_a_page_run_in_their_order_in_one_folder(
    page: Path, terminal: Terminal, model: Path, tmp_path: Path
) -> None:
    script = EARLIER_RUNS.get(page.stem, "") + SCRIPTS[page]
    lay_out(tmp_path, page, script, model)
    output = terminal.paste(script, tmp_path)
    if page.stem in CHECKS:
        CHECKS[page.stem](tmp_path, output)


def check_readme(folder: Path, output: str) -> None:
    assert "$ open-instruct chat demo_output/grpo" in output
    assert (folder / "demo_output" / "grpo" / "report.html").is_file()


def check_quick_start(folder: Path, output: str) -> None:
    assert "training data: kept in" in output
    assert (folder / "OUT" / "hf_model" / "model.safetensors").is_file()


def check_grpo(folder: Path, _: str) -> None:
    rows = read_metrics(folder / "OUT")
    assert [row["step"] for row in rows] == [1, 2]
    assert "eval/reward" in rows[-1] and "verifier/gsm8k" in rows[-1]
    assert json.loads((folder / "OUT" / "layout.json").read_text())["shard_groups"] == [[0, 1]]


def check_rewards(folder: Path, _: str) -> None:
    rows = read_metrics(folder / "digits")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 <= row["verifier/digits"] < 1 for row in rows) and any(
        row["reward"] for row in rows
    )


def read_metrics(run: Path) -> list[dict[str, Any]]:
    assert (run / "hf_model" / "model.safetensors").is_file()
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


CHECKS: dict[str, Callable[[Path, str], None]] = {
    "README": check_readme,
    "quick_start": check_quick_start,
    "grpo": check_grpo,
    "rewards": check_rewards,
}


@pytest.mark.parametrize("pattern", LEFT_OUT)
def test_reason_to_leave_out_belongs_to_a_command(pattern: str) -> None:
    lines = [
        line for script in SCRIPTS.values() for line in script.replace("\\\n", " ").splitlines()
    ]
    assert any(re.search(pattern, line) for line in lines)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```json\n" in page.read_text()], ids=lambda page: page.stem
)
def test_rows_of_a_page_are_whole_lines(page: Path) -> None:
    for block in find_blocks(page):
        if block.language == "json":
            assert all(json.loads(line) for line in block.text.splitlines())


@pytest.mark.parametrize("page", SCRIPTS, ids=lambda page: page.stem)
def test_runs_of_a_page_have_folders_of_their_own(page: Path) -> None:
    """Another run would be refused there; the same one goes on."""
    runs: dict[str, str] = {}
    for command in commands_of(page):
        folder = re.search(r"--output_dir (\S+)", command)
        model = re.search(r" (\w+ --model_name_or_path \S+ --mixer_list \S+)", command)
        if folder and "open-instruct check" not in command and "migrate-args" not in command:
            run = model[1] if model else command
            assert runs.setdefault(folder[1], run) == run
