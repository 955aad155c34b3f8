"""Rows of each objective, made of the same synthetic pairs, and the start models that learn from
them.
"""

import json
import random
from pathlib import Path
from typing import Any

from scripts.demo_data.pairs import write_synthetic_preferences
from tests.ranks.objective_case import read, write
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import NUM_ROWS, STEPS_OF_AN_EPOCH, TrainCase


def write_conversations(path: Path, *, num_rows: int, seed: int) -> None:
    """Conversations of unequal length, some of several turns, some with a system turn."""
    write_synthetic_preferences(path, num_rows=num_rows, seed=seed)
    rows = [row["chosen"] for row in read(path)]
    assert {sum(turn["role"] == "assistant" for turn in row) for row in rows} == {1, 2}
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def write_labelled(pairs: Path, path: Path) -> Path:
    """One reply of each pair, in either form of a row: two desirable ones to each that is not."""
    rows = []
    for number, pair in enumerate(read(pairs)):
        label = number % 3 != 0
        messages = pair["chosen" if label else "rejected"]
        form = (
            {"messages": messages}
            if number % 2
            else {"prompt": messages[:-1], "completion": messages[-1:]}
        )
        rows.append(form | {"label": label})
    return write(path, rows)


def write_pairs(path: Path, *, num_rows: int, seed: int) -> None:
    """Every third pair has no margin."""
    write_synthetic_preferences(path, num_rows=num_rows, seed=seed)
    write(path, [row | ({"margin": 0.25 * n} if n % 3 else {}) for n, row in enumerate(read(path))])


def write_solutions(path: Path, *, num_rows: int, seed: int) -> None:
    """Sums step by step; from the first wrong one on all are. Some labels are soft."""
    draw = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        numbers = [draw.randint(1, 9) for _ in range(draw.randint(2, 6))]
        wrong_from = draw.randint(1, 6)
        total = 0
        steps: list[str] = []
        labels: list[float | bool] = []
        for number, summand in enumerate(numbers):
            is_right = number < wrong_from
            steps.append(f"{total} + {summand} = {total + summand + (not is_right)}")
            labels.append(draw.choice([is_right, 0.9 if is_right else 0.2]))
            total += summand
        rows.append(
            {
                "prompt": f"{' + '.join(map(str, numbers))}?\n",
                "completions": steps,
                "labels": labels,
            }
        )
    write(path, rows)


def write_objective_case(folder: Path, entry: str, *, family: str) -> TrainCase:
    """Model and rows of the command `entry`, and the flags that only it has;

    SFT's model has a tied head.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows, own = folder / "rows.jsonl", dict[str, Any](max_train_steps=STEPS_OF_AN_EPOCH)
    model = write_shallow_model(folder / "model", family=family, tie=entry == "sft")
    if entry == "dpo":
        write_synthetic_preferences(rows, num_rows=NUM_ROWS, seed=1)
    elif entry == "kto":
        write_synthetic_preferences(folder / "pairs.jsonl", num_rows=NUM_ROWS, seed=1)
        write_labelled(folder / "pairs.jsonl", rows)
    elif entry == "reward_model":
        write_pairs(rows, num_rows=NUM_ROWS, seed=1)
        own["max_seq_length"] = 448
    elif entry == "prm":
        write_solutions(rows, num_rows=NUM_ROWS, seed=1)
    else:
        write_conversations(rows, num_rows=NUM_ROWS, seed=1)
    if entry == "sft":
        own |= {"eval_mixer_list": [rows, "3"], "eval_steps": 2}
    if entry == "distill":
        own["teacher_model_name_or_path"] = write_shallow_model(
            folder / "teacher", family=family, seed=1
        )
    return TrainCase(model=model, rows=rows, folder=folder, own_flags=own)
