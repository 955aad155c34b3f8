"""The base class of verifiers, which score a completion against a row's ground truth."""

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from open_instruct.config.policy_sections import RewardSection
from open_instruct.rewards.secret_key import hide_key

MAX_SHOWN_CHARACTERS = 500
MAX_READ_CHARACTERS = 20_000  # of an error, which may repeat all that a server has sent

Score = float | Awaitable[float]


class Verifier:
    """Scores completions of one kind of answer, from 0 to 1 unless it says otherwise.

    A verifier of your own is a subclass with a `name` of its own, which rows give as their
    `dataset`, and a `score`, or in its place `judge` or `judge_all`. Each may be `async def`.

    It is not the reward: weights, formats and penalties are added by `build_verdict` in verdict.py.
    """

    name: ClassVar[str]
    isolated: ClassVar[bool] = True
    """Whether it runs in a process of its own, which can be killed if it never ends."""
    sees_thinking: ClassVar[bool] = False
    """Whether it gets the whole completion; otherwise it gets the text behind `</think>`."""
    is_bounded: ClassVar[bool] = True
    """Whether its scores are between 0 and 1; otherwise they may be any numbers."""
    reads_row: ClassVar[bool] = False
    """Whether its ground truth is the whole row."""
    reads: ClassVar[Literal["text", "token_ids"]] = "text"
    """What it gets as a completion. Token ids are always of the whole, with its thoughts."""
    judges_groups: ClassVar[bool] = False
    """Whether it is asked once about all completions of a prompt, by `judge_all`."""
    start_timeout_s: ClassVar[float] = 60.0
    """The time that `load` may take."""

    @property
    def needs_ground_truth(self) -> bool:
        """Whether a row without a ground truth cannot be judged."""
        return not self.reads_row

    def configure(self, flags: RewardSection) -> None:
        """Take this verifier's settings of the run; called once, before anything else.

        Raises:
            InputError: they cannot be met.
        """

    def begin_run(self, cache: Path) -> None:
        """Make sure that a run whose prompts name it can be judged; called in the driver.

        Args:
            cache: a folder for its files.

        Raises:
            InputError: the run cannot be judged.
        """

    def load(self) -> None:
        """Prepare for the first verdict, such as by loading a model; once in each process."""

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Refuse a ground truth that `score` could not use; called when rows are loaded.

        Raises:
            ValueError: with the reason, for the author of the row.
        """

    def score(self, completion: str, ground_truth: Any) -> Score:
        """The score of a completion, which comes without its thoughts unless `sees_thinking`."""
        raise NotImplementedError

    def judge(
        self,
        prompt: str,
        completion: str,
        ground_truth: Any,
        *,
        is_truncated: bool,
    ) -> Score:
        """As `score`, with the prompt, and whether the completion was cut off."""
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
        """The scores of completions of one prompt: a list, or an awaitable of one."""
        return [
            self.judge(prompt, completion, ground_truth, is_truncated=is_truncated)
            for completion, is_truncated in zip(completions, are_truncated, strict=True)
        ]


def remove_thinking(completion: str) -> str:
    """The text behind the last `</think>`, up to a further `<think>`.

    So thoughts that never close, because a reply was cut within them, leave nothing.
    """
    _, _, text = completion.rpartition("</think>")
    text, _, _ = text.partition("<think>")
    return text


def is_only_thinking(prompt: str, completion: str) -> bool:
    """Whether a completion is nothing but thoughts that its prompt begins, and that never close."""
    return prompt.rstrip().endswith("<think>") and "</think>" not in completion


def describe_error(error: BaseException) -> str:
    """What an error says, on one line, without the key of a judge, which a server may repeat."""
    words = f"{type(error).__name__}: {error}"[:MAX_READ_CHARACTERS].split()
    return hide_key(" ".join(words))[:MAX_SHOWN_CHARACTERS]
