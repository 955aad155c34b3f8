"""Ask, answer, judge: the walk of a prompt's requests, the same for every caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from open_instruct.engines.requests import GenerationRequest
from open_instruct.errors import RunError
from open_instruct.records import Completion, Prompt, RolloutGroup, Verdict

if TYPE_CHECKING:
    from open_instruct.engines.engine_pool import EnginePool
    from open_instruct.verifiers.reward import RewardManager

NUM_JUDGING_THREADS = 16

Answer = tuple[Completion, Verdict]


class Episodes:
    """Asks engines for completions, and judges them on threads of its own, so that the pool's threads do not wait.

    A completion is judged as soon as it arrives. If a verifier of the prompt judges whole groups, all completions are
    judged together when the last one arrives.
    """

    def __init__(self, pool: EnginePool, rewards: RewardManager) -> None:
        self._pool = pool
        self._rewards = rewards
        self._judges = ThreadPoolExecutor(NUM_JUDGING_THREADS, thread_name_prefix="judge")
        self._asked: set[Future[Completion]] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def ask(
        self, prompt: Prompt, requests: Sequence[GenerationRequest], *, arrived: Callable[[], None] = lambda: None
    ) -> list[Future[Answer]]:
        """The future answers to the requests; one that could not be generated or judged raises a `RunError`.

        `arrived` is called for each completion, before it is judged.
        """
        answers: list[Future[Answer]] = [Future() for _ in requests]
        group: dict[int, Completion] = {}

        def hand_over(index: int, future: Future[Completion]) -> None:
            with self._lock:
                self._asked.discard(future)
                if self._is_closed:
                    return
            arrived()
            if (error := future.exception()) is not None:
                what = f"completion {requests[index].request_id} (row {prompt.row_id})"
                _fail(answers, error, f"{what} could not be generated")
                return
            with self._lock:
                group[index] = future.result()
                is_last = len(group) == len(requests)
            if not self._rewards.judges_groups(prompt):
                self._judges.submit(self._judge, prompt, requests, {index: group[index]}, answers)
            elif is_last:
                self._judges.submit(self._judge, prompt, requests, group, answers)

        for index, request in enumerate(requests):
            future = self._pool.submit(request)
            with self._lock:
                self._asked.add(future)
            future.add_done_callback(partial(hand_over, index))
        return answers

    def close(self) -> None:
        """Give up everything in flight; completions that arrive later are dropped."""
        with self._lock:
            self._is_closed = True
            asked = list(self._asked)
        for future in asked:
            future.cancel()
        self._judges.shutdown(wait=False, cancel_futures=True)

    def _judge(
        self,
        prompt: Prompt,
        requests: Sequence[GenerationRequest],
        group: dict[int, Completion],
        answers: Sequence[Future[Answer]],
    ) -> None:
        indices = sorted(group)
        try:
            verdicts = self._rewards.judge(prompt, [group[index] for index in indices])
            judged = list(zip(indices, verdicts, strict=True))
        except BaseException as error:  # a verifier that calls exit() must not leave others waiting
            names = ", ".join(requests[index].request_id for index in indices)
            _fail(answers, error, f"completion {names} (row {prompt.row_id}) could not be judged")
            return
        for index, verdict in judged:
            with suppress(InvalidStateError):  # another of the group failed meanwhile
                answers[index].set_result((group[index], verdict))


def _fail(answers: Sequence[Future[Answer]], error: BaseException, what: str) -> None:
    """Fail all open answers of a group in which one failed."""
    failure = error if isinstance(error, RunError) else RunError(f"{what}: {type(error).__name__}: {error}")
    if failure is not error:
        failure.__cause__ = error
    for answer in answers:
        with suppress(InvalidStateError):  # one that is answered
            answer.set_exception(failure)


def group_of(ticket: int, prompt: Prompt, answers: Sequence[Future[Answer]]) -> RolloutGroup:
    """The rollout group of a prompt whose answers are all there."""
    completions, verdicts = zip(*(answer.result() for answer in answers), strict=True)
    return RolloutGroup(ticket=ticket, prompt=prompt, completions=completions, verdicts=verdicts)
