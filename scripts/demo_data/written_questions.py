"""Questions of our own writing, each to be answered in one lowercase sentence of at least 8 words.

The constraints are those of IFEval, which a verifier counts. No held-out question is among those of
training.
"""

from pathlib import Path
from typing import Any

from demo_data.sums import write_rows

PROMPTS_FILE, HELD_OUT_FILE = "prompts.jsonl", "held_out.jsonl"
_QUESTIONS = {PROMPTS_FILE: "questions.txt", HELD_OUT_FILE: "held_out_questions.txt"}
REQUEST = "Answer in one sentence of at least 8 words, all in lowercase."
CONSTRAINTS = {
    "instruction_id_list": [
        "length_constraints:number_sentences",
        "length_constraints:number_words",
        "change_case:english_lowercase",
    ],
    "kwargs": [
        {"relation": "less than", "num_sentences": 2},
        {"relation": "at least", "num_words": 8},
        {},
    ],
}
NUM_CONSTRAINTS = len(CONSTRAINTS["instruction_id_list"])


def write_questions(folder: Path) -> dict[str, int]:
    """Write `prompts.jsonl` and `held_out.jsonl`; returns the number of rows of each."""
    folder.mkdir(parents=True, exist_ok=True)
    num_rows = {}
    for name, source in _QUESTIONS.items():
        rows = [_row(question) for question in _read_lines(source)]
        write_rows(folder / name, rows)
        num_rows[name] = len(rows)
    return num_rows


def read_questions() -> dict[str, list[str]]:
    """The questions alone, without the request: "train" and "held_out"."""
    return {
        "train": _read_lines(_QUESTIONS[PROMPTS_FILE]),
        "held_out": _read_lines(_QUESTIONS[HELD_OUT_FILE]),
    }


def _read_lines(source: str) -> list[str]:
    return Path(__file__).with_name(source).read_text(encoding="utf-8").splitlines()


def _row(question: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"{question} {REQUEST}"}],
        "ground_truth": CONSTRAINTS,
        "dataset": "ifeval",
    }
