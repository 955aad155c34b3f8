"""Made preference pairs with a rule to learn, for demonstrations and tests without a download.

Each prompt holds one or more small tasks. The chosen reply is polite and right. The rejected one is rude, or
curt, and most often wrong; one in eight is as polite as the chosen one and only wrong, which a tiny model cannot
tell. Lengths differ widely, in both directions, so that neither length nor one phrase gives the answer
away, and packing has something to do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from open_instruct.toys.arithmetic import write_rows

_PHRASES = json.loads((files("open_instruct.toys") / "phrases.json").read_text("utf-8"))


def write_synthetic_preferences(
    path: str | Path, *, num_rows: int, seed: int = 0, holdout_path: str | Path | None = None, num_holdout_rows: int = 0
) -> None:
    """Writes `num_rows` pairs to the .jsonl file `path`, and `num_holdout_rows` more to `holdout_path`.

    No prompt comes twice, in one file or across the two. The same arguments write the same bytes.

    Raises:
        InputError: a file cannot be written.
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    for file, count in ((path, num_rows), (holdout_path, num_holdout_rows)):
        if file is None:
            continue
        write_rows(Path(file), (_new_row(rng, seen) for _ in range(count)))


def _new_row(rng: random.Random, seen: set[str]) -> dict[str, Any]:
    while True:
        tasks = [rng.choice(_TASKS)(rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 4, 6, 10)))]
        question = _question(rng, [task for task, _, _ in tasks])
        if question not in seen:
            seen.add(question)
            break
    prompt = [{"role": "user", "content": question}]
    if rng.random() < 0.15:
        earlier, answer, _ = rng.choice(_TASKS)(rng)
        reply = f"{rng.choice(_PHRASES['greetings'])} {answer}"
        prompt = [{"role": "user", "content": earlier}, {"role": "assistant", "content": reply}, *prompt]
    if rng.random() < 0.25:
        prompt = [{"role": "system", "content": rng.choice(_PHRASES["system"])}, *prompt]
    right, wrong = [answer for _, answer, _ in tasks], [answer for _, _, answer in tasks]
    chosen = " ".join([rng.choice(_PHRASES["greetings"]), "\n".join(right), rng.choice(_PHRASES["closings"])])
    return {
        "chosen": [*prompt, {"role": "assistant", "content": chosen}],
        "rejected": [*prompt, {"role": "assistant", "content": _rejected(rng, right, wrong)}],
    }


def _question(rng: random.Random, tasks: list[str]) -> str:
    if len(tasks) == 1:
        return rng.choice(_PHRASES["ask_one"]).format(task=tasks[0])
    listed = "\n".join(f"{number}. {task}" for number, task in enumerate(tasks, start=1))
    return rng.choice(_PHRASES["ask_many"]).format(tasks=listed)


def _rejected(rng: random.Random, right: list[str], wrong: list[str]) -> str:
    sneer, brush_off = rng.choice(_PHRASES["sneers"]), rng.choice(_PHRASES["brush_offs"])
    kind = rng.random()
    if kind < 0.125:  # polite but wrong
        return " ".join([rng.choice(_PHRASES["greetings"]), "\n".join(wrong), rng.choice(_PHRASES["closings"])])
    if kind < 0.5:  # rude, wrong, about as long
        return " ".join([sneer, "\n".join(wrong), brush_off])
    if kind < 0.7:  # rude but right, and longer
        return " ".join(
            [sneer, rng.choice(_PHRASES["sneers"]), "\n".join(right), brush_off, rng.choice(_PHRASES["brush_offs"])]
        )
    if kind < 0.9:  # curt: the first answer only, wrong
        return f"{wrong[0]} {brush_off}"
    return f"{sneer} {brush_off}"


# A task is (question, right answer, wrong answer).
_Task = tuple[str, str, str]


def _add(rng: random.Random) -> _Task:
    a, b = rng.randrange(2, 100), rng.randrange(2, 100)
    wrong = a + b + rng.choice((-10, -2, -1, 1, 2, 10))
    ask = rng.choice(("What is {a} + {b}?", "Add {a} and {b}.", "How much is {a} plus {b}?"))
    return ask.format(a=a, b=b), f"{a} plus {b} is {a + b}.", f"{a} plus {b} is {wrong}."


def _subtract(rng: random.Random) -> _Task:
    b = rng.randrange(2, 60)
    a = b + rng.randrange(1, 60)
    wrong = a - b + rng.choice((-1, 1, 5, 10))
    ask = rng.choice(("What is {a} - {b}?", "Take {b} away from {a}.", "How much is {a} minus {b}?"))
    return ask.format(a=a, b=b), f"{a} minus {b} is {a - b}.", f"{a} minus {b} is {wrong}."


def _reverse(rng: random.Random) -> _Task:
    word = rng.choice(_PHRASES["words"])
    ask = rng.choice(("Spell '{word}' backwards.", "Reverse the word {word}.", "What is {word} read from the end?"))
    return ask.format(word=word), f"{word} backwards is {word[::-1]}.", f"{word} backwards is {word[1:] + word[0]}."


def _sort(rng: random.Random) -> _Task:
    words = rng.sample(_PHRASES["words"], rng.randrange(3, 7))
    right = sorted(words)
    wrong = [right[-1], *right[:-1]]
    ask = rng.choice(("Sort these words: {words}.", "Put in order: {words}.", "Order {words} from A to Z."))
    return ask.format(words=", ".join(words)), f"In order: {', '.join(right)}.", f"In order: {', '.join(wrong)}."


def _largest(rng: random.Random) -> _Task:
    numbers = rng.sample(range(1, 200), rng.randrange(3, 8))
    ask = rng.choice(("Which is the largest of {numbers}?", "Find the greatest number: {numbers}."))
    question = ask.format(numbers=", ".join(map(str, numbers)))
    return question, f"The largest is {max(numbers)}.", f"The largest is {min(numbers)}."


_TASKS: tuple[Callable[[random.Random], _Task], ...] = (_add, _subtract, _reverse, _sort, _largest)
