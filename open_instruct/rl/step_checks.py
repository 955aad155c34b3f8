"""Warnings about a run whose steps have no learning signal, and its end if no verdict works."""

from collections import deque
from collections.abc import Sequence
from itertools import chain

from open_instruct.core.errors import RunError
from open_instruct.core.records import RolloutGroup, Verdict
from open_instruct.losses.advantages import has_signal
from open_instruct.rl.samples import all_completions, all_verdicts

# The number of steps in a row without a signal that is worth a warning.
MAX_SILENT_STEPS = 5
# The share of completions, over that many steps, that may be cut without a warning.
MOST_CUT = 0.5
LONGER = "Raise it, or start from a model that has learned to end its answers (open-instruct sft)"


class SignalWatch:
    """Watches the groups of the last steps.

    It warns once in a run if none had a signal, and once if most completions were cut.

    Args:
        has_critic: whether a critic compares all completions of a step.
        judges_format: whether rewards have a part for the form of an answer.
        response_length: the most tokens of a completion.
    """

    def __init__(self, *, has_critic: bool, judges_format: bool, response_length: int) -> None:
        self._has_critic = has_critic
        self._judges_format = judges_format
        self._response_length = response_length
        self._groups: deque[Sequence[RolloutGroup]] = deque(maxlen=MAX_SILENT_STEPS)  # by step
        self._has_learned: deque[bool] = deque(maxlen=MAX_SILENT_STEPS)
        # The checks that have not led to a warning yet.
        self._checks = [self._check_signal, self._check_lengths]

    def after_step(self, groups: Sequence[RolloutGroup], *, num_samples: int) -> list[str]:
        """Add the groups of a step; returns the warnings that are due.

        Args:
            num_samples: of the step that are trained on.
        """
        self._groups.append(groups)
        rewards = [group.rewards for group in groups]
        if self._has_critic:  # which compares all of a step
            rewards = [tuple(chain.from_iterable(rewards))]
        self._has_learned.append(num_samples > 0 and any(map(has_signal, rewards)))
        if len(self._groups) < MAX_SILENT_STEPS:
            return []
        warnings = []
        for check in list(self._checks):
            warning = check()
            if warning is not None:
                self._checks.remove(check)
                warnings.append(warning)
        return warnings

    def _check_signal(self) -> str | None:
        if any(self._has_learned):
            return None
        reason = self._explain_silence(list(chain.from_iterable(self._groups)))
        return f"no group of the last {MAX_SILENT_STEPS} steps had a signal to learn from: {reason}"

    def _check_lengths(self) -> str | None:
        completions = all_completions(chain.from_iterable(self._groups))
        are_cut = [completion.is_truncated for completion in completions]
        if sum(are_cut) <= MOST_CUT * len(are_cut):
            return None
        limit = self._response_length
        return (
            f"{sum(are_cut) / len(are_cut):.0%} of the completions of the last {MAX_SILENT_STEPS} "
            f"steps were cut off at --response_length {limit} tokens, and one that breaks off is "
            f"seldom judged right. {LONGER}"
        )

    def _explain_silence(self, groups: Sequence[RolloutGroup]) -> str:
        verdicts = all_verdicts(groups)
        if all(verdict.is_right for verdict in verdicts):
            return (
                "every answer was right. The prompts are too easy for this model: use harder ones"
            )
        if all(completion.is_truncated for completion in all_completions(groups)):
            return (
                f"every completion was cut off at --response_length {self._response_length} "
                f"tokens. {LONGER}"
            )
        if self._judges_format and not any(verdict.scores["format"] for verdict in verdicts):
            return (
                "no completion had the form <think>…</think><answer>…</answer>. Ask for it in the "
                "prompts, or show the model some examples first (open-instruct sft)"
            )
        if not any(map(_has_score, verdicts)):
            return (
                "every answer was wrong. The prompts are too hard for this model, or its answers "
                "are not written as the verifier reads them: look at some (open-instruct report), "
                "use easier prompts, or show the model some examples first (open-instruct sft)"
            )
        return (
            "the completions of each prompt all got the same reward. Raise "
            "--num_samples_per_prompt_rollout, or use prompts that this model answers right now "
            "and then"
        )


def refuse_failed_verdicts(groups: Sequence[RolloutGroup]) -> None:
    """End a run in which no verifier works.

    Raises:
        RunError: not one verdict on `groups` is a real one.
    """
    verdicts = all_verdicts(groups)
    if verdicts and all(verdict.problems for verdict in verdicts):
        raise RunError(
            f"all {len(verdicts)} verdicts of a step failed, so nothing can be learned. The "
            f"first: {verdicts[0].problems[0]}. Its traceback, where it has one, is above and in "
            "run.log. Mend the verifier or environment (or raise its time-out, where it needs "
            "longer) and give the same command again"
        )


def _has_score(verdict: Verdict) -> bool:
    """Whether any verifier gave a completion a score, beside that for its format."""
    return any(score for name, score in verdict.scores.items() if name != "format")
