"""Rewards that are plain functions, as `--verifier mine.py:reward`."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.errors import InputError
from open_instruct.core.records import Check, Prompt
from open_instruct.core.user_code import load_named
from open_instruct.data.conversations.row_keys import TrackedRow
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.rewards.function import write_function_file
from open_instruct.rewards.pool import VerifierPool
from open_instruct.rewards.registry import known_verifiers, list_judges
from tests.refusals import refused
from tests.unit.scored import completion_of, score

FUNCTIONS = """
import asyncio

def short(completions, **columns):
    assert set(columns) == {"prompts", "prompt", "answer"}, columns
    return [-float(len(text)) for text in completions]

def same(completions, answer):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

def asked(prompts, completions):
    return [float(prompt in text) for prompt, text in zip(prompts, completions)]

def ranked(completions, prompts):
    assert prompts == ["Say hi."] * len(completions)
    return [float(sum(len(other) > len(text) for other in completions)) for text in completions]

def too_many(completions, **columns):
    return [1.0, 2.0]

def nothing(completions):
    return [None]

def number(completions):
    return [float(text) for text in completions]

async def waits(completions):
    await asyncio.sleep(0.01)
    return [float(len(text)) for text in completions]
"""
ROW = {"prompt": "Say hi.", "answer": "hi"}


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("functions") / "mine.py"
    file.write_text(FUNCTIONS)
    return str(file)


@pytest.fixture(scope="module")
def pool(mine: str) -> Iterator[VerifierPool]:
    names = ("short", "same", "asked", "ranked", "too_many", "nothing", "number", "waits")
    pool = VerifierPool(
        RewardSection(
            verifier=[f"{mine}:{name}" for name in names],
            num_verifier_processes=1,
            verifier_timeout_s=60.0,
        )
    )
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("name", "completion", "reward"),
    [
        ("waits", "hi", 2.0),
        ("short", "<think></think>hi", -17.0),
        ("same", "hi", 1.0),
        ("same", "no", 0.0),
        ("asked", "Say hi. Hi", 1.0),
    ],
)
def test_function_is_given_what_it_takes(
    pool: VerifierPool, name: str, completion: str, reward: float
) -> None:
    outcome = score(pool, Check(verifier=name, ground_truth=ROW), completion, prompt="Say hi.")
    assert (outcome.score, outcome.problem) == (reward, None)


def test_reward_function_is_called_once_a_prompt(pool: VerifierPool) -> None:
    check = Check(verifier="ranked", ground_truth=ROW)
    prompt = Prompt(row_id=0, token_ids=(1,), text="Say hi.", checks=(check,))
    assert pool.judges_groups(prompt)
    verdicts = pool.judge(prompt, [completion_of(text) for text in ("hi!!", "hi", "hi!")])
    assert [verdict.reward for verdict in verdicts] == [0.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("name", "problem"), [("too_many", "2 rewards for 1 completion"), ("nothing", "TypeError")]
)
def test_wrong_return_of_a_reward_function_is_a_problem(
    pool: VerifierPool, name: str, problem: str
) -> None:
    outcome = score(pool, Check(verifier=name, ground_truth=ROW), "hi")
    assert outcome.score == 0.0 and outcome.problem is not None and problem in outcome.problem


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e308", "-1e16"])
def test_reward_with_which_float32_cannot_compute_is_a_problem(
    pool: VerifierPool, number: str
) -> None:
    outcome = score(pool, Check(verifier="number", ground_truth=ROW), number)
    assert outcome.score == 0.0
    assert outcome.problem is not None and number.lstrip("-") in outcome.problem.replace("e+", "e")
    assert "not finite" in outcome.problem
    assert score(pool, Check(verifier="number", ground_truth=ROW), "-1e15").score == -1e15


def test_reward_function_gets_all_columns_of_a_row(mine: str) -> None:
    words = [f"{mine}:same"]
    known = known_verifiers(RewardSection(verifier=words))
    read = TrackedRow(ROW)
    _, checks, _ = parse_prompt_row(read, known, judges=list_judges(words))
    assert checks == (Check(verifier="same", ground_truth=ROW),)
    assert list(read.unread_keys()) == []
    _, checks, _ = parse_prompt_row(
        {**ROW, "dataset": ["same", "gsm8k"], "ground_truth": "4"}, known
    )
    assert [check.ground_truth for check in checks][1] == "4"
    with pytest.raises(MalformedRow, match="no 'ground_truth'"):
        parse_prompt_row({**ROW, "dataset": ["same", "gsm8k"]}, known)


# --- a function that is in no file
# ------------------------------------------------------------------

WEIGHT = 2.0


def alone(
    completions: list[str], answer: list[Any], *, power: float = 2.0, **columns: Any
) -> list[float]:
    """What it needs is in it, but for types, which are not evaluated."""
    import math

    class Counted:
        kind = __name__

        def of(self, text: str) -> float:
            return math.pow(sum(letter.isdigit() for letter in text), power)

    return [Counted().of(text) for text in completions]


def reads_a_global(completions: list[str]) -> list[float]:
    return [WEIGHT * len(json.loads(text)) for text in completions]


def counts_calls(completions: list[str]) -> list[float]:
    global calls
    calls += 1
    return [float(calls)]


def has_a_default(completions: list[str], weight: float = WEIGHT) -> list[float]:
    return [weight]


def wrapped(function: Callable[..., list[float]]) -> Callable[..., list[float]]:
    @functools.wraps(function)
    def doubled(completions: list[str]) -> list[float]:
        return [2 * reward for reward in function(completions)]

    return doubled


def test_function_that_stands_alone_becomes_a_file(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(write_function_file(alone))
    assert load_named(f"{file}:alone", origin="", what="NAME")(["a12", "b"], [1, 2]) == [4.0, 0.0]


def closure() -> Callable[..., list[float]]:
    scale = 3.0

    def scaled(completions: list[str]) -> list[float]:
        return [scale for _ in completions]

    return scaled


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (
            reads_a_global,
            "reads_a_global uses WEIGHT, json, which the function alone does not have",
        ),
        (closure(), "scaled uses scale,"),
        (counts_calls, "counts_calls uses calls,"),
        (has_a_default, "has_a_default uses WEIGHT,"),
        (wrapped(alone), "alone is not what its source defines"),
        (lambda completions: [1.0], "<lambda> "),
        (len, "len has no source of its own"),
        (VerifierPool, "VerifierPool has no source of its own"),
        (eval("lambda completions: [1.0]"), "<lambda> has no source of its own"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_reward_function_that_needs_globals_is_refused_with_their_names(
    function: Callable[..., Any], told: str
) -> None:
    with pytest.raises(InputError) as refused:
        write_function_file(function)
    assert f"reward: {told}" in str(refused.value)
    assert "write it to a file, and pass reward='mine.py:" in str(refused.value)


def test_name_that_hides_a_built_in_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(alone.__globals__, "sum", len)
    with refused("own_code", None, "sum"):
        write_function_file(alone)
