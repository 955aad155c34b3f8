"""A reward as a plain function: `def reward(completions, **columns) -> list[float]`, as TRL has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from open_instruct.verifiers.verifier import Verifier


class RewardFunction(Verifier):
    """Calls the function with a list of one completion, with lists of one of whatever else it takes by name.

    That is `prompts`, the text that was given, and the columns of the row. The reward may be any number.
    """

    sees_thinking: ClassVar[bool] = True
    is_bounded: ClassVar[bool] = False
    reads_row: ClassVar[bool] = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__  # type: ignore[misc]
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self._taken = None if takes_all else {each.name for each in parameters}

    def score(self, completion: str, ground_truth: Mapping[str, Any]) -> float:
        """`ground_truth` is the row."""
        return self.judge("", completion, ground_truth, is_truncated=False)

    def judge(self, prompt: str, completion: str, ground_truth: Mapping[str, Any], *, is_truncated: bool) -> float:
        del is_truncated
        given = {**ground_truth, "prompts": prompt, "completions": completion}
        if self._taken is not None:
            given = {name: value for name, value in given.items() if name in self._taken}
        rewards = list(self._function(**{name: [value] for name, value in given.items()}))
        if len(rewards) != 1:
            raise ValueError(f"{len(rewards)} rewards for one completion: return a list with one for each")
        return float(rewards[0])
