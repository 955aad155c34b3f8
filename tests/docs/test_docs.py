"""The commands and cells of README and docs, as they stand there.

Every command is parsed. It is run too, on tiny models and rows and for two steps, unless `NOT_RUN` gives the reason why
it is not, or names the test that runs it. The page for notebooks is run as a notebook, and once more as a program.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from transformers import AutoModelForCausalLM

from open_instruct.cli import COMMANDS
from open_instruct.config.parser import parse
from open_instruct.learner.deepspeed.grpo_flags import GRPOFastConfig
from open_instruct.objectives.registry import OBJECTIVES, objective_named
from open_instruct.planning.request import parse_request
from open_instruct.preview.command import parse_request as parse_preview
from scripts.demo_data.sums import write_arithmetic
from tests.docs.commands import run_all
from tests.docs.pages import PAGES, REPOSITORY, commands_of
from tests.docs.samples import lay_out, prepared, words_of
from tests.fleet.grpo_case import finished, started
from tests.ranks.fork_server import Forked
from tests.ranks.shallow import write_shallow_model
from tests.unit.run.fake_hub import fake_hub

DOCS = REPOSITORY / "docs"
README = REPOSITORY / "README.md"

# --- every command is parsed ----------------------------------------------------------------------------

# Those of the programs that start ours, and have a value each.
LAUNCHER_FLAGS = {"--rdzv_backend", "--nproc_per_node", "--nodes"}
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
    objective = objective_named("grpo" if of_grpo else name)
    objective.validate(parse(GRPOFastConfig if name == "grpo_fast" else objective.config_class, words))


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


# --- commands are run -----------------------------------------------------------------------------------

# What is not run here, by how its command begins or what is in it, and why.
NOT_RUN = {
    r"grpo_fast\.py": "settings for 24 GPUs: tests/fleet/test_grpo.py runs it on two learners under stage 3",
    r"open-instruct grpo |grpo_olmo_core_actor\.py": "a fleet: below, and tests/fleet/test_grpo_folders.py",
    r"open-instruct replay": "needs a GRPO run with traces: tests/ranks/test_replay.py",
    r"open-instruct (chat|serve)": "needs a run: tests/unit/commands/test_chat.py, tests/fleet/test_serving.py",
    r"open-instruct merge": "needs an adapter: tests/unit/run/test_merge_command.py",
    r"open-instruct score": "needs a reward model: tests/unit/run/test_score_command.py",
    r"sbatch|launch_multi_node\.sh": "nodes: tests/house/test_scripts.py, with stubs of torchrun and Slurm",
    r"gpu_check": "minutes: tests/house/test_gpu_check.py runs it with other checks, and rehearses cheap ones",
    r"python -m tests\.": "minutes: tests/fake_cuda runs the same, in parts",
    r"benchmarks/": "minutes of measuring, often beside TRL: no test runs them",
    r"dpo\|kto": "a pattern of commands",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A command of a page, to be run in `folder`."""

    page: Path
    command: str
    folder: Path
    words: list[str]


def reason_of(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), None)


def test_reason_for_not_running_belongs_to_a_command() -> None:
    commands = [command for page in PAGES for command in commands_of(page)]
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, command) for command in commands)] == []


@pytest.mark.extended
def test_first_run_of_the_readme_works_in_an_empty_folder(tmp_path: Path) -> None:
    """As it stands on the page, but for a number of steps that teaches nothing more."""
    (block,) = (each for each in README.read_text().split("```\n") if "cat > rows.jsonl" in each)
    environment = Path(sys.executable).parent
    (tmp_path / ".venv").symlink_to(environment.parent)
    done = subprocess.run(
        ["bash", "-euc", block.replace("--max_train_steps 20", "--max_train_steps 2")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OPEN_INSTRUCT_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "training data: kept in" in done.stdout
    assert (tmp_path / "OUT" / "hf_model" / "model.safetensors").is_file()


@pytest.mark.extended
def test_every_command_of_a_page_runs(tmp_path: Path) -> None:
    models = {name: write_shallow_model(tmp_path / "models" / name, family=name) for name in ("olmo2", "qwen3")}
    shown: list[Shown] = []
    for page in PAGES:
        commands = [command for command in commands_of(page) if reason_of(command) is None]
        folder = tmp_path / page.stem
        if commands:
            lay_out(folder, models["qwen3" if "--family qwen3" in page.read_text() else "olmo2"])
        for words in prepared(folder, page) if commands else []:
            shown.append(Shown(page=page, command=shlex.join(words), folder=folder, words=words))
        for command in commands:
            words = words_of(command)
            if "--output_dir" in words:  # a page may show several runs with one name for their folder
                out = words.index("--output_dir") + 1
                taken = any(each.page == page and words[out] in each.words for each in shown)
                words[out] += "_TOO" if taken else ""
            if words[1:3] == ["tiny-model", "tiny"]:
                words[2] = f"tiny_by_itself_{len(shown)}"
            shown.append(Shown(page=page, command=command, folder=folder, words=words))
    # Ranks are forked from a process that has not been in a process group itself.
    shown.sort(key=lambda each: not {"--num_processes", "--nproc_per_node"} & set(each.words))
    told_at = tmp_path / "outcomes.json"
    with fake_hub() as hub:
        environment = {"HF_TOKEN": "hf_of_a_test", "OPEN_INSTRUCT_CACHE": str(tmp_path / "cache"), "COLUMNS": "100"}
        asked = [(str(each.folder), each.words) for each in shown]
        process = Forked(run_all, asked, hub.endpoint, told_at, environment=environment, cwd=tmp_path)
        told, _ = process.communicate(timeout=800)
    assert process.returncode == 0, told[-4000:]
    outcomes = json.loads(told_at.read_text())
    assert len(outcomes) == len(shown) > 30
    for each, (code, said, _) in zip(shown, outcomes, strict=True):
        # A refusal is right where the page shows it.
        sentence = said.strip().splitlines()[-1] if said.strip() else ""
        assert code == 0 or (code == 2 and sentence in each.page.read_text()), (
            f"{each.page.name}: {each.command}\n{said}"
        )
    assert "us/mine" in hub.files


def rows_of_run(page: Path, part: str, folder: Path, *, num_episodes: int) -> list[dict[str, Any]]:
    """Run in `folder` the page's command that has `part` in it, for so many episodes; its metrics."""
    (command,) = (command for command in commands_of(page) if part in command)
    program, *words = shlex.split(command)
    file, *words = ["open_instruct/cli.py", *words] if program == "open-instruct" else words
    words[words.index("--total_episodes") + 1] = str(num_episodes)
    said = finished(started([str(REPOSITORY / file), *words], cwd=folder), exit_code=0)
    assert "step 2/2" in said
    output_dir = folder / words[words.index("--output_dir") + 1]
    assert (output_dir / "hf_model" / "model.safetensors").is_file()
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.extended
def test_grpo_with_a_reward_function_runs_as_rewards_md_shows(tmp_path: Path) -> None:
    """docs/rewards.md, with the file and the prompts that it shows."""
    page = DOCS / "rewards.md"
    text = page.read_text()
    write_shallow_model(tmp_path / "tiny", family="olmo2", is_narrow=False)
    (tmp_path / "mine.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    prompts = text[text.index("for n in $(seq 100)") : text.index("open-instruct grpo --verifier mine.py")]
    subprocess.run(["bash", "-ec", prompts], cwd=tmp_path, check=True)
    rows = rows_of_run(page, "--verifier mine.py", tmp_path, num_episodes=32)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 <= row["verifier/digits"] < 1 for row in rows) and any(row["reward"] for row in rows)


@pytest.mark.extended
def test_grpo_runs_as_grpo_md_shows(tmp_path: Path) -> None:
    """docs/grpo.md, with what `make demo-grpo` leaves."""
    demo = tmp_path / "demo_output"
    write_shallow_model(demo / "sft" / "hf_model", family="olmo2", is_narrow=False)
    (demo / "arithmetic").mkdir()
    write_arithmetic(demo / "arithmetic", num_sft_rows=1, num_prompts=64, num_held_out=8, seed=0)
    rows = rows_of_run(DOCS / "grpo.md", "grpo_olmo_core_actor.py --", tmp_path, num_episodes=128)
    assert [row["step"] for row in rows] == [1, 2]
    assert "eval/reward" in rows[-1] and "verifier/gsm8k" in rows[-1]
    assert json.loads((tmp_path / "OUT" / "layout.json").read_text())["shard_groups"] == [[0, 1]]


# --- the page for notebooks -----------------------------------------------------------------------------

NOTEBOOK = DOCS / "notebook.md"
TIMEOUT_S = 600
# Between the cells of the page: a run of GRPO is interrupted, and the page's comes after it in that process.
INTERRUPTED = """
import os, signal

class Interrupting(Callback):
    steps = []
    def log_metrics(self, step, metrics):
        self.steps.append(step)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

sizes = {"num_unique_prompts_rollout": 2, "num_samples_per_prompt_rollout": 2, "total_episodes": 8}
lengths = {"response_length": 8, "max_prompt_token_length": 32}
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
try:
    fit(GRPO, prompts=prompts, reward=digits, model_name_or_path="tiny", output_dir="interrupted",
        callbacks={"at once": Interrupting()}, param_dtype="float32", **sizes, **lengths)
except KeyboardInterrupt:
    import ray
    print("INTERRUPTED", Interrupting.steps, ray.is_initialized())
assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
"""


def cells_of_page() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", NOTEBOOK.read_text(), flags=re.MULTILINE | re.DOTALL)


def printed_by(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout")


@pytest.mark.extended
def test_page_for_notebooks_runs_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    folder = tmp_path / "empty"
    folder.mkdir()
    *before, last = cells_of_page()
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in (*before, INTERRUPTED, last)]
    client = NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}})
    client.execute(env={**os.environ, "PYTHONPATH": str(REPOSITORY)})

    *_, interrupted, shown = notebook.cells
    assert "INTERRUPTED [1] False" in printed_by(interrupted)
    rows = [json.loads(line) for line in (folder / "digits" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert f"{[row['reward'] for row in rows]}" in printed_by(shown).splitlines()[-1]
    assert all(row["num_verifier_problems"] == 0 and row["verifier/digits"] == row["reward"] for row in rows)
    assert (folder / "digits" / "hf_model" / "model.safetensors").is_file()
    assert "def digits(completions, **columns):" in (folder / "digits" / "reward.py").read_text()
    assert not list(folder.glob("*/pids.json"))


MORE_CELLS = """
from open_instruct.errors import InputError
def refused(rows, **arguments):
    try:
        fit(DPO, rows, **{"model_name_or_path": "tiny", "output_dir": "bad", "max_seq_length": 128} | arguments)
    except InputError as error:
        print("REFUSED", error.kind, error.flag, "|", str(error).splitlines()[0])

refused([{"chosen": 1}])
refused(rows, max_seq_length=1)
refused([{"chosen": {1, 2}}])
refused(rows[:2], output_dir="out")
Path("own").mkdir()
Path("own/rows.jsonl").write_text("mine")
refused(rows, output_dir="own")
refused(rows, mixer_list=["out/rows.jsonl", 1.0])
refused(rows, reward="math")
from open_instruct.notebook import GRPO
from open_instruct.verifiers.answers import GSM8K
prompts = [{"prompt": "Hi."}]
def short(completions):
    return [-float(len(text)) for text in completions]
def refused_grpo(rows=prompts, **arguments):
    try:
        fit(GRPO, rows, **{"model_name_or_path": "tiny", "output_dir": "bad", "reward": short} | arguments)
    except InputError as error:
        print("REFUSED", error.kind, error.flag, "|", str(error).splitlines()[0])
refused_grpo(reward=lambda completions: [len(prompts)])
refused_grpo(reward="maths")
refused_grpo(num_samples_per_prompt_rollout=1)
refused_grpo(verifier=["math"])
refused_grpo([{"prompt": 3}])
refused_grpo(total_episodes=32, num_unique_prompts_rollout=8, num_samples_per_prompt_rollout=4, report_to=["pigeon"])
class Hooks(Curve):
    def post_step(self): ...
refused_grpo(callbacks={"mine": Hooks()})
Path("own/reward.py").write_text("mine")
Path("own/rows.jsonl").unlink()
refused_grpo(output_dir="own")
import ray
refused_grpo()
Path("own/rows.jsonl").write_text("mine")
flags = {"max_seq_length": 128, "per_device_train_batch_size": 4, "max_train_steps": 1}
evaluated = {"eval_mixer_list": ["out/rows.jsonl", 1.0]}
again = fit(DPO, "out/rows.jsonl", model_name_or_path=fitted.model, output_dir="again", push_to_hub=True, **flags)
print("AGAIN", again.model)
from datasets import Dataset
third = fit(DPO, Dataset.from_list(rows), model_name_or_path="tiny", output_dir="third", **evaluated, **flags)
print("HELD OUT", third.held_out["step"], sorted(third.held_out)[:2])
"""


@pytest.mark.extended
def test_page_for_notebooks_trains_as_a_program_and_names_refused_arguments(tmp_path: Path) -> None:
    (tmp_path / "cells.py").write_text(cells_of_page()[0] + MORE_CELLS)
    command = [sys.executable, "cells.py"]
    with fake_hub() as hub:
        environment = {**os.environ, **hub.environment}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr

    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    assert f"True {[row['rewards/accuracy'] for row in rows]}" in done.stdout
    # In bfloat16 the reference, whose rows are packed otherwise, may differ by a rounding of a logit.
    assert math.isclose(rows[0]["loss"], math.log(2), abs_tol=5e-3) and rows[-1]["loss"] < rows[0]["loss"]
    assert len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 4
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf_model")
    assert not (tmp_path / "bad").exists()
    assert [path.read_text() for path in (tmp_path / "own").iterdir()] == ["mine", "mine"]
    refused = [line.split()[1:3] for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert refused == [
        ["bad_row", "columns"],
        ["out_of_range", "max_seq_length"],
        ["bad_row", "rows"],
        ["other_run", "None"],
        ["other_run", "None"],
        ["conflict", "mixer_list"],
        ["conflict", "reward"],
        ["own_code", "reward"],
        ["bad_value", "verifier"],
        ["conflict", "num_samples_per_prompt_rollout"],
        ["conflict", "verifier"],
        ["bad_row", "columns"],
        ["bad_value", "report_to"],
        ["own_code", "callbacks"],
        ["other_run", "None"],
        ["machine", "None"],
    ], done.stdout
    assert "AGAIN again/hf_model" in done.stdout and "HELD OUT" in done.stdout
    left = {path.name: path.read_bytes() for path in (tmp_path / "again" / "hf_model").iterdir()}
    assert hub.files == {"me/again": left} and hub.cards[0].encode() == left["README.md"]
