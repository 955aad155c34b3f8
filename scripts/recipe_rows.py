"""Rows of the recipes on a real model, from its own answers to the questions of `make demo-real`.

    python scripts/recipe_rows.py

SmolLM2-135M-Instruct answers each question once, greedily. Its answer becomes two rows, in
demo_output/real: a preference pair, whose chosen reply is the answer's first sentence and whose
rejected one is the whole (brevity_train.jsonl); and a conversation whose reply is the first
sentence as JSON (json_train.jsonl). Held-out questions give brevity_held_out.jsonl and
json_held_out.jsonl. It takes some minutes on two cores.
"""

import json
import os
import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any

from demo_data.sums import write_rows
from demo_data.written_questions import read_questions
from demo_shell import OUTPUT, REPOSITORY, console, run

from open_instruct.generation.vllm_options import engine_environment

FOLDER = OUTPUT / "real"
MODEL = FOLDER / "smollm2"
LONGEST_ANSWER_TOKENS = 64
LONGEST_CONVERSATION_TOKENS = 192


def main() -> int:
    os.chdir(REPOSITORY)
    if not MODEL.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        run("open-instruct", "get-model", "smollm2-135m", MODEL)
    questions_by_split = read_questions()
    answers = iter(answer_greedily(list(chain.from_iterable(questions_by_split.values()))))
    for split, questions in questions_by_split.items():
        for kind, rows in build_rows([(question, next(answers)) for question in questions]).items():
            path = FOLDER / f"{kind}_{split}.jsonl"
            write_rows(path, rows)
            console.print(f"{path}: {len(rows)} rows")
    return 0


def build_rows(answered: Sequence[tuple[str, str]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each recipe, from questions with their answers.

    An answer of one sentence gives no pair.
    """
    pairs: list[dict[str, Any]] = []
    conversations: list[dict[str, Any]] = []
    for question, answer in answered:
        brief = first_sentence(answer)
        conversations.append({"messages": turns(question, json.dumps({"answer": brief}))})
        if brief != answer:
            pairs.append({"chosen": turns(question, brief), "rejected": turns(question, answer)})
    return {"brevity": pairs, "json": conversations}


def answer_greedily(questions: list[str]) -> list[str]:
    """The model's greedy answers, each of `LONGEST_ANSWER_TOKENS` at most, in order."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", **engine_environment(on_cuda=False)}
    # It reads its environment when it is imported.
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(MODEL),
        dtype="float32",
        enforce_eager=True,
        max_model_len=LONGEST_CONVERSATION_TOKENS,
        kv_cache_memory_bytes=2**30,
    )
    answers = engine.chat(
        [[{"role": "user", "content": question}] for question in questions],
        SamplingParams(temperature=0, max_tokens=LONGEST_ANSWER_TOKENS),
    )
    return [answer.outputs[0].text.strip() for answer in answers]


def first_sentence(answer: str) -> str:
    """What stands before the first full stop that ends a sentence, with it.

    Example: `first_sentence("It is 3.5 m. It is old.")` is "It is 3.5 m."
    """
    return answer.split(". ")[0].split("\n")[0].rstrip(".") + "."


def turns(question: str, reply: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


if __name__ == "__main__":
    sys.exit(main())
