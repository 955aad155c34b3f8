"""Judges completions: the scores of their prompt's verifiers, and the reward that follows from
them.

Foreign code runs in processes that are killed when they take too long. Callable from many threads.
"""

import json
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.records import Check, Completion, Prompt, Verdict
from open_instruct.core.text import counted
from open_instruct.parallel.launch import threads_of_each
from open_instruct.rewards.answers import has_r1_format
from open_instruct.rewards.event_loop import awaited
from open_instruct.rewards.finite import MAX_REWARD, describe_unusable
from open_instruct.rewards.function import RewardFunction
from open_instruct.rewards.registry import known_verifiers
from open_instruct.rewards.sandbox.sandbox import Child, Forks
from open_instruct.rewards.secret_key import without_key
from open_instruct.rewards.trial import (
    ANSWERS,
    Trial,
    Turns,
    as_messages,
    find_conversation,
    refuse_function,
    try_function,
)
from open_instruct.rewards.verifier import (
    MAX_READ_CHARACTERS,
    Verifier,
    is_thought,
    said,
    without_thinking,
)

MAX_TRACEBACK_CHARACTERS = 4000
VERIFIERS: dict[str, Verifier] = {}  # of a process of verifiers


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A score; where it is 0 because of a problem, that problem."""

    score: float
    problem: str | None = None


class VerifierPool:
    """Asks verifiers for scores: isolated ones in processes of their own, the others in the
    caller's.

    `say` gets a message about the first problem of each verifier, with its traceback; `max_tokens`
    is the length limit of completions, `--response_length`, which `--overlong_penalty` counts from.

    Raises:
        InputError: a verifier that `flags` name cannot be loaded.
    """

    def __init__(
        self,
        flags: RewardSection,
        *,
        say: Callable[[str], None] = lambda text: None,
        max_tokens: int = 0,
    ) -> None:
        self.verifiers = known_verifiers(flags)
        # An empty entry of PYTHONPATH would mean the working folder, from which nothing else is to
        # be imported.
        paths = os.pathsep.join(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        self._environment = {
            **os.environ,
            **threads_of_each(flags.num_verifier_processes),
            "PYTHONPATH": paths,
        }
        self._flags = flags
        self._max_tokens = max_tokens
        self.read_messages: set[str] = set()
        """Names of the reward functions that are given messages where a prompt is a
        conversation.
        """
        self._start_timeout_s = max(
            verifier.start_timeout_s for verifier in self.verifiers.values()
        )
        self._say = say
        self._said: set[str] = set()
        self._lock = threading.Lock()
        # A place is a worker, or None until somebody needs one.
        self._places: queue.Queue[_Worker | None] = queue.Queue()
        for _ in range(flags.num_verifier_processes):
            self._places.put(None)

    def judges_groups(self, prompt: Prompt) -> bool:
        """Whether a verifier of this prompt scores all of its completions at once."""
        return any(self.verifiers[check.verifier].judges_groups for check in prompt.checks)

    def judge(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Verdict]:
        """The verdict on each completion of a prompt; see `verdict_of`."""
        check_outcomes = [self.scores(check, prompt.text, completions) for check in prompt.checks]
        return [
            verdict_of(
                prompt,
                completion,
                [outcomes[at] for outcomes in check_outcomes],
                self._flags,
                max_tokens=self._max_tokens,
            )
            for at, completion in enumerate(completions)
        ]

    def scores(self, check: Check, prompt: str, completions: Sequence[Completion]) -> list[Outcome]:
        """The scores of completions of one prompt, which is the text that the engine was given.

        Where a verifier raises, dies or takes too long, the score is 0 and the outcome has the
        problem.
        """
        name = check.verifier
        verifier = self.verifiers[name]
        # Each has its own time.
        if verifier.isolated and not verifier.judges_groups and len(completions) > 1:
            return [
                outcome for each in completions for outcome in self.scores(check, prompt, [each])
            ]
        given = [getattr(each, verifier.reads) for each in completions]
        asked: dict[str, Any] = {
            "completions": given
            if verifier.sees_thinking or verifier.reads != "text"
            else ["" if is_thought(prompt, each) else without_thinking(each) for each in given],
            "are_truncated": [each.is_truncated for each in completions],
            "ground_truth": check.ground_truth,
            "prompt": prompt,
        }
        if (
            name in self.read_messages
            and (turns := find_conversation(check.ground_truth)) is not None
        ):
            asked |= as_messages(turns, asked["completions"])
        answer = self._ask_worker(name, asked) if verifier.isolated else verdicts(verifier, **asked)
        low, high = (0.0, 1.0) if verifier.is_bounded else (-MAX_REWARD, MAX_REWARD)
        outcomes = []
        for score in answer.get("scores", [answer] * len(completions)):
            if isinstance(score, dict):
                outcomes.append(self._without_score(name, **score))
            elif low <= score <= high:
                outcomes.append(Outcome(score=score))
            else:
                unusable = describe_unusable(score)
                out_of_bounds = f"{score}, which is not between 0 and 1"
                problem = f"gave {unusable or out_of_bounds}"
                outcomes.append(self._without_score(name, problem))
        return outcomes

    def try_functions(self, prompts: Iterable[Prompt]) -> Iterator[str]:
        """Call the reward functions among the judges of `prompts` once, on two made-up answers to a
        prompt of each form, and settle which are given messages; yields a sentence about each.

        Raises:
            InputError: a function raises; names its file and line, and what it was given.
        """
        tried: set[tuple[str, bool]] = set()
        for prompt in prompts:
            for check in prompt.checks:
                if not isinstance(self.verifiers[check.verifier], RewardFunction):
                    continue
                turns = find_conversation(check.ground_truth)
                form = (check.verifier, turns is not None)
                if form not in tried:
                    tried.add(form)
                    yield self._try_function(check, prompt.text, turns)

    def _try_function(self, check: Check, prompt: str, turns: Turns | None) -> str:
        name = check.verifier
        asked: dict[str, Any] = {
            "completions": list(ANSWERS),
            "are_truncated": [False] * len(ANSWERS),
            "ground_truth": check.ground_truth,
            "prompt": prompt,
        }

        def call(**arguments: Any) -> Trial | None:
            answer = self._ask_worker(name, asked | {"is_trial": True} | arguments)
            return Trial(*answer["trial"]) if "trial" in answer else None

        trial = call()
        if trial is None:
            return f"warning: {name} gave no answer in --verifier_timeout_s, and was not tried"
        if turns is not None and (trial.reads_messages or trial.problem):
            with_messages = call(**as_messages(turns, ANSWERS))
            if with_messages is not None and not with_messages.problem:
                self.read_messages.add(name)
                return f"{name} works on two made-up answers, given as messages"
            if with_messages is not None and trial.reads_messages:
                raise refuse_function(name, with_messages, given="messages", is_conversation=True)
        if trial.problem:
            raise refuse_function(name, trial, given="texts", is_conversation=turns is not None)
        told = f"{name} works on two made-up answers, given as texts"
        if trial.reads_messages:
            told = f"warning: {told}: it asks them for keys of messages, but the prompts are texts"
        return told

    def _without_score(self, name: str, problem: str, traceback: str = "", **_: object) -> Outcome:
        with self._lock:
            is_first = name not in self._said
            self._said.add(name)
        if is_first:
            shown = f"the verifier {name}: {problem}\n{traceback}".rstrip()
            self._say(
                f"{shown}\nIts score is 0. Further ones are only counted, as num_verifier_problems."
            )
        return Outcome(score=0.0, problem=f"{name}: {problem}")

    def _ask_worker(self, name: str, asked: Mapping[str, object]) -> dict[str, Any]:
        worker = self._places.get()
        try:
            worker = worker or _Worker(
                self._flags, self._environment, start_timeout_s=self._start_timeout_s
            )
            time_s = self._flags.verifier_timeout_s
            answer = worker.ask({"verifier": name, **asked}, timeout_s=time_s)
            if answer is None:
                worker.kill()
                worker = None
                answer = {"problem": f"took more than {time_s:g} s, or died"}
        finally:
            self._places.put(worker)
        return answer

    def close(self) -> None:
        """End the workers; waits for those that are at work."""
        for _ in range(self._flags.num_verifier_processes):
            worker = self._places.get()
            if worker is not None:
                worker.kill()


def verdict_of(
    prompt: Prompt,
    completion: Completion,
    outcomes: Sequence[Outcome],
    config: RewardSection,
    *,
    max_tokens: int = 0,
) -> Verdict:
    """The verdict on a completion, from the outcomes of its prompt's checks.

    The reward is `verification_reward` times the mean (or the sum: `several_verifiers`) of the
    scores, weighted by the checks' weights. With the format reward, `r1_style_format_reward` is
    added where the form is right; elsewhere the verifiers' part does not count, unless
    `additive_format_reward`. An environment's rewards are added. With the non-stop penalty a
    completion that was cut gets `non_stop_penalty_value` instead. Scores of a verifier that appears
    twice are averaged. At last `overlong_penalty` is added, of the tokens behind the first prompt.
    """
    judged = list(zip(prompt.checks, outcomes, strict=True))
    by_name: dict[str, list[float]] = {}
    for check, outcome in judged:
        by_name.setdefault(check.verifier, []).append(outcome.score)
    scores = {name: sum(values) / len(values) for name, values in by_name.items()}
    total_weight = (
        1.0 if config.several_verifiers == "sum" else sum(check.weight for check in prompt.checks)
    )
    reward = config.verification_reward * sum(
        check.weight * outcome.score for check, outcome in judged
    )
    reward = reward / total_weight if total_weight else 0.0
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    if (episode := completion.episode) is not None:
        scores |= episode.rewards
        reward += sum(episode.rewards.values())
        problems += [episode.problem] if episode.problem else []
    if config.apply_r1_style_format_reward:
        scores["format"] = float(has_r1_format(completion.text))
        if scores["format"]:
            reward += config.r1_style_format_reward
        elif not config.additive_format_reward:
            reward = 0.0
    if config.non_stop_penalty and completion.is_truncated:
        reward = config.non_stop_penalty_value
    penalty = None
    if (buffer := config.overlong_penalty) is not None:
        penalty = overlong_penalty(len(completion.token_ids), max_tokens=max_tokens, buffer=buffer)
        reward += penalty
    if unusable := describe_unusable(reward):  # a sum or a product of numbers that each were usable
        problems.append(f"the reward is {unusable}")
        reward = 0.0
    return Verdict(reward=reward, scores=scores, problems=tuple(problems), overlong_penalty=penalty)


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int) -> float:
    """The soft punishment of a completion of `num_tokens`, which is added to its reward: from 0 to
    -1.

    Nothing up to `max_tokens - buffer` tokens, then less in proportion, and -1 at `max_tokens`: Yu
    et al. 2025, DAPO (arXiv 2503.14476), equation 13, with L_max = `max_tokens` and L_cache =
    `buffer`.

    Example: `overlong_penalty(90, max_tokens=100, buffer=20)` is -0.5.
    """
    excess = num_tokens - (max_tokens - buffer)
    return -min(max(excess / buffer, 0.0), 1.0)


class _Worker:
    """A process of verifiers.

    All processes that these start, in whichever session, are ended with it.
    """

    def __init__(
        self, flags: RewardSection, environment: Mapping[str, str], *, start_timeout_s: float
    ) -> None:
        self._forks = Forks(answers_with=handle_request, environment=environment)
        self._process = Child(self._forks)
        self._greeting = self._request_worker({"flags": asdict(flags)}, timeout_s=start_timeout_s)

    def ask(self, request: Mapping[str, object], *, timeout_s: float) -> dict[str, Any] | None:
        """The answer;

        None if the process died or did not answer in time, after which it must be killed.
        """
        if self._greeting is None or "problem" in self._greeting:
            return self._greeting
        return self._request_worker(request, timeout_s=timeout_s)

    def _request_worker(
        self, request: Mapping[str, object], *, timeout_s: float
    ) -> dict[str, Any] | None:
        ran = self._process.ask(request, timeout_s=timeout_s)
        told: dict[str, Any] | None = json.loads(ran.value) if ran.status == "done" else None
        return told

    def kill(self) -> None:
        self._process.close()
        self._forks.close()


def handle_request(
    *, flags: dict[str, Any] | None = None, verifier: str = "", is_trial: bool = False, **asked: Any
) -> dict[str, str]:
    """The answer of a process to a request of `_Worker`, which sends the flags first, and then what
    is to be scored.
    """
    told: dict[str, Any] = {}
    if is_trial:
        function = VERIFIERS[verifier]
        assert isinstance(function, RewardFunction)
        told = {"trial": try_function(function, **asked)}
    elif flags is None:
        told = verdicts(VERIFIERS[verifier], **asked)
    else:
        try:
            VERIFIERS.update(known_verifiers(RewardSection(**flags)))
            for each in VERIFIERS.values():
                each.load()
        except BaseException as error:
            told = _failure(error)
    return {"status": "done", "value": json.dumps(told)}


def verdicts(verifier: Verifier, **asked: Any) -> dict[str, Any]:
    """`{"scores": […]}`, or `{"problem": …, "traceback": …}` where the verifier raised, or for one
    of the scores.

    `asked` are the arguments of `Verifier.judge_all`.
    """
    try:
        scores = awaited(verifier.judge_all(**asked))
        if len(scores) != (num_asked := len(asked["completions"])):
            raise ValueError(
                f"{counted(len(scores), 'reward')} for {counted(num_asked, 'completion')}: return "
                "one for each"
            )
        return {"scores": list(map(_score, scores))}
    except BaseException as error:  # foreign code, which may raise anything, and exit
        return _failure(error)


def _score(value: Any) -> float | dict[str, str]:
    """A score, or why it is none: it costs its own completion, and no other."""
    try:
        if isinstance(value, BaseException):
            raise value
        return float(value)
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> dict[str, str]:
    shown = without_key("".join(traceback.format_exception(error))[-MAX_READ_CHARACTERS:])
    return {"problem": said(error), "traceback": shown[-MAX_TRACEBACK_CHARACTERS:]}
