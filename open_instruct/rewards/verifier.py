"""The base class of verifiers, which score a completion against a row's ground truth, from 0 to
1.
"""

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from open_instruct.config.policy_sections import RewardSection
from open_instruct.rewards.secret_key import without_key

MAX_SAID_CHARACTERS = 500
MAX_READ_CHARACTERS = 20_000  # of an error, which may repeat all that a server has sent

Score = float | Awaitable[float]


class Verifier:
    """One kind of answer.

    A verifier of your own is a subclass with a `name` of its own, which rows give as their
    `dataset`, and a `score`, or in its place `judge` or `judge_all`. Each may be `async def`.
    """

    name: ClassVar[str]
    isolated: ClassVar[bool] = True
    """Whether it runs in a process of its own, which can be killed: for foreign code, and code that
    may never end.
    """
    sees_thinking: ClassVar[bool] = False
    """Whether it gets the whole completion; otherwise it gets the text behind `</think>`."""
    is_bounded: ClassVar[bool] = True
    """Whether its scores are between 0 and 1; otherwise they may be any numbers."""
    reads_row: ClassVar[bool] = False
    """Whether its ground truth is the whole row."""
    reads: ClassVar[Literal["text", "token_ids"]] = "text"
    """What its completion is. One that reads token ids sees those of its thoughts, too."""
    judges_groups: ClassVar[bool] = False
    """Whether it is asked once about all completions of a prompt, by `judge_all`."""
    start_timeout_s: ClassVar[float] = 60.0
    """The time that `load` may take."""

    @property
    def needs_ground_truth(self) -> bool:
        """Whether a row without a ground truth cannot be judged."""
        return not self.reads_row

    def configure(self, flags: RewardSection) -> None:
        """Take the settings of the run that are this verifier's; called once, before anything else.

        Raises:
            InputError: they cannot be met.
        """

    def begin_run(self, cache: Path) -> None:
        """Make sure that a run whose prompts name it can be judged, in the driver; `cache` is a
        folder for its files.

        Raises:
            InputError: it cannot.
        """

    def load(self) -> None:
        """Prepare for the first verdict, such as by loading a model; called once in every process
        that scores.
        """

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Refuse a ground truth that `score` could not use; called when rows are loaded.

        Raises:
            ValueError: with the reason, for the author of the row.
        """

    def score(self, completion: str, ground_truth: Any) -> Score:
        """The score of a completion, which comes without its thinking part unless
        `sees_thinking`.
        """
        raise NotImplementedError

    def judge(
        self, prompt: str, completion: str, ground_truth: Any, *, is_truncated: bool
    ) -> Score:
        """`score` for verifiers that also look at the prompt, or at whether the completion was cut
        off.
        """
        del prompt, is_truncated
        return self.score(completion, ground_truth)

    def judge_all(
        self,
        *,
        prompt: str,
        completions: Sequence[str],
        ground_truth: Any,
        are_truncated: Sequence[bool],
    ) -> Any:
        """The scores of completions of one prompt: a list, or what it is to be awaited for."""
        return [
            self.judge(prompt, completion, ground_truth, is_truncated=is_truncated)
            for completion, is_truncated in zip(completions, are_truncated, strict=True)
        ]


def without_thinking(completion: str) -> str:
    """The text behind the last `</think>`, or all of it if there is none; never what a `<think>`
    begins.

    So thoughts that never close, because a reply was cut within them, leave nothing.
    """
    return completion.rpartition("</think>")[2].partition("<think>")[0]


def is_thought(prompt: str, completion: str) -> bool:
    """Whether a completion is nothing but thoughts, which its prompt has begun and which never
    close.
    """
    return prompt.rstrip().endswith("<think>") and "</think>" not in completion


def said(error: BaseException) -> str:
    """What an error says, on one line, without the key of a judge, which a server may repeat."""
    words = f"{type(error).__name__}: {error}"[:MAX_READ_CHARACTERS].split()
    return without_key(" ".join(words))[:MAX_SAID_CHARACTERS]
