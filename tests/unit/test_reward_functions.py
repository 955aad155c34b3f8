"""Rewards that are plain functions, as `--verifier mine.py:reward`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from open_instruct.data.files.rows import MalformedRow, ReadRow
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.errors import InputError
from open_instruct.records import Check
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.verifiers.registry import judges_named, known_verifiers

FUNCTIONS = """
def short(completions, **columns):
    assert set(columns) == {"prompts", "prompt", "answer"}, columns
    return [-float(len(text)) for text in completions]

def same(completions, answer):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

def asked(prompts, completions):
    return [float(prompt in text) for prompt, text in zip(prompts, completions)]

def too_many(completions, **columns):
    return [1.0, 2.0]

def nothing(completions):
    return [None]

text = "text"
"""
ROW = {"prompt": "Say hi.", "answer": "hi"}


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("functions") / "mine.py"
    file.write_text(FUNCTIONS)
    return str(file)


@pytest.fixture(scope="module")
def pool(mine: str) -> Iterator[VerifierPool]:
    names = ("short", "same", "asked", "too_many", "nothing")
    pool = VerifierPool([f"{mine}:{name}" for name in names], num_processes=1, timeout_s=60.0)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("name", "completion", "reward"),
    [("short", "<think></think>hi", -17.0), ("same", "hi", 1.0), ("same", "no", 0.0), ("asked", "Say hi. Hi", 1.0)],
)
def test_a_function_is_given_what_it_takes(pool: VerifierPool, name: str, completion: str, reward: float) -> None:
    outcome = pool.score(Check(verifier=name, ground_truth=ROW), completion, prompt="Say hi.")
    assert (outcome.score, outcome.problem) == (reward, None)


@pytest.mark.parametrize(("name", "problem"), [("too_many", "2 rewards for one completion"), ("nothing", "TypeError")])
def test_what_it_must_not_return_is_a_problem(pool: VerifierPool, name: str, problem: str) -> None:
    outcome = pool.score(Check(verifier=name, ground_truth=ROW), "hi")
    assert outcome.score == 0.0 and outcome.problem is not None and problem in outcome.problem


def test_it_judges_rows_that_name_none_by_all_their_columns(mine: str) -> None:
    words = [f"{mine}:same"]
    known = known_verifiers(words)
    read = ReadRow(ROW)
    _, checks = parse_prompt_row(read, known, judges=judges_named(words))
    assert checks == (Check(verifier="same", ground_truth=ROW),)
    assert list(read.unread()) == []
    _, checks = parse_prompt_row({**ROW, "dataset": ["same", "gsm8k"], "ground_truth": "4"}, known)
    assert [check.ground_truth for check in checks][1] == "4"
    with pytest.raises(MalformedRow, match="no 'ground_truth'"):
        parse_prompt_row({**ROW, "dataset": ["same", "gsm8k"]}, known)


@pytest.mark.parametrize(
    ("name", "told"), [("text", "is neither a function nor a verifier"), ("gone", "cannot be loaded .* FILE.py:NAME")]
)
def test_what_is_no_function_is_refused(mine: str, name: str, told: Any) -> None:
    with pytest.raises(InputError, match=told):
        known_verifiers([f"{mine}:{name}"])


def test_one_may_not_have_the_name_of_a_verifier(tmp_path: Path) -> None:
    (tmp_path / "clash.py").write_text("def gsm8k(completions):\n    return [0.0]\n")
    with pytest.raises(InputError, match="is called 'gsm8k', as another verifier is"):
        known_verifiers([f"{tmp_path}/clash.py:gsm8k"])
