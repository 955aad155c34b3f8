"""The commands of README and docs are run as they stand, on tiny models and rows; trainings take two steps.

Those that are not are named with the reason, or with the test that runs them; tests/house/test_docs_commands.py parses
all.
"""

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from open_instruct.objectives.registry import OBJECTIVES
from scripts.demo_data.pairs import write_synthetic_preferences
from tests.house.test_docs_commands import PAGES, commands_of
from tests.ranks.fork_server import REPOSITORY, Forked
from tests.ranks.jobs.docs_commands import run_all
from tests.ranks.shallow import write_shallow_model
from tests.unit.run.fake_hub import fake_hub

pytestmark = pytest.mark.extended

# What is not run here, by how its command begins or what is in it, and why.
NOT_RUN = {
    r"grpo_fast\.py": "settings for 24 GPUs: tests/fleet/test_grpo.py runs it on two learners under stage 3",
    r"open-instruct grpo |grpo_olmo_core_actor\.py": "a fleet: tests/fleet/test_grpo_docs.py and test_grpo_folders.py",
    r"open-instruct replay": "needs a GRPO run with traces: tests/ranks/test_replay.py",
    r"sbatch|launch_multi_node\.sh": "nodes: tests/house/test_scripts.py, with stubs of torchrun and Slurm",
    r"gpu_check": "minutes: tests/house/test_gpu_check.py runs it with other checks, and rehearses cheap ones",
    r"python -m tests\.": "minutes: tests/fake_cuda runs the same, in parts",
    r"benchmarks/": "minutes of measuring, often beside TRL: no test runs them",
    r"dpo\|kto": "a pattern of commands",
}
SHORT = {"--max_train_steps": "2", "--per_device_train_batch_size": "2", "--max_seq_length": "96"}
# A file of settings is for models and rows of the hub, and a large batch.
OF_A_FILE = {"--model_name_or_path": "tiny", "--mixer_list": "rows.jsonl 1.0", "--gradient_accumulation_steps": "1"}
STANDS_FOR = {"DIR": "tiny", "MODEL_DIR": "tiny", "SMALL": "tiny", "LARGE": "tiny", "/tmp/tiny": "tiny_too"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A command of a page, to be run in `folder`."""

    page: Path
    command: str
    folder: Path
    words: list[str]


def reason_of(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), None)


def words_of(command: str) -> list[str]:
    """Tiny things stand for those that the page has, and two ranks for eight."""
    words = shlex.split(command.replace(" [RUN ...]", ""), comments=True)
    words = [STANDS_FOR.get(word, word) for word in words]
    more: dict[str, str] = {}
    if words[0] == "torchrun" or words[1] in OBJECTIVES or words[1] == "train":
        more = {flag: "2" for flag in ("--nproc_per_node", "--num_processes") if flag in words}
        more |= SHORT | (OF_A_FILE if any(word.startswith("configs/") for word in words) else {})
    for flag, value in more.items():
        if flag in words:
            words[words.index(flag) + 1 : words.index(flag) + 1 + len(value.split())] = value.split()
        else:
            words += [flag, *value.split()]
    return words


def lay_out(folder: Path, model: Path) -> None:
    """Every file that a page speaks of, beside what a checkout has."""
    shutil.copytree(model, folder / "tiny")
    for name in ("configs", "open_instruct"):
        (folder / name).symlink_to(REPOSITORY / name)
    pairs = folder / "pairs.jsonl"
    write_synthetic_preferences(pairs, num_rows=8, seed=1)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    chats = [{"messages": row["chosen"]} for row in rows]
    of_page = {"after": chats, "your_own_loss": [{"question": "One?", "answer": str(n)} for n in range(8)]}
    for name, lines in {
        "rows.jsonl": of_page.get(folder.name, rows),
        "chats.jsonl": chats,
        "labelled.jsonl": [chat | {"label": n % 2 == 0} for n, chat in enumerate(chats)],
    }.items():
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "pairs.json").write_text(json.dumps(rows))
    tables = {
        "chats.csv": [{"dialogue": json.dumps(chat["messages"])} for chat in chats],
        "prompts.csv": [{"prompt": "1 + 1?", "ground_truth": "2", "dataset": "gsm8k"}] * 8,
    }
    for name, lines in tables.items():
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


def prepared(folder: Path, page: Path) -> list[list[str]]:
    """What a page takes for done: a run that has ended, a class in a file."""
    trained = ["--model_name_or_path", "tiny", *(word for pair in SHORT.items() for word in pair)]
    if page.stem in ("report", "after"):
        out = "RUN" if page.stem == "report" else "OUT"
        return [["open-instruct", "sft", *trained, "--mixer_list", "chats.jsonl", "1.0", "--output_dir", out]]
    if page.stem == "your_own_loss":
        (folder / "mine.py").write_text(page.read_text().partition("```python\n")[2].partition("```")[0])
    return []


def test_the_first_run_of_the_readme_can_be_pasted_into_an_empty_folder(tmp_path: Path) -> None:
    """As it stands on the page, but for a number of steps that teaches nothing more."""
    (block,) = (each for each in (REPOSITORY / "README.md").read_text().split("```\n") if "cat > rows.jsonl" in each)
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


def test_every_command_that_can_be_is_run(tmp_path: Path) -> None:
    model = write_shallow_model(tmp_path / "model", family="olmo2")
    shown: list[Shown] = []
    for page in PAGES:
        commands = [command for command in commands_of(page) if reason_of(command) is None]
        folder = tmp_path / page.stem
        if commands:
            lay_out(folder, model)
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


def test_a_reason_is_given_for_nothing_that_is_not_there() -> None:
    commands = [command for page in PAGES for command in commands_of(page)]
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, command) for command in commands)] == []
