"""Keeps prompts in flight ahead of training, and hands out the groups of a step in the order they were asked in.

Every asking of a prompt has a ticket, counted from the start of the run. A step's batch is the next
`num_unique_prompts_rollout` accepted tickets, never those that happened to be done first: which engine was quick, and
which verdict late, decide nothing. Tickets are drawn by the driver's own thread at fixed points of its walk, so which
prompt a ticket asks does not depend on timing either.

While step s waits for its batch the engines have version s - 1, and at most `async_steps` + 1 batches of groups are
out: those of steps s to s + `async_steps`. A ticket drawn then is consumed by step s + `async_steps` at the latest,
where the learners are at version s + `async_steps` - 1. So no token is more than `async_steps` steps stale, whether a
sync waits for running completions or reaches into them (`inflight_updates`): a token is at least as new as its ticket.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.rollout_sections import RolloutSection
from open_instruct.engines.requests import GenerationRequest, SamplingSettings
from open_instruct.errors import RunError
from open_instruct.losses.advantages import has_signal
from open_instruct.parallel.wording import counted
from open_instruct.records import Completion, Prompt, RolloutGroup, Verdict
from open_instruct.rollout.learning_signal import refuse_failed_verdicts
from open_instruct.rollout.samples import RolloutStepBatch

if TYPE_CHECKING:
    from open_instruct.data.prompts import PromptStream
    from open_instruct.engines.engine_pool import EnginePool
    from open_instruct.verifiers.reward import RewardModel

NUM_JUDGING_THREADS = 16
STALL_TIMEOUT_S = 3600.0
# Groups that a step may reject for each that it needs, before the run is told that it learns nothing.
MAX_REJECTED_PER_PROMPT = 50


@dataclass(slots=True, kw_only=True)
class _OpenGroup:
    """A group on its way: what was asked, and by sample what came of it. Guarded by the conductor's lock."""

    ticket: int
    prompt: Prompt
    num_samples: int
    version: int  # of the weights that were published when it was asked
    futures: list[Future[Completion]] = field(default_factory=list)
    answers: dict[int, tuple[Completion, Verdict]] = field(default_factory=dict)

    @property
    def num_missing(self) -> int:
        return self.num_samples - len(self.answers)

    def complete(self) -> RolloutGroup:
        completions, verdicts = zip(*(self.answers[index] for index in range(self.num_samples)), strict=True)
        return RolloutGroup(ticket=self.ticket, prompt=self.prompt, completions=completions, verdicts=verdicts)


class Conductor:
    """Asks the prompts of a run and hands out its batches; `start`, then `next_batch` and `weights_published` in turn.

    Args:
        prompts: the endless stream of tickets; nobody else may draw from it.
        pool: where requests go.
        reward: judges completions, on threads of the conductor's.
        config: of the run, after whose last step no prompt is asked.
    """

    def __init__(self, prompts: PromptStream, pool: EnginePool, reward: RewardModel, *, config: GRPOConfig) -> None:
        self._prompts = prompts
        self._pool = pool
        self._reward = reward
        self._config = config.rollout
        self._num_steps = config.num_steps
        self._requests_of = partial(requests_of, config=config)
        self._version = 0
        self._num_accepted = 0  # of the step at hand
        self._outstanding: deque[_OpenGroup] = deque()  # in ticket order
        self._to_ask_again: list[tuple[int, Prompt]] = []
        self._num_done = 0
        self._num_at_engines = 0
        self._num_at_verifiers = 0
        self._num_verified = 0
        self._failure: RunError | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._judges = ThreadPoolExecutor(NUM_JUDGING_THREADS, thread_name_prefix="judge")

    # The driver's side

    def start(self, version: int) -> None:
        """Begin to ask, once the engines have the weights of `version`: the steps that are done."""
        self._version = version
        for ticket, prompt in self._to_ask_again:
            self._ask(ticket, prompt)
        self._to_ask_again = []
        self._ask_further()

    def next_batch(self, step: int, *, timeout_s: float = STALL_TIMEOUT_S) -> RolloutStepBatch:
        """Wait for the batch of `step` (1-based).

        Active sampling replaces a rejected group at once, and prompts that need no resampling are left out of
        the tickets drawn after this batch; those that are out already are still used.

        Raises:
            RunError: a completion could not be generated or judged; nothing arrived for `timeout_s` seconds; or active
                sampling finds nothing to learn from, or nothing that a verifier could judge.
        """
        assert step == self._version + 1, f"step {step} is asked for with the weights of version {self._version}"
        groups: list[RolloutGroup] = []
        rejected: list[RolloutGroup] = []
        size = self._config.num_unique_prompts_rollout
        while len(groups) < size:
            group = self._next_group(timeout_s)
            if is_rejected(group, self._config):
                rejected.append(group)
                if len(rejected) == size:
                    refuse_failed_verdicts((*groups, *rejected))
                if len(rejected) > MAX_REJECTED_PER_PROMPT * size:
                    raise RunError(_nothing_to_learn(step, groups, rejected))
                self._ask_further()
            else:
                groups.append(group)
                self._num_accepted = len(groups)
        batch = RolloutStepBatch(groups=tuple(groups), rejected=tuple(rejected))
        for row_id in solved_rows(batch, self._config):
            self._prompts.exclude(row_id)
        return batch

    def weights_published(self, version: int) -> None:
        """Every engine has the weights of `version`, so the prompts of one more step may go out."""
        self._version = version
        self._num_accepted = 0
        self._ask_further()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint between two steps needs, as JSON: the stream, and the tickets that are out.

        Tickets that are out when a run stops are asked again with their own seeds, of the weights then current.
        """
        assert self._num_accepted == 0, "the groups of a step that is not finished would be lost"
        out = [(group.ticket, group.prompt) for group in self._outstanding] + self._to_ask_again
        return {
            "prompts": self._prompts.state_dict(),
            "unconsumed": [[ticket, prompt.row_id] for ticket, prompt in out],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood; comes before `start`."""
        assert not self._outstanding, "prompts are out already"
        self._prompts.load_state_dict(state["prompts"])
        self._to_ask_again = [(ticket, self._prompts.dataset[row_id]) for ticket, row_id in state["unconsumed"]]

    def stats(self) -> dict[str, float]:
        """Where everything is, for the live view.

        `in_flight` completions are with the engines, `verifying` with the verifiers; `waiting` groups are complete
        and wait for their turn. `verified` completions and `done` groups count since `start`. `staleness` is how many
        versions ago the oldest ticket was asked.
        """
        with self._changed:
            return {
                "in_flight": self._num_at_engines,
                "verifying": self._num_at_verifiers,
                "waiting": sum(not group.num_missing for group in self._outstanding),
                "verified": self._num_verified,
                "done": self._num_done,
                "staleness": max((self._version - group.version for group in self._outstanding), default=0),
            }

    def close(self) -> None:
        """Give up what is out. What arrives later is dropped."""
        with self._changed:
            self._is_closed = True
            futures = [future for group in self._outstanding for future in group.futures]
        for future in futures:
            future.cancel()
        self._judges.shutdown(wait=False, cancel_futures=True)

    def _ask_further(self) -> None:
        """Draw tickets until what is out and what this step has accepted are the batches that may be out at once."""
        num_batches = min(self._config.async_steps + 1, self._num_steps - self._version)
        size = num_batches * self._config.num_unique_prompts_rollout
        while len(self._outstanding) + self._num_accepted < size:
            self._ask(*self._prompts.next())

    def _ask(self, ticket: int, prompt: Prompt) -> None:
        num_samples = self._config.num_samples_per_prompt_rollout
        group = _OpenGroup(ticket=ticket, prompt=prompt, num_samples=num_samples, version=self._version)
        with self._changed:
            self._outstanding.append(group)
            self._num_at_engines += num_samples
        for index, request in enumerate(self._requests_of(ticket, prompt)):
            future = self._pool.submit(request)
            group.futures.append(future)
            future.add_done_callback(partial(self._arrived, group, index))

    def _next_group(self, timeout_s: float) -> RolloutGroup:
        with self._changed:
            head = self._outstanding[0]
            while self._failure is None and head.num_missing:
                # Woken by every verdict: the clock runs only while nothing at all arrives.
                if not self._changed.wait(timeout_s):
                    raise RunError(self._stalled(head, timeout_s))
            if self._failure is not None:
                raise self._failure
            self._outstanding.popleft()
            self._num_done += 1
        return head.complete()

    def _stalled(self, head: _OpenGroup, timeout_s: float) -> str:
        last = self._outstanding[-1].ticket
        return (
            f"no completion came back for {timeout_s:g} s while ticket {head.ticket} (row {head.prompt.row_id}) waited "
            f"for {head.num_missing} of its {head.num_samples}. Tickets up to {last} are out: {self._num_at_engines} "
            f"completions with the engines, {self._num_at_verifiers} with the verifiers"
        )

    # The side of the pool's threads and of ours

    def _arrived(self, group: _OpenGroup, index: int, future: Future[Completion]) -> None:
        """Hand over to a thread of ours: the pool's must not wait for a verifier."""
        with self._changed:
            if self._is_closed:
                return
            self._num_at_engines -= 1
            self._num_at_verifiers += 1
            if future.exception() is None:
                self._judges.submit(self._judge, group, index, future)
            else:
                self._judge(group, index, future)  # asks no verifier, and the driver must not wait for those that hang

    def _judge(self, group: _OpenGroup, index: int, future: Future[Completion]) -> None:
        doing = "generated"
        answer: tuple[Completion, Verdict] | RunError
        try:
            completion = future.result()
            doing = "judged"
            answer = completion, self._reward.judge(group.prompt, completion)
        except RunError as error:
            answer = error
        except BaseException as error:  # a verifier that calls exit() must not leave the driver waiting
            where = f"completion {index} of ticket {group.ticket} (row {group.prompt.row_id})"
            answer = RunError(f"{where} could not be {doing}: {type(error).__name__}: {error}")
            answer.__cause__ = error
        with self._changed:
            self._num_at_verifiers -= 1
            if isinstance(answer, RunError):
                self._failure = self._failure or answer
            else:
                group.answers[index] = answer
                self._num_verified += 1
            self._changed.notify_all()


def _nothing_to_learn(step: int, groups: list[RolloutGroup], rejected: list[RolloutGroup]) -> str:
    rewards = [reward for group in rejected for reward in group.rewards]
    return (
        f"--active_sampling rejected {counted(len(rejected), 'group')} of step {step}, each with the same reward for "
        f"all of its completions (their mean is {sum(rewards) / len(rewards):.3g}), and found {len(groups)} to learn "
        "from. The prompts are too easy or too hard for this policy: use others, raise "
        "--num_samples_per_prompt_rollout, or leave --active_sampling out"
    )


def requests_of(ticket: int, prompt: Prompt, *, config: GRPOConfig) -> list[GenerationRequest]:
    """One request a sample of the group."""
    rollout = config.rollout
    sampling = SamplingSettings(
        temperature=rollout.temperature,
        top_p=rollout.vllm_top_p,
        max_tokens=config.data.response_length,
        stop_strings=tuple(rollout.stop_strings),
    )
    num_samples = rollout.num_samples_per_prompt_rollout
    return samples_of(prompt, num_samples, sampling, seed=config.optim.seed, place=(ticket,))


def samples_of(
    prompt: Prompt, num_samples: int, sampling: SamplingSettings, *, seed: int, place: tuple[int | str, ...]
) -> list[GenerationRequest]:
    """Requests of a prompt, each with a seed that depends on nothing but the run's and its own place in the run."""
    return [
        GenerationRequest(
            request_id="/".join(map(str, (*place, index))),
            prompt_token_ids=prompt.token_ids,
            seed=sampling_seed(seed, *place, index),
            sampling=sampling,
        )
        for index in range(num_samples)
    ]


def sampling_seed(*parts: int | str) -> int:
    """63 bits that are the same on every machine and in every version of Python.

    Example: `sampling_seed(run_seed, ticket, sample_index)`.
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def is_rejected(group: RolloutGroup, config: RolloutSection) -> bool:
    """Whether active sampling asks another prompt in place of this group."""
    return config.active_sampling and not has_signal(group.rewards)


def solved_rows(batch: RolloutStepBatch, config: RolloutSection) -> Sequence[int]:
    """Rows never to be asked again, in ticket order."""
    rate = config.no_resampling_pass_rate
    if rate is None:
        return []
    groups = sorted((*batch.groups, *batch.rejected), key=lambda group: group.ticket)
    return [
        group.prompt.row_id
        for group in groups
        if sum(verdict.is_right for verdict in group.verdicts) >= rate * len(group.verdicts)
    ]
