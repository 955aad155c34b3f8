"""Scores completions, foreign code in processes that are killed when they take too long. Callable from many threads."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

from open_instruct.parallel.launch import threads_of_each
from open_instruct.records import Check, Completion
from open_instruct.verifiers.registry import known_verifiers
from open_instruct.verifiers.verifier import without_thinking
from open_instruct.verifiers.worker import verdicts

WORKER = Path(__file__).resolve().with_name("worker.py")
PIECE_BYTES = 1 << 16
GUARD_TIMEOUT_S = 10.0
# What a verifier that was late this often in a row is given from then on, until one of its verdicts comes: a share of
# the time, or a multiple of what its slowest verdict took where that is more; and every so often all of it.
LATE_IN_A_ROW = 2
SHARE_OF_TIME = 0.2
TIMES_THE_SLOWEST = 3
WHOLE_TIME_EVERY = 16


@dataclass(slots=True)
class _Pace:
    """Of one verifier: how often in a row it was late, and the most seconds that a verdict of it took."""

    late_in_a_row: int = 0
    slowest_s: float = 0.0

    def time_s(self, timeout_s: float) -> float:
        """What its next verdict may take."""
        if self.late_in_a_row < LATE_IN_A_ROW or self.late_in_a_row % WHOLE_TIME_EVERY == 0:
            return timeout_s
        return min(timeout_s, max(SHARE_OF_TIME * timeout_s, TIMES_THE_SLOWEST * self.slowest_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A score from 0 to 1, and what kept it from being a real one, if anything did."""

    score: float
    problem: str | None = None


class VerifierPool:
    """`num_processes` workers for the isolated verifiers; the others are called where the caller is.

    `say` is told of the first problem of each verifier, with its traceback.

    Raises:
        InputError: a verifier of `user_verifiers` (words of `--verifier`) cannot be loaded.
    """

    def __init__(
        self,
        user_verifiers: Sequence[str] = (),
        *,
        num_processes: int,
        timeout_s: float,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.verifiers = known_verifiers(user_verifiers)
        # By its path and with -P: neither the working folder nor ours is where its imports are looked for. An empty
        # entry would mean the working folder.
        paths = os.pathsep.join(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        environment = {**os.environ, **threads_of_each(num_processes), "PYTHONPATH": paths}  # judges compute at once
        self._start = partial(Popen, [sys.executable, "-P", WORKER, *user_verifiers], env=environment)
        self._timeout_s = timeout_s
        self._start_timeout_s = max(verifier.start_timeout_s for verifier in self.verifiers.values())
        self._say = say
        self._told: set[str] = set()
        self._paces = {name: _Pace() for name in self.verifiers}
        self._telling = threading.Lock()  # guards both
        # Linux ends a worker with the thread that started it, so that must be one that lives as long as the pool.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="verifier-starter")
        # A place is a worker, or None until somebody needs one.
        self._places: queue.Queue[_Worker | None] = queue.Queue()
        self._num_places = num_processes
        for _ in range(num_processes):
            self._places.put(None)

    def scores(self, check: Check, prompt: str, completions: Sequence[Completion]) -> list[Outcome]:
        """Judge completions of one prompt, the text that was given.

        A verifier that raises, dies or takes too long gives each of them 0, and says so.
        """
        name, verifier = check.verifier, self.verifiers[check.verifier]
        asked = {
            "completions": [
                each.text if verifier.sees_thinking else without_thinking(each.text) for each in completions
            ],
            "are_truncated": [each.is_truncated for each in completions],
            "ground_truth": check.ground_truth,
            "prompt": prompt,
        }
        answer = self._ask_worker(name, asked) if verifier.isolated else verdicts(verifier, **asked)
        low, high = (0, 1) if verifier.is_bounded else (-sys.float_info.max, sys.float_info.max)
        if "problem" in answer:
            return [self._without_score(name, answer["problem"], answer.get("traceback", ""))] * len(completions)
        return [
            Outcome(score=score)
            if low <= score <= high
            else self._without_score(name, f"gave {score}, which is not between {low:g} and {high:g}")
            for score in answer["scores"]
        ]

    def _without_score(self, name: str, problem: str, traceback: str = "") -> Outcome:
        shown = f"the verifier {name}: {problem}\n{traceback}".rstrip()
        self._tell(name, f"{shown}\nIts score is 0. Further ones are only counted, as num_verifier_problems.")
        return Outcome(score=0.0, problem=f"{name}: {problem}")

    def _ask_worker(self, name: str, asked: Mapping[str, object]) -> dict[str, Any]:
        worker = self._places.get()
        try:
            worker = worker or _Worker(self._start, self._starter, start_timeout_s=self._start_timeout_s)
            time_s = self._paces[name].time_s(self._timeout_s)
            began_s = time.monotonic()
            answer = worker.ask({"verifier": name, **asked}, timeout_s=time_s)
            self._note(name, time.monotonic() - began_s, time_s, has_answered=answer is not None)
            if answer is None:
                worker.kill()
                worker = None
                answer = {"problem": f"took more than {time_s:g} s, or died"}
        finally:
            self._places.put(worker)
        return answer

    def _note(self, name: str, took_s: float, time_s: float, *, has_answered: bool) -> None:
        """Give a verifier that is late again and again less time, and say so once."""
        pace = self._paces[name]
        with self._telling:
            if has_answered:
                pace.late_in_a_row, pace.slowest_s = 0, max(pace.slowest_s, took_s)
            elif took_s >= time_s:
                pace.late_in_a_row += 1
            next_s, whole_s = pace.time_s(self._timeout_s), self._timeout_s
        if next_s < whole_s:
            self._tell(
                f"{name} is late",
                f"the verifier {name} took more than {whole_s:g} s several times in a row. So that a step does not "
                f"wait as long for each of its verdicts, they now have {next_s:.3g} s, until one comes (every "
                f"{WHOLE_TIME_EVERY}th has {whole_s:g} s). One that does not come scores 0, right or wrong, and counts "
                "as num_verifier_problems. Mend the verifier, or raise --verifier_timeout_s where it needs longer",
            )

    def _tell(self, what: str, text: str) -> None:
        with self._telling:
            is_first = what not in self._told
            self._told.add(what)
        if is_first:
            self._say(text)

    def close(self) -> None:
        """End the workers; waits for those that are at work."""
        for _ in range(self._num_places):
            worker = self._places.get()
            if worker is not None:
                worker.kill()
        self._starter.shutdown()


class _Worker:
    """A process with a session of its own; what its verifiers start, in whichever session, is ended with it."""

    def __init__(
        self, start: Callable[..., Popen[Any]], starter: ThreadPoolExecutor, *, start_timeout_s: float
    ) -> None:
        self._process = starter.submit(
            start, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, bufsize=0, start_new_session=True
        ).result()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._requests, False)
        self._unread = b""
        self._num_asked = 0
        self._greeting = self._exchange(b"", timeout_s=start_timeout_s)

    def ask(self, request: dict[str, object], *, timeout_s: float) -> dict[str, Any] | None:
        """The answer; None if the process died or did not answer in time, after which it must be killed."""
        if self._greeting is None or "problem" in self._greeting:
            return self._greeting
        self._num_asked += 1
        line = json.dumps({"id": self._num_asked, **request}).encode() + b"\n"
        return self._exchange(line, timeout_s=timeout_s)

    def _exchange(self, unsent: bytes, *, timeout_s: float) -> dict[str, Any] | None:
        """Send a line; the line that answers it. What else arrives is of a verdict that was waited for in vain."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            line, ends, rest = self._unread.partition(b"\n")
            if ends:
                self._unread = rest
                with contextlib.suppress(ValueError, AttributeError):  # not ours: a verifier found the pipe
                    answer: dict[str, Any] = json.loads(line)
                    if answer.get("id") == self._num_asked:
                        return answer
                continue
            polled = select.poll()
            polled.register(self._answers, select.POLLIN)
            if unsent:
                polled.register(self._requests, select.POLLOUT)
            left_s = deadline_s - time.monotonic()
            ready = dict(polled.poll(left_s * 1000)) if left_s > 0 else {}
            try:
                if self._requests in ready:
                    unsent = unsent[os.write(self._requests, unsent[:PIECE_BYTES]) :]
                piece = os.read(self._answers, PIECE_BYTES) if self._answers in ready else b""
            except OSError:
                return None
            self._unread += piece
            if not piece and self._requests not in ready:
                return None  # late, or at its end

    def kill(self) -> None:
        """End it, and all that its verifiers have started."""
        if sys.platform == "linux":
            self._process.terminate()  # its guard, which ends once it has killed the rest
            with contextlib.suppress(TimeoutExpired):
                self._process.wait(GUARD_TIMEOUT_S)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of it
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
