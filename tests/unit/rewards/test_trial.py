"""Reward functions are tried on two made-up answers, which shows whether they read texts or TRL's
messages.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.errors import InputError
from open_instruct.core.records import Check, Prompt
from open_instruct.rewards.function import RewardFunction
from open_instruct.rewards.pool import VerifierPool
from open_instruct.rewards.trial import WatchedText, find_prompt_turns
from tests.unit.scored import completion_of, score

FUNCTIONS = """
def of_texts(completions, **columns):
    return [sum(letter.isdigit() for letter in text) for text in completions]

def length(completions, prompts):
    return [float(len(text)) for text in completions]

def trl(prompts, completions, answer, **kwargs):
    assert [prompt[-1]["role"] for prompt in prompts] == ["user"] * len(prompts)
    contents = [completion[0]["content"] for completion in completions]
    return [float(wanted in content) for content, wanted in zip(contents, answer)]

def quiet(completions, **kwargs):
    rewards = []
    for completion in completions:
        try:
            rewards.append(float(len(completion[0]["content"])))
        except Exception:
            rewards.append(0.0)
    return rewards

def by_get(completions, **kwargs):
    return [sum(len(message.get("content")) for message in completion) for completion in completions]

def either(completions, **kwargs):
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [float(len(text)) for text in texts]

def only_messages(completions, **kwargs):
    return [1.0 if isinstance(completion, list) else int("no text") for completion in completions]

def broken(completions, **columns):
    return [
        len(text) / 0 for text in completions
    ]

def lacks(completions, solution):
    return [1.0 for _ in completions]

def both_broken(completions, **columns):
    return [float(completion[0]["contents"]) for completion in completions]

def returns_nothing(completions):
    [1.0 for _ in completions]
"""
TALK = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}
PLAIN = {"prompt": "What is 3 + 4?", "answer": "7"}
NAMES = [
    line.removeprefix("def ").partition("(")[0]
    for line in FUNCTIONS.splitlines()
    if line.startswith("def ")
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("functions") / "tried.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture(scope="module")
def running(file: Path) -> Iterator[VerifierPool]:
    words = [f"{file}:{name}" for name in NAMES]
    pool = VerifierPool(
        RewardSection(verifier=words, num_verifier_processes=1, verifier_timeout_s=60.0)
    )
    yield pool
    pool.close()


@pytest.fixture
def pool(running: VerifierPool) -> VerifierPool:
    running.message_readers.clear()
    return running


def prompt_for(name: str, row: Mapping[str, Any]) -> Prompt:
    return Prompt(
        row_id=0, token_ids=(1,), text="…", checks=(Check(verifier=name, ground_truth=row),)
    )


@pytest.mark.parametrize(
    ("name", "row", "reads_messages", "reward"),
    [
        ("of_texts", TALK, False, 1.0),
        ("of_texts", PLAIN, False, 1.0),
        ("length", TALK, False, 2.0),  # of a list of messages it would be 1
        ("trl", TALK, True, 1.0),
        ("quiet", TALK, True, 2.0),
        ("by_get", TALK, True, 2.0),
        ("either", TALK, False, 2.0),
        ("either", PLAIN, False, 2.0),
        ("only_messages", TALK, True, 1.0),
        ("quiet", PLAIN, False, 0.0),
    ],
)
def test_function_is_given_messages_where_it_reads_them_and_prompts_are_conversations(
    pool: VerifierPool, name: str, row: Mapping[str, Any], reads_messages: bool, reward: float
) -> None:
    (sentence,) = pool.try_functions([prompt_for(name, row)] * 3)
    assert name in sentence
    assert (name in pool.message_readers) == reads_messages
    outcome = score(pool, Check(verifier=name, ground_truth=row), "7!")
    assert (outcome.score, outcome.problem) == (reward, None)


@pytest.mark.parametrize(
    ("name", "row", "error", "line"),
    [
        ("broken", TALK, "ZeroDivisionError", "len(text) / 0"),
        ("broken", PLAIN, "ZeroDivisionError", "len(text) / 0"),
        ("lacks", TALK, "'solution'", "def lacks"),
        ("both_broken", TALK, "KeyError: 'contents'", '"contents"'),
        ("trl", PLAIN, "TypeError", 'prompt[-1]["role"]'),
        ("by_get", PLAIN, "AttributeError", 'message.get("content")'),
        ("returns_nothing", TALK, "None", "def returns_nothing"),
    ],
)
def test_function_that_raises_is_refused_with_its_line_and_what_it_was_given(
    pool: VerifierPool, file: Path, name: str, row: Mapping[str, Any], error: str, line: str
) -> None:
    with pytest.raises(InputError) as refusal:
        list(pool.try_functions([prompt_for(name, row)]))
    number = 1 + next(at for at, text in enumerate(FUNCTIONS.splitlines()) if line in text)
    assert refusal.value.kind == "own_code" and refusal.value.flag == "verifier"
    for part in (name, error, f"{file}:{number}", "The answer is 7."):
        assert part in str(refusal.value), part


def test_plain_prompts_beside_conversations_keep_their_texts(pool: VerifierPool) -> None:
    list(pool.try_functions([prompt_for("either", TALK), prompt_for("quiet", TALK)]))
    assert pool.message_readers == {"quiet"}
    checks = [Check(verifier="quiet", ground_truth=row) for row in (TALK, PLAIN)]
    assert [score(pool, check, "7!").score for check in checks] == [2.0, 0.0]


def test_group_of_completions_is_given_as_messages_each_with_its_own_prompt(
    pool: VerifierPool,
) -> None:
    prompt = prompt_for("trl", TALK)
    list(pool.try_functions([prompt]))
    verdicts = pool.judge(prompt, [completion_of(text) for text in ("7", "8", "<think>7</think>")])
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 1.0]


def test_verifiers_that_are_no_functions_are_not_tried(pool: VerifierPool) -> None:
    prompt = Prompt(
        row_id=0, token_ids=(1,), text="", checks=(Check(verifier="gsm8k", ground_truth="7"),)
    )
    assert list(pool.try_functions([prompt])) == []
    assert not isinstance(pool.verifiers["gsm8k"], RewardFunction)


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        (PLAIN, None),
        (TALK, ["user"]),
        ({"prompt": TALK["messages"]}, ["user"]),
        ({"messages": [*TALK["messages"], {"role": "assistant", "content": "7"}]}, ["user"]),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, *TALK["messages"]]},
            ["system", "user"],
        ),
        ({"messages": []}, None),
        ({"conversations": [{"from": "human", "value": "3 + 4?"}]}, None),
        ({"prompt": "3 + 4?", "messages": None}, None),
    ],
)
def test_prompt_of_turns_is_a_conversation(row: Mapping[str, Any], roles: list[str] | None) -> None:
    turns = find_prompt_turns(row)
    assert (None if turns is None else [turn["role"] for turn in turns]) == roles


def test_watched_text_is_a_text_that_notes_keys_alone() -> None:
    asked: list[str] = []
    text = WatchedText.watch("The answer is 7.", asked)
    assert (
        text == "The answer is 7." and text[0] == "T" and text[-2:] == "7." and list(text)[4] == "a"
    )
    assert (
        text.split()[-1] == "7."
        and text.strip().lower().startswith("the")
        and f"{text}" == str(text)
    )
    assert hash(text) == hash("The answer is 7.") and not hasattr(text, "role") and asked == []
    with pytest.raises(TypeError):
        text[0]["content"]
    with pytest.raises(AttributeError):
        text[0].get("content")
    assert asked == ["content", "get"]
