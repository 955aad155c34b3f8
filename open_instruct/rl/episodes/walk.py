"""Ask, answer, judge: what becomes of a prompt's requests, the same for every caller."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion, Prompt, RolloutGroup, Verdict
from open_instruct.generation.engine_pool import EnginePool
from open_instruct.generation.requests import (
    GenerationRequest,
    SamplingSettings,
    make_sampling_seed,
)
from open_instruct.rewards.pool import VerifierPool

NUM_JUDGING_THREADS = 16

Answer = tuple[Completion, Verdict]


class EpisodeRunner(Protocol):
    """Runs the episodes of prompts that an environment or an agent answers."""

    def ask(self, prompt: Prompt, request: GenerationRequest) -> Future[Completion]:
        """Begin an episode with `request`; returns the future of its completion."""

    def close(self) -> None:
        """Give up all episodes in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingGroup:
    """A prompt that engines were asked, with the completions and verdicts so far."""

    ticket: int
    prompt: Prompt
    requests: Sequence[GenerationRequest]
    answers: Sequence[Future[Answer]]  # by sample
    version: int = 0  # of the weights when it was asked
    generations: list[Future[Completion]] = field(default_factory=list)  # by sample
    # By sample; those that engines have finished.
    completions: dict[int, Completion] = field(default_factory=dict)

    @property
    def num_missing(self) -> int:
        return sum(not answer.done() for answer in self.answers)

    def rollouts(self) -> RolloutGroup:
        """Wait for all completions with their verdicts, and return them.

        Raises:
            RunError: one of them failed.
        """
        answers = [answer.result() for answer in self.answers]
        completions = tuple(completion for completion, _ in answers)
        verdicts = tuple(verdict for _, verdict in answers)
        return RolloutGroup(
            ticket=self.ticket,
            prompt=self.prompt,
            completions=completions,
            verdicts=verdicts,
        )

    def give_up(self) -> None:
        """Cancel what is still being generated."""
        for completion in self.generations:
            completion.cancel()

    def fail(self, error: BaseException, samples: Sequence[int], reason: str) -> None:
        """Fail all open answers of the group, because `samples` failed.

        Args:
            reason: the predicate of the message, such as "could not be judged".
        """
        failure = error
        if not isinstance(error, RunError):
            names = ", ".join(self.requests[sample].request_id for sample in samples)
            row = self.prompt.row_id
            failure = RunError(
                f"completion {names} (row {row}) {reason}: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
        for answer in self.answers:
            with suppress(InvalidStateError):  # it has an answer
                answer.set_exception(failure)


class Episodes:
    """Asks engines for completions, and has verifiers judge them on threads of its own.

    So the engines' threads never wait. A completion is judged as soon as it arrives. If a verifier
    of the prompt judges whole groups, all completions are judged together once all have arrived.
    """

    def __init__(
        self,
        pool: EnginePool,
        verifiers: VerifierPool,
        find_runner: Callable[[str], EpisodeRunner] | None = None,
    ) -> None:
        self._pool = pool
        self._find_runner = find_runner  # by the name of a prompt's environment
        self._verifiers = verifiers
        self._judges = ThreadPoolExecutor(NUM_JUDGING_THREADS, thread_name_prefix="judge")
        self._generating: set[Future[Completion]] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def ask(
        self,
        ticket: int,
        prompt: Prompt,
        requests: Sequence[GenerationRequest],
        *,
        version: int = 0,
    ) -> PendingGroup:
        """Ask the requests of a prompt, without waiting for the answers.

        An answer whose completion cannot be generated or judged raises a `RunError`, as do all
        others of its group.
        """
        answers: list[Future[Answer]] = [Future() for _ in requests]
        group = PendingGroup(
            ticket=ticket,
            prompt=prompt,
            requests=requests,
            answers=answers,
            version=version,
        )
        for sample, request in enumerate(requests):
            completion = self._start_completion(prompt, request)
            group.generations.append(completion)
            with self._lock:
                self._generating.add(completion)
            completion.add_done_callback(partial(self._judge_when_ready, group, sample))
        return group

    def _start_completion(self, prompt: Prompt, request: GenerationRequest) -> Future[Completion]:
        if not prompt.environment:
            return self._pool.submit(request)
        assert self._find_runner is not None
        return self._find_runner(prompt.environment).ask(prompt, request)

    def close(self) -> None:
        """Give up everything in flight; completions that arrive later are dropped."""
        with self._lock:
            self._is_closed = True
            generating = list(self._generating)
        for completion in generating:
            completion.cancel()
        self._judges.shutdown(wait=False, cancel_futures=True)

    def _judge_when_ready(
        self, group: PendingGroup, sample: int, completion: Future[Completion]
    ) -> None:
        """Have a completion that just arrived judged, or its group; an engine's thread calls."""
        with self._lock:
            self._generating.discard(completion)
            if self._is_closed or completion.cancelled():
                return
            error = completion.exception()
            if error is None:
                group.completions[sample] = completion.result()
            has_all = len(group.completions) == len(group.requests)
        if error is not None:
            group.fail(error, [sample], "could not be generated")
        elif not self._verifiers.judges_groups(group.prompt):
            self._judges.submit(self._judge, group, [sample])
        elif has_all:
            self._judges.submit(self._judge, group, range(len(group.requests)))

    def _judge(self, group: PendingGroup, samples: Sequence[int]) -> None:
        completions = [group.completions[sample] for sample in samples]
        try:
            verdicts = self._verifiers.judge(group.prompt, completions)
            judged_samples = list(zip(samples, completions, verdicts, strict=True))
        except BaseException as error:  # a verifier that calls exit() must not leave others waiting
            group.fail(error, samples, "could not be judged")
            return
        for sample, completion, verdict in judged_samples:
            with suppress(InvalidStateError):  # another of the group failed meanwhile
                group.answers[sample].set_result((completion, verdict))


def build_requests(
    prompt: Prompt,
    num_samples: int,
    sampling: SamplingSettings,
    *,
    seed: int,
    place: tuple[int | str, ...],
) -> list[GenerationRequest]:
    """Build one request for each sample of the prompt.

    Args:
        place: the prompt's place in the run, such as its ticket.
    """
    requests: list[GenerationRequest] = []
    for index in range(num_samples):
        request = GenerationRequest(
            request_id="/".join(map(str, (*place, index))),
            prompt_token_ids=prompt.token_ids,
            seed=make_sampling_seed(seed, *place, index),
            sampling=sampling,
        )
        requests.append(request)
    return requests
