"""Try a reward function once on two made-up answers, before anything is started.

TRL gives a function messages (`completion[0]["content"]`) where the prompts are conversations, and
texts elsewhere. Functions for texts are ours. Which of them a function is written for shows when it
is called: a text that is asked for a key of a message records it.
"""

import reprlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from open_instruct.core.errors import InputError
from open_instruct.rewards.function import RewardFunction
from open_instruct.rewards.verifier import describe_error

TRIAL_ANSWERS = ("7", "The answer is 7.")
"""What functions are tried on: a number, which most can read, and a sentence."""
# The keys of a row that may have its prompt as a conversation: ours, and TRL's.
CONVERSATION_KEYS = ("messages", "prompt")
MAX_LISTED = 500  # characters of the arguments of a call
MESSAGE_METHODS = ("get", "items", "keys", "values")

_short = reprlib.Repr()
_short.maxstring = 60
_short.maxother = 60
_short.maxdict = 3

Form = Literal["texts", "messages"]
Turns = Sequence[Mapping[str, Any]]


class MessageArguments(TypedDict):
    """Completions and their prompt, as TRL gives them where the prompt is a conversation."""

    prompt: Turns
    completions: list[list[dict[str, str]]]


class Trial(NamedTuple):
    """What came of calling a function once.

    Example: `Trial("KeyError: 'x'", "mine.py:3", "completions=['7', …]", True)`.
    """

    problem: str
    """What was raised; empty where the function works."""
    place: str
    arguments: str
    reads_messages: bool
    """Whether a text was asked for a key, as if it were a message."""


class WatchedText(str):
    """A text that records when it is taken for messages: when it is asked for a key of one."""

    keys_read: list[str]

    @classmethod
    def watch(cls, text: str, keys_read: list[str]) -> "WatchedText":
        text_watch = cls(text)
        text_watch.keys_read = keys_read
        return text_watch

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            self.keys_read.append(key)
        return self.watch(super().__getitem__(key), self.keys_read)

    def __iter__(self) -> Any:
        return (self.watch(letter, self.keys_read) for letter in super().__iter__())

    def __getattr__(self, name: str) -> Any:
        if name in MESSAGE_METHODS:
            self.keys_read.append(name)
        raise AttributeError(f"'str' object has no attribute {name!r}")


def find_prompt_turns(row: Mapping[str, Any]) -> Turns | None:
    """The turns of a row's prompt, without an answer behind them; None where it is a text."""
    for key in CONVERSATION_KEYS:
        turns = row.get(key)
        if isinstance(turns, list) and turns and all(map(_is_message, turns)):
            has_answer = len(turns) > 1 and turns[-1]["role"] == "assistant"
            if has_answer:
                turns = turns[:-1]
            return turns
    return None


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def build_messages(turns: Turns, completions: Sequence[str]) -> MessageArguments:
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
    keys_read: list[str] = []
    watched_texts = [_watch_text(text, keys_read) for text in completions]
    problem = ""
    place = ""
    try:
        rewards = verifier.judge_all(
            prompt=_watch_text(prompt, keys_read),
            completions=watched_texts,
            ground_truth=ground_truth,
            **rest,
        )
        if len(rewards) != len(completions):
            raise ValueError(
                f"{len(rewards)} rewards for {len(completions)} completions: return one for each"
            )
    except BaseException as error:  # foreign code, which may raise anything, and exit
        problem = describe_error(error)
        place = _find_place(error, verifier.function)
    arguments = verifier.build_arguments(prompt, completions, ground_truth)
    return Trial(problem, place, _list_arguments(arguments), bool(keys_read))


def _watch_text(value: Any, keys_read: list[str]) -> Any:
    if not isinstance(value, str):
        return value
    return WatchedText.watch(value, keys_read)


def _list_arguments(arguments: Mapping[str, Any]) -> str:
    names = sorted(arguments, key=lambda name: name != "completions")
    text = ", ".join(f"{name}={_short.repr(arguments[name])}" for name in names)
    if len(text) > MAX_LISTED:
        text = f"{text[:MAX_LISTED]}…"
    return text


def _find_place(error: BaseException, function: Callable[..., Any]) -> str:
    """The last line of the function's file that an error has come through.

    It is the function's first line where the error came from elsewhere.
    """
    code = function.__code__
    frames = traceback.extract_tb(error.__traceback__)
    line: int | None = code.co_firstlineno
    for frame in frames:
        if frame.filename == code.co_filename:
            line = frame.lineno
    return f"{code.co_filename}:{line}"


def function_error(
    name: str,
    trial: Trial,
    *,
    form: Form,
    is_conversation: bool,
) -> InputError:
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
        f"answers as {form}: {trial.arguments}; {remedy}",
        kind="own_code",
        flag="verifier",
        remedy=remedy,
    )
