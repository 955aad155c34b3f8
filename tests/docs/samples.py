"""What a page's reader brings, made tiny: models, rows, runs that have ended; and flags that make
commands short.
"""

import csv
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from open_instruct.data.chat import ChatFormat
from open_instruct.data.sampled.sampled_rows import SampledBranch, write_sampled
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.objectives.registry import OBJECTIVES
from scripts.demo_data.pairs import write_synthetic_preferences
from scripts.demo_data.sums import write_arithmetic
from tests.docs.pages import REPOSITORY
from tests.unit.token_folders import write_token_folder

# What is not run, by how a command begins or what is in it, and why.
LEFT_OUT = {
    r"^make ": (
        "minutes, or another machine: tests/house/test_demo.py holds the demos' parts, CI runs "
        "them whole"
    ),
    r"^(pip|python3) ": "downloads, and what is run with them",
    r"^(hf|lm_eval) |openai/gsm8k|DAPO-Math-17k": "needs the hub",
    r"^curl |^open-instruct serve": "a server: tests/fleet/test_serving.py",
    r"get-model|chat smollm": "downloads: tests/unit/commands/test_get_model.py",
    r"recipe_rows|smollm2_135m": (
        "minutes, on a real model: tests/house/test_configs.py checks the files, and "
        "tests/house/test_demo.py the rows"
    ),
    r"--watch": "serves until it is ended: tests/unit/report/test_live_page.py",
    r"^sbatch|launch_multi_node\.sh": "nodes: tests/house/test_scripts.py, with stubs of torchrun and Slurm",
    r"grpo_fast\.py": "settings for 24 GPUs: tests/fleet/test_grpo.py runs it on two learners under stage 3",
    r"gpu_check": (
        "minutes: tests/house/test_gpu_check.py runs it with other checks, and rehearses cheap ones"
    ),
    r"python -m tests\.": "minutes: tests/fake_cuda runs the same, in parts",
    r"benchmarks/": "minutes of measuring, often beside TRL: no test runs them",
    r"mcp:|openenv:|verifiers:NAME|serper_search": "servers and packages: tests/unit/environments has them",
}
# GRPO's commands are checked, not run, but for these, with so many episodes that they take two
# steps.
FLEETS = {r"--verifier mine\.py:digits": "32", r"--model_name_or_path demo_output/": "128"}

MODELS = ("DIR", "MODEL_DIR", "SMALL", "LARGE", "tiny")
SHORT = {"--max_train_steps": "2", "--per_device_train_batch_size": "2", "--max_seq_length": "96"}
# A file of settings is for models and rows of the hub, and a large batch.
IN_PLACE_OF_A_FILES = {
    "--model_name_or_path": "MODEL_DIR",
    "--mixer_list": "pairs.jsonl 1.0",
    "--gradient_accumulation_steps": "1",
}

# Runs that a page takes for done.
SFT = "open-instruct sft --model_name_or_path MODEL_DIR --mixer_list rows.jsonl 1.0 --output_dir"
EARLIER_RUNS = {
    "after": f"""
        {SFT} OUT
        {SFT} OUT_LORA --use_lora
        open-instruct reward_model --model_name_or_path MODEL_DIR --mixer_list pairs.jsonl 1.0 --output_dir OUT_RM
    """,
    "README": f"{SFT} demo_output/grpo\n",
    "report": f"{SFT} RUN\n{SFT} RUN_TOO --learning_rate 1e-4\n",
}


def find_reason_to_leave_out(command: str) -> str | None:
    return next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, command)), None)


def change_words(words: list[str]) -> list[str]:
    """The same command on tiny things: two ranks for eight, two steps, and GRPO's `--check`."""
    command = " ".join(words)
    more: dict[str, str] = {}
    if "grpo" in words[1]:
        episodes = [number for pattern, number in FLEETS.items() if re.search(pattern, command)]
        more = {"--total_episodes": episodes[0]} if episodes else {"--check": ""}
    elif words[0] == "torchrun" or words[1] in OBJECTIVES or words[1] == "train":
        more = {flag: "2" for flag in ("--nproc_per_node", "--num_processes") if flag in words}
        more |= SHORT
        if any(word.startswith("configs/") for word in words):
            more |= IN_PLACE_OF_A_FILES
    return set_flags(words, more)


def set_flags(words: list[str], values: dict[str, str]) -> list[str]:
    words = list(words)
    for flag, value in values.items():
        if flag in words:
            place = words.index(flag) + 1
            words[place : place + len(value.split())] = value.split()
        else:
            words += [flag, *value.split()]
    return words


def lay_out(folder: Path, page: Path, script: str, model: Path) -> None:
    """Make in `folder` what the page's script names and does not make itself;

    `model` stands for all models.
    """
    for name in ("configs", "open_instruct"):
        (folder / name).symlink_to(REPOSITORY / name)
    named = set(re.findall(r"[\w./]+", script))
    if any(name.startswith("configs/") for name in named):
        named |= {"MODEL_DIR", "pairs.jsonl"}
    if any(name.startswith("demo_output/") for name in named):
        write_demo(folder / "demo_output", model)
    for name in named & set(MODELS):
        if f"tiny-model {name} " not in script:
            (folder / name).symlink_to(model)
    if "TOKENS_DIR" in named:
        document = (range(5, 45), [0] * 20 + [1] * 20)
        write_token_folder(folder / "TOKENS_DIR", [document] * 8)
    if "sessions.jsonl" in named:
        write_rows(folder / "sessions.jsonl", list(draw_sessions(model)))
    for name, rows in draw_rows(folder, page):
        is_made = f"> {name}" in script or f"--output {name}" in script
        if name in named and not is_made:
            write_rows(folder / name, rows)


def write_demo(demo: Path, model: Path) -> None:
    """What `make demo-grpo` leaves for the next run."""
    shutil.copytree(model, demo / "sft" / "hf_model")
    (demo / "arithmetic").mkdir()
    write_arithmetic(demo / "arithmetic", num_sft_rows=1, num_prompts=64, num_held_out=8, seed=0)


def draw_rows(folder: Path, page: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The name of each file that a page may speak of, with its rows."""
    path = folder / "drawn.jsonl"
    write_synthetic_preferences(path, num_rows=8, seed=1)
    pairs = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    chats = [{"messages": row["chosen"]} for row in pairs]
    prompts = [{"prompt": "1 + 1?", "ground_truth": "2", "dataset": "gsm8k"}] * 8
    of_page = {
        "after": chats,
        "README": chats,
        "report": chats,
        "your_own_loss": [{"question": "One?", "answer": str(n)} for n in range(8)],
    }
    yield "rows.jsonl", of_page.get(page.stem, pairs)
    yield "pairs.jsonl", pairs
    yield "pairs.json", pairs
    yield "held_out.jsonl", pairs
    yield "chats.jsonl", chats
    yield "chats.csv", [{"dialogue": json.dumps(chat["messages"])} for chat in chats]
    yield "labelled.jsonl", [chat | {"label": n % 2 == 0} for n, chat in enumerate(chats)]
    yield "prompts.jsonl", prompts
    yield "prompts.csv", prompts
    yield "corpus.jsonl", [{"title": "Sums", "text": "One and one are two."}]


def draw_sessions(model: Path) -> Iterator[dict[str, Any]]:
    """What `open-instruct serve --record` would write: four sessions of each of eight prompts."""
    chat = ChatFormat.choose(load_tokenizer(str(model), flag="model"), None)
    end = chat.turn_end_token_ids()[-1:]
    for number in range(32):
        question = {"role": "user", "content": f"{number // 4}?"}
        text, _ = chat.render([question], ())
        prompt, reply = map(tuple, chat.tokenize([text, str(number)]))
        branch = SampledBranch(
            chat_format=chat.fingerprint,
            temperature=1.0,
            top_p=1.0,
            prompt_token_ids=prompt,
            token_ids=reply + end,
            replies=((0, len(reply + end)),),
            numbers=(0,),
            turns=(1,),
            logprobs=(-1.0,) * len(reply + end),
            is_cut=False,
        )
        yield {
            "messages": [question, {"role": "assistant", "content": str(number)}],
            "session": str(number),
            "agent": "",
            "reward": float(number % 4),
            "sampled": write_sampled(branch),
        }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
