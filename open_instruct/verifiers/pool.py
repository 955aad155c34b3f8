"""Judges completions, foreign code in processes that are killed when they take too long. Callable from many threads."""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from open_instruct.config.rollout_sections import RewardSection
from open_instruct.parallel.launch import threads_of_each
from open_instruct.records import Check, Completion, Prompt, Verdict
from open_instruct.sandbox.sandbox import Forks
from open_instruct.verifiers.registry import known_verifiers
from open_instruct.verifiers.reward import Outcome, verdict_of
from open_instruct.verifiers.verifier import without_thinking
from open_instruct.verifiers.worker import answered, verdicts

# A verifier that was late this often in a row gets less time until one of its verdicts comes: a share of
# --verifier_timeout_s, or a multiple of the time of its slowest verdict if that is more. Every 16th gets all of it.
LATE_IN_A_ROW = 2
SHARE_OF_TIME = 0.2
TIMES_THE_SLOWEST = 3
WHOLE_TIME_EVERY = 16


@dataclass(slots=True)
class _Pace:
    """The number of late verdicts of one verifier in a row, and the time of its slowest verdict."""

    late_in_a_row: int = 0
    slowest_s: float = 0.0

    def time_s(self, timeout_s: float) -> float:
        """The time that its next verdict may take."""
        if self.late_in_a_row < LATE_IN_A_ROW or self.late_in_a_row % WHOLE_TIME_EVERY == 0:
            return timeout_s
        return min(timeout_s, max(SHARE_OF_TIME * timeout_s, TIMES_THE_SLOWEST * self.slowest_s))

    def note(self, took_s: float, *, is_late: bool, has_answered: bool) -> None:
        if has_answered:
            self.late_in_a_row = 0
            self.slowest_s = max(self.slowest_s, took_s)
        elif is_late:
            self.late_in_a_row += 1


class VerifierPool:
    """Asks verifiers for scores: isolated ones in processes of their own, the others in the caller's.

    `say` gets a message about the first problem of each verifier, with its traceback.

    Raises:
        InputError: a verifier that `flags` name cannot be loaded.
    """

    def __init__(self, flags: RewardSection, *, say: Callable[[str], None] = lambda text: None) -> None:
        self.verifiers = known_verifiers(flags)
        # An empty entry of PYTHONPATH would mean the working folder, from which nothing else is to be imported.
        paths = os.pathsep.join(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        self._environment = {**os.environ, **threads_of_each(flags.num_verifier_processes), "PYTHONPATH": paths}
        self._flags = flags
        self._start_timeout_s = max(verifier.start_timeout_s for verifier in self.verifiers.values())
        self._say = say
        self._said: set[str] = set()
        self._paces = {name: _Pace() for name in self.verifiers}
        self._lock = threading.Lock()  # of both
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
            verdict_of(prompt, completion, [outcomes[at] for outcomes in check_outcomes], self._flags)
            for at, completion in enumerate(completions)
        ]

    def scores(self, check: Check, prompt: str, completions: Sequence[Completion]) -> list[Outcome]:
        """The scores of completions of one prompt, which is the text that the engine was given.

        Where a verifier raises, dies or takes too long, the score is 0 and the outcome has the problem.
        """
        name = check.verifier
        verifier = self.verifiers[name]
        if verifier.isolated and not verifier.judges_groups and len(completions) > 1:  # each has its own time
            return [outcome for each in completions for outcome in self.scores(check, prompt, [each])]
        given = [getattr(each, verifier.reads) for each in completions]
        asked = {
            "completions": given
            if verifier.sees_thinking or verifier.reads != "text"
            else list(map(without_thinking, given)),
            "are_truncated": [each.is_truncated for each in completions],
            "ground_truth": check.ground_truth,
            "prompt": prompt,
        }
        answer = self._ask_worker(name, asked) if verifier.isolated else verdicts(verifier, **asked)
        low, high = (0.0, 1.0) if verifier.is_bounded else (-sys.float_info.max, sys.float_info.max)
        outcomes = []
        for score in answer.get("scores", [answer] * len(completions)):
            if isinstance(score, dict):
                outcomes.append(self._without_score(name, **score))
            elif low <= score <= high:
                outcomes.append(Outcome(score=score))
            else:
                problem = f"gave {score}, which is not between {low:g} and {high:g}"
                outcomes.append(self._without_score(name, problem))
        return outcomes

    def _without_score(self, name: str, problem: str, traceback: str = "", **_: object) -> Outcome:
        shown = f"the verifier {name}: {problem}\n{traceback}".rstrip()
        self._say_once(name, f"{shown}\nIts score is 0. Further ones are only counted, as num_verifier_problems.")
        return Outcome(score=0.0, problem=f"{name}: {problem}")

    def _ask_worker(self, name: str, asked: Mapping[str, object]) -> dict[str, Any]:
        worker = self._places.get()
        try:
            worker = worker or _Worker(self._flags, self._environment, start_timeout_s=self._start_timeout_s)
            time_s = self._paces[name].time_s(self._flags.verifier_timeout_s)
            began_s = time.monotonic()
            answer = worker.ask({"verifier": name, **asked}, timeout_s=time_s)
            took_s = time.monotonic() - began_s
            with self._lock:
                self._paces[name].note(took_s, is_late=took_s >= time_s, has_answered=answer is not None)
            self._say_if_late(name)
            if answer is None:
                worker.kill()
                worker = None
                answer = {"problem": f"took more than {time_s:g} s, or died"}
        finally:
            self._places.put(worker)
        return answer

    def _say_if_late(self, name: str) -> None:
        whole_s = self._flags.verifier_timeout_s
        next_s = self._paces[name].time_s(whole_s)
        if next_s < whole_s:
            self._say_once(
                f"{name} is late",
                f"the verifier {name} took more than {whole_s:g} s several times in a row. So that a step does not "
                f"wait as long for each of its verdicts, they now have {next_s:.3g} s, until one comes (every "
                f"{WHOLE_TIME_EVERY}th has {whole_s:g} s). One that does not come scores 0, right or wrong, and counts "
                "as num_verifier_problems. Mend the verifier, or raise --verifier_timeout_s where it needs longer",
            )

    def _say_once(self, what: str, text: str) -> None:
        with self._lock:
            is_first = what not in self._said
            self._said.add(what)
        if is_first:
            self._say(text)

    def close(self) -> None:
        """End the workers; waits for those that are at work."""
        for _ in range(self._flags.num_verifier_processes):
            worker = self._places.get()
            if worker is not None:
                worker.kill()


class _Worker:
    """A process of verifiers. All processes that these start, in whichever session, are ended with it."""

    def __init__(self, flags: RewardSection, environment: Mapping[str, str], *, start_timeout_s: float) -> None:
        self._forks = Forks(answers_with=answered, environment=environment)
        self._process = self._forks.child()
        self._greeting = self._told({"flags": asdict(flags)}, timeout_s=start_timeout_s)

    def ask(self, request: Mapping[str, object], *, timeout_s: float) -> dict[str, Any] | None:
        """The answer; None if the process died or did not answer in time, after which it must be killed."""
        if self._greeting is None or "problem" in self._greeting:
            return self._greeting
        return self._told(request, timeout_s=timeout_s)

    def _told(self, request: Mapping[str, object], *, timeout_s: float) -> dict[str, Any] | None:
        ran = self._process.ask(request, timeout_s=timeout_s)
        told: dict[str, Any] | None = json.loads(ran.value) if ran.status == "done" else None
        return told

    def kill(self) -> None:
        self._process.close()
        self._forks.close()
