"""What a verifier is: it scores a completion against a row's ground truth, from 0 to 1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

THINKING_ENDS = "</think>"


class Verifier(ABC):
    """One kind of answer. `isolated` verifiers run foreign or unbounded code, so they get a process that can be killed.

    Most are asked about the answer alone; one that `sees_thinking` is given the whole completion. The score of one that
    is not `is_bounded` may be any number. The ground truth of one that `reads_row` is the whole row. One that
    `judges_groups` is asked once about all completions of a prompt, in `judge_all`.

    A verifier of your own is a subclass with a `name` of its own, which rows give as their `dataset`. One that cannot
    compare with everything says so in `check_ground_truth`, which is asked when rows are loaded.
    """

    name: ClassVar[str]
    isolated: ClassVar[bool] = True
    sees_thinking: ClassVar[bool] = False
    is_bounded: ClassVar[bool] = True
    reads_row: ClassVar[bool] = False
    judges_groups: ClassVar[bool] = False
    start_timeout_s: ClassVar[float] = 60.0  # of `load`

    def load(self) -> None:
        """What takes long, before the first verdict: called once in every process that is going to ask."""
        return

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Refuses a row's ground truth that `score` could not use.

        Raises:
            ValueError: with the reason, for the author of the row.
        """
        return

    @abstractmethod
    def score(self, completion: str, ground_truth: Any) -> float:
        """How right the answer is, from 0 to 1; `completion` is without what was thought before it."""

    def judge(self, prompt: str, completion: str, ground_truth: Any, *, is_truncated: bool) -> float:
        """`score`, for verifiers that look at what was asked too, or at whether the answer came to its end."""
        del prompt, is_truncated
        return self.score(completion, ground_truth)

    def judge_all(
        self, *, prompt: str, completions: Sequence[str], ground_truth: Any, are_truncated: Sequence[bool]
    ) -> list[float]:
        """The scores of completions of one prompt."""
        return [
            self.judge(prompt, completion, ground_truth, is_truncated=is_truncated)
            for completion, is_truncated in zip(completions, are_truncated, strict=True)
        ]


def without_thinking(completion: str) -> str:
    """What follows the last `</think>`; all of it where there is none."""
    return completion.rpartition(THINKING_ENDS)[2]
