"""Judge completions: ask the verifiers of their prompt for scores, and make a reward of these.

Foreign code runs in processes that are killed when they take too long. Callable from many threads.
"""

import json
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.records import Check, Completion, Prompt, Verdict
from open_instruct.core.text import spell_count
from open_instruct.parallel.launch import share_threads
from open_instruct.rewards.event_loop import await_entries
from open_instruct.rewards.finite import MAX_REWARD, describe_unusable
from open_instruct.rewards.function import RewardFunction
from open_instruct.rewards.registry import known_verifiers
from open_instruct.rewards.sandbox.sandbox import Child, ForkServer
from open_instruct.rewards.secret_key import hide_key
from open_instruct.rewards.trial import (
    TRIAL_ANSWERS,
    Trial,
    Turns,
    build_messages,
    find_prompt_turns,
    function_error,
    try_function,
)
from open_instruct.rewards.verdict import Outcome, build_verdict
from open_instruct.rewards.verifier import (
    MAX_READ_CHARACTERS,
    Verifier,
    describe_error,
    is_only_thinking,
    remove_thinking,
)

MAX_TRACEBACK_CHARACTERS = 4000
VERIFIERS: dict[str, Verifier] = {}  # of a process of verifiers


class VerifierPool:
    """Asks verifiers for scores: isolated ones in worker processes, the others in the caller's.

    Args:
        flags: of rewards.
        say: gets a message about the first problem of each verifier, with its traceback.
        max_tokens: the length limit of completions, `--response_length`, which `--overlong_penalty`
            counts from.

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
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        self._environment = {
            **os.environ,
            **share_threads(flags.num_verifier_processes),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self._flags = flags
        self._max_tokens = max_tokens
        self.message_readers: set[str] = set()
        """Names of the reward functions that get messages where a prompt is a conversation."""
        self._start_timeout_s = max(
            verifier.start_timeout_s for verifier in self.verifiers.values()
        )
        self._say = say
        self._names_reported: set[str] = set()
        self._lock = threading.Lock()
        # None until somebody needs the worker.
        self._workers: queue.Queue[_Worker | None] = queue.Queue()
        for _ in range(flags.num_verifier_processes):
            self._workers.put(None)

    def judges_groups(self, prompt: Prompt) -> bool:
        """Whether a verifier of this prompt scores all of its completions at once."""
        return any(self.verifiers[check.verifier].judges_groups for check in prompt.checks)

    def judge(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Verdict]:
        """The verdict on each completion of a prompt; see `build_verdict`."""
        outcomes = [self.score(check, prompt.text, completions) for check in prompt.checks]
        verdicts = []
        for number, completion in enumerate(completions):
            outcomes_of_one = [each[number] for each in outcomes]
            verdict = build_verdict(
                prompt, completion, outcomes_of_one, self._flags, max_tokens=self._max_tokens
            )
            verdicts.append(verdict)
        return verdicts

    def score(self, check: Check, prompt: str, completions: Sequence[Completion]) -> list[Outcome]:
        """The scores that one verifier gives completions of one prompt.

        Where the verifier raises, dies or takes too long, the score is 0 and the outcome has the
        problem.

        Args:
            check: the verifier's name, and the ground truth.
            prompt: the text that the engine was given.
            completions: of this prompt.
        """
        name = check.verifier
        verifier = self.verifiers[name]
        # Each has its own time.
        if verifier.isolated and not verifier.judges_groups and len(completions) > 1:
            outcomes = []
            for completion in completions:
                outcomes += self.score(check, prompt, [completion])
            return outcomes
        arguments: dict[str, Any] = {
            "completions": _prepare_completions(verifier, prompt, completions),
            "are_truncated": [completion.is_truncated for completion in completions],
            "ground_truth": check.ground_truth,
            "prompt": prompt,
        }
        if name in self.message_readers:
            turns = find_prompt_turns(check.ground_truth)
            if turns is not None:
                arguments |= build_messages(turns, arguments["completions"])
        if verifier.isolated:
            answer = self._ask_worker(name, arguments)
        else:
            answer = score_completions(verifier, **arguments)
        scores = answer.get("scores", [answer] * len(completions))
        return [self._build_outcome(verifier, score) for score in scores]

    def _build_outcome(self, verifier: Verifier, score: Any) -> Outcome:
        """The outcome of a score, or of a problem in its place."""
        if isinstance(score, dict):
            return self._report_problem(verifier.name, **score)
        low = -MAX_REWARD
        high = MAX_REWARD
        if verifier.is_bounded:
            low = 0.0
            high = 1.0
        if low <= score <= high:
            return Outcome(score=score)
        problem = describe_unusable(score) or f"{score}, which is not between 0 and 1"
        return self._report_problem(verifier.name, f"gave {problem}")

    def try_functions(self, prompts: Iterable[Prompt]) -> Iterator[str]:
        """Call the reward functions of prompts once, and decide which of them get messages.

        They are called on two made-up answers to a prompt of each form.

        Yields:
            A sentence about each.

        Raises:
            InputError: a function raises; names its file and line, and what it was given.
        """
        tried_functions: set[tuple[str, bool]] = set()
        for prompt in prompts:
            for check in prompt.checks:
                if not isinstance(self.verifiers[check.verifier], RewardFunction):
                    continue
                turns = find_prompt_turns(check.ground_truth)
                form = (check.verifier, turns is not None)
                if form not in tried_functions:
                    tried_functions.add(form)
                    yield self._try_function(check, prompt.text, turns)

    def _try_function(self, check: Check, prompt: str, turns: Turns | None) -> str:
        name = check.verifier
        request: dict[str, Any] = {
            "is_trial": True,
            "completions": list(TRIAL_ANSWERS),
            "are_truncated": [False] * len(TRIAL_ANSWERS),
            "ground_truth": check.ground_truth,
            "prompt": prompt,
        }

        def call(**arguments: Any) -> Trial | None:
            answer = self._ask_worker(name, request | arguments)
            if "trial" not in answer:
                return None
            return Trial(*answer["trial"])

        trial = call()
        if trial is None:
            return f"warning: {name} gave no answer in --verifier_timeout_s, and was not tried"
        if turns is not None and (trial.reads_messages or trial.problem):
            with_messages = call(**build_messages(turns, TRIAL_ANSWERS))
            if with_messages is not None and not with_messages.problem:
                self.message_readers.add(name)
                return f"{name} works on two made-up answers, given as messages"
            if with_messages is not None and trial.reads_messages:
                raise function_error(name, with_messages, form="messages", is_conversation=True)
        if trial.problem:
            raise function_error(name, trial, form="texts", is_conversation=turns is not None)
        result = f"{name} works on two made-up answers, given as texts"
        if trial.reads_messages:
            return (
                f"warning: {result}: it asks them for keys of messages, but the prompts are texts"
            )
        return result

    def _report_problem(
        self,
        name: str,
        problem: str,
        traceback: str = "",
        **_: object,
    ) -> Outcome:
        with self._lock:
            is_first = name not in self._names_reported
            self._names_reported.add(name)
        if is_first:
            description = f"the verifier {name}: {problem}\n{traceback}".rstrip()
            self._say(
                f"{description}\nIts score is 0. Further ones are only counted, as "
                "num_verifier_problems."
            )
        return Outcome(score=0.0, problem=f"{name}: {problem}")

    def _ask_worker(self, name: str, arguments: Mapping[str, object]) -> dict[str, Any]:
        worker = self._workers.get()
        try:
            worker = worker or _Worker(
                self._flags, self._environment, start_timeout_s=self._start_timeout_s
            )
            time_s = self._flags.verifier_timeout_s
            answer = worker.ask({"verifier": name, **arguments}, timeout_s=time_s)
            if answer is None:
                worker.kill()
                worker = None
                answer = {"problem": f"took more than {time_s:g} s, or died"}
        finally:
            self._workers.put(worker)
        return answer

    def close(self) -> None:
        """End the workers; waits for those that are at work."""
        for _ in range(self._flags.num_verifier_processes):
            worker = self._workers.get()
            if worker is not None:
                worker.kill()


def _prepare_completions(
    verifier: Verifier, prompt: str, completions: Sequence[Completion]
) -> list[Any]:
    """The completions as a verifier reads them: token ids, or texts with or without thoughts."""
    values = [getattr(completion, verifier.reads) for completion in completions]
    if verifier.sees_thinking or verifier.reads != "text":
        return values
    texts = []
    for text in values:
        if is_only_thinking(prompt, text):
            texts.append("")
        else:
            texts.append(remove_thinking(text))
    return texts


class _Worker:
    """A process of verifiers.

    All processes that these start, in whichever session, are ended with it.
    """

    def __init__(
        self, flags: RewardSection, environment: Mapping[str, str], *, start_timeout_s: float
    ) -> None:
        self._server = ForkServer(handler=handle_request, environment=environment)
        self._process = Child(self._server)
        self._start_answer = self._send({"flags": asdict(flags)}, timeout_s=start_timeout_s)

    def ask(self, request: Mapping[str, object], *, timeout_s: float) -> dict[str, Any] | None:
        """The answer; None if the process died or was late, after which it must be killed."""
        if self._start_answer is None or "problem" in self._start_answer:
            return self._start_answer
        return self._send(request, timeout_s=timeout_s)

    def _send(self, request: Mapping[str, object], *, timeout_s: float) -> dict[str, Any] | None:
        result = self._process.ask(request, timeout_s=timeout_s)
        if result.status != "done":
            return None
        answer: dict[str, Any] = json.loads(result.value)
        return answer

    def kill(self) -> None:
        self._process.close()
        self._server.close()


def handle_request(
    *,
    flags: dict[str, Any] | None = None,
    verifier: str = "",
    is_trial: bool = False,
    **arguments: Any,
) -> dict[str, str]:
    """The answer of a process to a request of `_Worker`.

    The first request has the flags, the others what is to be scored.
    """
    if is_trial:
        function = VERIFIERS[verifier]
        assert isinstance(function, RewardFunction)
        answer: dict[str, Any] = {"trial": try_function(function, **arguments)}
    elif flags is None:
        answer = score_completions(VERIFIERS[verifier], **arguments)
    else:
        answer = _load_verifiers(flags)
    return {"status": "done", "value": json.dumps(answer)}


def _load_verifiers(flags: dict[str, Any]) -> dict[str, Any]:
    try:
        VERIFIERS.update(known_verifiers(RewardSection(**flags)))
        for verifier in VERIFIERS.values():
            verifier.load()
    except BaseException as error:
        return _describe_failure(error)
    return {}


def score_completions(verifier: Verifier, **arguments: Any) -> dict[str, Any]:
    """Ask a verifier for the scores of completions; `arguments` are those of `judge_all`.

    Returns:
        `{"scores": […]}`, or `{"problem": …, "traceback": …}` where the verifier raised; the same
        stands in place of a score that is none.
    """
    try:
        scores = await_entries(verifier.judge_all(**arguments))
        num_completions = len(arguments["completions"])
        if len(scores) != num_completions:
            raise ValueError(
                f"{spell_count(len(scores), 'reward')} for "
                f"{spell_count(num_completions, 'completion')}: return one for each"
            )
        return {"scores": list(map(_read_score, scores))}
    except BaseException as error:  # foreign code, which may raise anything, and exit
        return _describe_failure(error)


def _read_score(value: Any) -> float | dict[str, str]:
    """A score, or why it is none: it costs its own completion, and no other."""
    try:
        if isinstance(value, BaseException):
            raise value
        return float(value)
    except BaseException as error:
        return _describe_failure(error)


def _describe_failure(error: BaseException) -> dict[str, str]:
    text = "".join(traceback.format_exception(error))[-MAX_READ_CHARACTERS:]
    visible_text = hide_key(text)[-MAX_TRACEBACK_CHARACTERS:]
    return {"problem": describe_error(error), "traceback": visible_text}
