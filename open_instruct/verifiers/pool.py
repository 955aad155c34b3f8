"""Scores completions, foreign code in processes that are killed when they take too long. Callable from many threads."""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_instruct.records import Check
from open_instruct.verifiers.registry import known_verifiers
from open_instruct.verifiers.verifier import without_thinking

PACKAGE_PARENT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A score from 0 to 1, and what kept it from being a real one, if anything did."""

    score: float
    problem: str | None = None


class VerifierPool:
    """`num_processes` workers for the isolated verifiers; the others are called where the caller is.

    Raises:
        InputError: a verifier of `user_verifiers` (words of `--verifier`) cannot be loaded.
    """

    def __init__(self, user_verifiers: Sequence[str] = (), *, num_processes: int, timeout_s: float) -> None:
        self.verifiers = known_verifiers(user_verifiers)
        self._command = [sys.executable, "-m", "open_instruct.verifiers.worker", *user_verifiers]
        self._timeout_s = timeout_s
        # Linux ends a worker with the thread that started it, so that must be one that lives as long as the pool.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="verifier-starter")
        # A place is a worker, or None until somebody needs one.
        self._places: queue.Queue[_Worker | None] = queue.Queue()
        self._num_places = num_processes
        for _ in range(num_processes):
            self._places.put(None)

    def score(self, check: Check, completion: str) -> Outcome:
        """Judge one completion. A verifier that raises, dies or takes too long gives 0, and says so."""
        text = without_thinking(completion)
        verifier = self.verifiers[check.verifier]
        if not verifier.isolated:
            try:
                return _bounded(check.verifier, float(verifier.score(text, check.ground_truth)))
            except Exception as error:  # it may be foreign code, which may raise anything
                return Outcome(score=0.0, problem=f"{check.verifier}: {type(error).__name__}: {error}")
        worker = self._places.get()
        try:
            if worker is None:
                worker = _Worker(self._command, self._starter)
            request = {"verifier": check.verifier, "text": text, "ground_truth": check.ground_truth}
            answer = worker.ask(request, timeout_s=self._timeout_s)
            if answer is None:
                worker.kill()
                worker = None
                return Outcome(score=0.0, problem=f"{check.verifier} took more than {self._timeout_s:g} s, or died")
        finally:
            self._places.put(worker)
        if "problem" in answer:
            return Outcome(score=0.0, problem=f"{check.verifier}: {answer['problem']}")
        return _bounded(check.verifier, answer["score"])

    def close(self) -> None:
        """End the workers; waits for those that are at work."""
        for _ in range(self._num_places):
            worker = self._places.get()
            if worker is not None:
                worker.kill()
        self._starter.shutdown()


def _bounded(name: str, score: float) -> Outcome:
    if 0 <= score <= 1:
        return Outcome(score=float(score))
    return Outcome(score=0.0, problem=f"{name} gave {score}, which is not between 0 and 1")


class _Worker:
    def __init__(self, command: Sequence[str], starter: ThreadPoolExecutor) -> None:
        paths = [str(PACKAGE_PARENT), os.getcwd(), os.environ.get("PYTHONPATH", "")]
        self._process = starter.submit(
            subprocess.Popen,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # So that the package is found uninstalled, and the user's module where the run was started.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        ).result()
        self._is_ready = self._read(START_TIMEOUT_S) is not None

    def ask(self, request: dict[str, object], *, timeout_s: float) -> dict[str, Any] | None:
        """The answer; None if the process died or did not answer in time, after which it must be killed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        return self._read(timeout_s) if self._is_ready else None

    def _read(self, timeout_s: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        # A line is short, so it arrives whole once its beginning has.
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else b""
        return json.loads(line) if line.endswith(b"\n") else None

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()
