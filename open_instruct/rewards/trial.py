"""Reward functions are called once on two made-up answers, before anything is started: do they
work, and on what.

TRL gives a function messages (`completion[0]["content"]`) where the prompts are conversations, and
texts elsewhere. Functions for texts are ours. Which of them a function is written for shows when it
is called: a text that is asked for a key of a message notes it.
"""

import reprlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from open_instruct.core.errors import InputError
from open_instruct.rewards.function import RewardFunction
from open_instruct.rewards.verifier import said

ANSWERS = ("7", "The answer is 7.")
"""What functions are tried on: a number, which most can read, and a sentence."""
# The keys of a row that hold its prompt as a conversation: TRL's, and ours.
CONVERSATIONS = ("messages", "prompt")
MAX_LISTED = 500  # characters of the arguments of a call
METHODS_OF_MESSAGES = ("get", "items", "keys", "values")

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 60
_shown.maxdict = 3

Form = Literal["texts", "messages"]


Turns = Sequence[Mapping[str, Any]]


class AsMessages(TypedDict):
    """Completions of one prompt, and the prompt, as TRL gives them where the prompt is a
    conversation.
    """

    prompt: Turns
    completions: list[list[dict[str, str]]]


class Trial(NamedTuple):
    """What came of a call.

    Example: `Trial("KeyError: 'x'", "mine.py:3", "completions=['7', …]", True)`.
    """

    problem: str
    """What was raised; empty where the function works."""
    place: str
    arguments: str
    reads_messages: bool
    """Whether a text was asked for a key, as if it were a message."""


class WatchedText(str):
    """A text like any other, but that it notes in `asked` when it is taken for messages: asked for
    a key of one.
    """

    asked: list[str]

    @classmethod
    def watch(cls, text: str, asked: list[str]) -> "WatchedText":
        watched = cls(text)
        watched.asked = asked
        return watched

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            self.asked.append(key)
        return self.watch(super().__getitem__(key), self.asked)

    def __iter__(self) -> Any:
        return (self.watch(letter, self.asked) for letter in super().__iter__())

    def __getattr__(self, name: str) -> Any:
        if name in METHODS_OF_MESSAGES:
            self.asked.append(name)
        raise AttributeError(f"'str' object has no attribute {name!r}")


def find_conversation(row: Mapping[str, Any]) -> Turns | None:
    """The turns of a row's prompt, without an answer behind them;

    None where the prompt is a text.
    """
    for key in CONVERSATIONS:
        turns = row.get(key)
        if isinstance(turns, list) and turns and all(map(_is_message, turns)):
            has_answer = len(turns) > 1 and turns[-1]["role"] == "assistant"
            return turns[:-1] if has_answer else turns
    return None


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def as_messages(turns: Turns, completions: Sequence[str]) -> AsMessages:
    """The arguments of `judge_all` that differ where a function is given messages."""
    replies = [[{"role": "assistant", "content": text}] for text in completions]
    return {"prompt": turns, "completions": replies}


def try_function(
    verifier: RewardFunction,
    *,
    prompt: Any,
    completions: Sequence[Any],
    ground_truth: Mapping[str, Any],
    **rest: Any,
) -> Trial:
    """Call a function once; `ground_truth` is the row, as `judge_all` takes it."""
    asked: list[str] = []
    asking, *watched = [
        WatchedText.watch(each, asked) if isinstance(each, str) else each
        for each in (prompt, *completions)
    ]
    problem = place = ""
    try:
        rewards = verifier.judge_all(
            prompt=asking, completions=watched, ground_truth=ground_truth, **rest
        )
        if len(rewards) != len(completions):
            raise ValueError(
                f"{len(rewards)} rewards for {len(completions)} completions: return one for each"
            )
    except BaseException as error:  # foreign code, which may raise anything, and exit
        problem, place = said(error), _find_place(error, verifier.function)
    given = verifier.arguments(prompt, completions, ground_truth)
    return Trial(problem, place, _list_arguments(given), bool(asked))


def _list_arguments(given: Mapping[str, Any]) -> str:
    names = sorted(given, key=lambda name: name != "completions")
    listed = ", ".join(f"{name}={_shown.repr(given[name])}" for name in names)
    return listed if len(listed) <= MAX_LISTED else f"{listed[:MAX_LISTED]}…"


def _find_place(error: BaseException, function: Callable[..., Any]) -> str:
    """The last line of the function's own file that an error has come through; else where the
    function begins.
    """
    code = function.__code__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{code.co_filename}:{lines[-1] if lines else code.co_firstlineno}"


def refuse_function(name: str, trial: Trial, *, given: Form, is_conversation: bool) -> InputError:
    """The error about a reward function that has raised on made-up answers."""
    remedy = "mend the function, or no answer would have a reward"
    if trial.reads_messages and not is_conversation:
        remedy = (
            "it reads messages, and the prompts of its rows are texts, so answers are too: read "
            "an answer itself, or "
            'write the prompts as `[{"role": "user", "content": …}]`'
        )
    return InputError(
        f"the reward function {name} raises {trial.problem} at {trial.place}, on two made-up "
        f"answers as {given}: {trial.arguments}; {remedy}",
        kind="own_code",
        flag="verifier",
        remedy=remedy,
    )
