"""Tiny models and rows in place of those that a page speaks of."""

import csv
import json
import shlex
import shutil
from pathlib import Path

from open_instruct.objectives.registry import OBJECTIVES
from scripts.demo_data.pairs import write_synthetic_preferences
from tests.docs.pages import REPOSITORY

SHORT = {"--max_train_steps": "2", "--per_device_train_batch_size": "2", "--max_seq_length": "96"}
# A file of settings is for models and rows of the hub, and a large batch.
OF_A_FILE = {"--model_name_or_path": "tiny", "--mixer_list": "rows.jsonl 1.0", "--gradient_accumulation_steps": "1"}
STANDS_FOR = {"DIR": "tiny", "MODEL_DIR": "tiny", "SMALL": "tiny", "LARGE": "tiny", "/tmp/tiny": "tiny_too"}


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
        "steps.jsonl": [{"prompt": "1 + 1?", "completions": ["1 + 1 = 2"], "labels": [True]}] * 8,
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
