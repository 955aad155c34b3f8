"""Made preference pairs with a rule to learn, for demonstrations and tests without a download.

Each prompt holds one or more small tasks. The chosen reply is polite and right. The rejected one is
rude, or curt, and most often wrong; one in eight is as polite as the chosen one and only wrong,
which a tiny model cannot tell. Lengths differ widely, in both directions, so that neither length
nor one phrase gives the answer away, and packing has something to do.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .sums import write_rows

_PHRASES = json.loads(Path(__file__).with_name("phrases.json").read_text("utf-8"))


def write_synthetic_preferences(
    path: str | Path,
    *,
    num_rows: int,
    seed: int = 0,
    holdout_path: str | Path | None = None,
    num_holdout_rows: int = 0,
) -> None:
    """Writes `num_rows` pairs to the .jsonl file `path`, and `num_holdout_rows` more to
    `holdout_path`.

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
        tasks = [
            rng.choice(_TASKS)(rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 4, 6, 10)))
        ]
        question = _question(rng, [asked for asked, _, _ in tasks])
        if question not in seen:
            seen.add(question)
            break
    prompt = [{"role": "user", "content": question}]
    if rng.random() < 0.15:
        earlier, answer, _ = rng.choice(_TASKS)(rng)
        reply = f"{rng.choice(_PHRASES['greetings'])} {answer}"
        prompt = [
            {"role": "user", "content": earlier},
            {"role": "assistant", "content": reply},
            *prompt,
        ]
    if rng.random() < 0.25:
        prompt = [{"role": "system", "content": rng.choice(_PHRASES["system"])}, *prompt]
    right = "\n".join(answer for _, answer, _ in tasks)
    chosen = f"{rng.choice(_PHRASES['greetings'])} {right} {rng.choice(_PHRASES['closings'])}"
    rejected = _rejected(rng, right, [answer for _, _, answer in tasks])
    return {
        "chosen": [*prompt, {"role": "assistant", "content": chosen}],
        "rejected": [*prompt, {"role": "assistant", "content": rejected}],
    }


def _question(rng: random.Random, tasks: list[str]) -> str:
    if len(tasks) == 1:
        return _asked(rng, "ask_one", task=tasks[0])
    return _asked(
        rng,
        "ask_many",
        tasks="\n".join(f"{number}. {task}" for number, task in enumerate(tasks, start=1)),
    )


def _rejected(rng: random.Random, right: str, wrong: list[str]) -> str:
    sneer = rng.choice(_PHRASES["sneers"])
    brush_off = rng.choice(_PHRASES["brush_offs"])
    all_wrong = "\n".join(wrong)
    kind = rng.random()
    if kind < 0.125:  # polite but wrong
        return f"{rng.choice(_PHRASES['greetings'])} {all_wrong} {rng.choice(_PHRASES['closings'])}"
    if kind < 0.5:  # rude, wrong, about as long
        return f"{sneer} {all_wrong} {brush_off}"
    if kind < 0.7:  # rude but right, and longer
        return (
            f"{sneer} {rng.choice(_PHRASES['sneers'])} {right} {brush_off} "
            f"{rng.choice(_PHRASES['brush_offs'])}"
        )
    if kind < 0.9:  # curt: the first answer only, wrong
        return f"{wrong[0]} {brush_off}"
    return f"{sneer} {brush_off}"


# A task is (question, right answer, wrong answer).
_Task = tuple[str, str, str]


def _asked(rng: random.Random, phrases: str, **words: object) -> str:
    return rng.choice(_PHRASES[phrases]).format(**words)


def _add(rng: random.Random) -> _Task:
    a = rng.randrange(2, 100)
    b = rng.randrange(2, 100)
    wrong = a + b + rng.choice((-10, -2, -1, 1, 2, 10))
    return (
        _asked(rng, "ask_sum", a=a, b=b),
        f"{a} plus {b} is {a + b}.",
        f"{a} plus {b} is {wrong}.",
    )


def _subtract(rng: random.Random) -> _Task:
    b = rng.randrange(2, 60)
    a = b + rng.randrange(1, 60)
    wrong = a - b + rng.choice((-1, 1, 5, 10))
    return (
        _asked(rng, "ask_difference", a=a, b=b),
        f"{a} minus {b} is {a - b}.",
        f"{a} minus {b} is {wrong}.",
    )


def _reverse(rng: random.Random) -> _Task:
    word = rng.choice(_PHRASES["words"])
    question = _asked(rng, "ask_reversed", word=word)
    return (
        question,
        f"{word} backwards is {word[::-1]}.",
        f"{word} backwards is {word[1:] + word[0]}.",
    )


def _sort(rng: random.Random) -> _Task:
    words = rng.sample(_PHRASES["words"], rng.randrange(3, 7))
    right = sorted(words)
    wrong = [right[-1], *right[:-1]]
    question = _asked(rng, "ask_sorted", words=", ".join(words))
    return question, f"In order: {', '.join(right)}.", f"In order: {', '.join(wrong)}."


def _largest(rng: random.Random) -> _Task:
    numbers = rng.sample(range(1, 200), rng.randrange(3, 8))
    question = _asked(rng, "ask_largest", numbers=", ".join(map(str, numbers)))
    return question, f"The largest is {max(numbers)}.", f"The largest is {min(numbers)}."


_TASKS: tuple[Callable[[random.Random], _Task], ...] = (_add, _subtract, _reverse, _sort, _largest)
