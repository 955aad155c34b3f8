"""Made sums with answers that can be verified: a warm start with room for reinforcement learning,
and its prompts.

The supervised rows show two habits. Some replies work a sum out, first the ones, then the tens with
the carry, and are right; most guess a number near the truth, and are seldom right. A model trained
on them has both habits, so it is right about as often as it is careful. A reward that looks at the
last number of a reply alone is enough to teach it which habit pays, and, on the way, to work more
exactly. The held-out sums are of operands that no other file has, in either order, so they cannot
have been memorised.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from open_instruct.core.errors import InputError

SFT_FILE, PROMPTS_FILE, HELD_OUT_FILE = "sft.jsonl", "prompts.jsonl", "held_out.jsonl"
VERIFIER = "gsm8k"  # the last number of a reply is its answer

# Two digits each: (12, 34) and (34, 12) are the same operands.
_OPERANDS = [(a, b) for a in range(10, 100) for b in range(a, 100)]
NUM_PROBLEMS = len(_OPERANDS)

CAREFUL_SHARE = 0.4
_LARGEST_SLIP = 10


def write_arithmetic(
    folder: str | Path, *, num_sft_rows: int, num_prompts: int, num_held_out: int, seed: int
) -> None:
    """Writes `sft.jsonl`, `prompts.jsonl` and `held_out.jsonl`; the same arguments write the same
    bytes.

    Supervised rows are `{"messages": [user, assistant]}`, the others `{"messages": [user],
    "ground_truth": "85", "dataset": "gsm8k"}`. Supervised rows and prompts are drawn from the same
    sums, which may come up again; every held-out sum comes once.

    Raises:
        InputError: more held-out sums than half of all there are, or a file cannot be written.
    """
    if not 0 <= num_held_out <= NUM_PROBLEMS // 2:
        raise InputError(
            f"num_held_out {num_held_out}: there are {NUM_PROBLEMS:,} sums, and at least half of "
            f"them must stay for training; hold out between 0 and {NUM_PROBLEMS // 2:,}."
        )
    rng = random.Random(seed)
    problems = rng.sample(_OPERANDS, NUM_PROBLEMS)
    held_out = problems[:num_held_out]
    known = problems[num_held_out:]
    files = {
        SFT_FILE: (_sft_row(rng, rng.choice(known)) for _ in range(num_sft_rows)),
        PROMPTS_FILE: (_prompt_row(rng, known[i % len(known)]) for i in range(num_prompts)),
        HELD_OUT_FILE: (_prompt_row(rng, operands) for operands in held_out),
    }
    for name, rows in files.items():
        write_rows(Path(folder) / name, rows)


def worked_out(a: int, b: int) -> str:
    """The sum in small steps, its last number the answer.

    Example: `worked_out(47, 38)` is `"7+8=15 4+3+1=8 85"`, and `worked_out(12, 93)` is `"2+3=5
    1+9=10 105"`.
    """
    (a_tens, a_ones), (b_tens, b_ones) = divmod(a, 10), divmod(b, 10)
    ones = a_ones + b_ones
    tens = f"{a_tens}+{b_tens}+1" if ones >= 10 else f"{a_tens}+{b_tens}"
    return f"{a_ones}+{b_ones}={ones} {tens}={(a + b) // 10} {a + b}"


def _sft_row(rng: random.Random, operands: tuple[int, int]) -> dict[str, Any]:
    a, b = _either_order(rng, operands)
    slip = rng.randint(-_LARGEST_SLIP, _LARGEST_SLIP)
    reply = worked_out(a, b) if rng.random() < CAREFUL_SHARE else str(a + b + slip)
    return {"messages": [_question(a, b), {"role": "assistant", "content": reply}]}


def _prompt_row(rng: random.Random, operands: tuple[int, int]) -> dict[str, Any]:
    a, b = _either_order(rng, operands)
    return {"messages": [_question(a, b)], "ground_truth": str(a + b), "dataset": VERIFIER}


def _either_order(rng: random.Random, operands: tuple[int, int]) -> tuple[int, int]:
    a, b = operands
    return (a, b) if rng.random() < 0.5 else (b, a)


def _question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} + {b}?"}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A .jsonl file of `rows`, in a folder that is made if need be.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}") from error
