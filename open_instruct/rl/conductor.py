"""The conductor keeps prompts in flight ahead of training, and hands out groups in order.

A prompt that is asked gets a ticket, a number counted from the start of the run. The groups of a
step are the next `num_unique_prompts_rollout` accepted tickets in order, and not those that were
done first, so neither quick engines nor late verdicts change a batch. The driver's thread draws the
tickets at fixed points of its loop, so timing does not change the prompt of a ticket either.

States of a ticket, and where each is left:

    state       means                                        next
    waiting     loaded from a checkpoint (`_to_ask_again`)   in flight, at `weights_published`
    in flight   engines generate, or verifiers judge         complete, given up, or failed
    complete    every sample has its verdict                 accepted, rejected or given up
    accepted    is in the batch of a step                    trained on
    rejected    has no signal (--active_sampling)            replaced by a new ticket at once
    given up    late, and spare (--num_spare_prompts)        dropped before it is stale
    failed      could not be generated or judged             ends the run with a RunError

Limits:

    groups out        a batch, prompts_ahead, and num_spare_prompts groups        `_fill_flight`
    staleness         async_steps steps                                           below
    rejections        MAX_REJECTED_PER_PROMPT for each group that a step needs    `next_batch`
    silence           STALL_TIMEOUT_S without one verdict                         `_next_group`
    learners' check   every CHECK_INTERVAL_S of waiting                           `_next_group`

Who wakes whom:

    who waits             for what               is woken by
    the driver's thread   a complete group       `_note_answer`, on a thread of verifiers or engines
    engines               requests               the driver: `weights_published`, or a rejection
    verifiers             completions            an engine's thread, by `Episodes`
    learners              the next batch         the driver, once `next_batch` has returned

Nobody waits for the conductor's lock for long: it is held to read and change the queue, and never
while something is generated, judged or checked.

While step s waits for its batch the engines have version s - 1, and the groups of steps s to s +
`async_steps` are out, or the first of them where `prompts_ahead` is less. A ticket drawn then is
consumed by step s + `async_steps` at the latest, where the learners are at version s +
`async_steps` - 1. So no token is more than `async_steps` steps stale, whether a sync waits for
running completions or reaches into them (`inflight_updates`): a token is at least as new as its
ticket. Which spare groups are given up does depend on timing.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any

from open_instruct.config.rollout_sections import RolloutSection
from open_instruct.core.errors import RunError
from open_instruct.core.records import Prompt, RolloutGroup
from open_instruct.core.text import spell_count
from open_instruct.data.prompts import PromptStream
from open_instruct.generation.requests import GenerationRequest, SamplingSettings
from open_instruct.losses.advantages import has_signal
from open_instruct.rl.episodes.walk import Answer, Episodes, PendingGroup, build_requests
from open_instruct.rl.samples import RolloutStepBatch, num_right
from open_instruct.rl.step_checks import refuse_failed_verdicts

STALL_TIMEOUT_S = 3600.0
# Seconds between checks of the learners, which meanwhile do nothing.
CHECK_INTERVAL_S = 3.0
# How many groups a step may reject for each that it needs; a run that rejects more ends.
MAX_REJECTED_PER_PROMPT = 50


class Conductor:
    """Asks the prompts of a run and hands out its batches.

    Call `weights_published` and `next_batch` in turn, from one thread. It neither trains nor sends
    weights: the driver does both between the two calls.

    Args:
        prompts: the endless stream of tickets; nobody else may draw from it.
        episodes: asks and judges; closed with the conductor.
        rollout: the flags of steps and completions.
        num_steps: of the run; after the last no prompt is asked.
        response_length: the most tokens of a completion.
        seed: of the run.
    """

    def __init__(
        self,
        prompts: PromptStream,
        episodes: Episodes,
        *,
        rollout: RolloutSection,
        num_steps: int,
        response_length: int,
        seed: int,
    ) -> None:
        self._prompts = prompts
        self._episodes = episodes
        self._rollout = rollout
        self._num_steps = num_steps
        self._response_length = response_length
        self._seed = seed
        self._version = 0
        self._num_accepted = 0  # of the step at hand
        self._last_check_s = time.monotonic()
        self._outstanding: deque[PendingGroup] = deque()  # in ticket order
        self._to_ask_again: list[tuple[int, Prompt]] = []
        self._failure: RunError | None = None
        self._condition = threading.Condition()

    # The driver's side

    def next_batch(
        self,
        step: int,
        *,
        check: Callable[[], object] = lambda: None,
        timeout_s: float = STALL_TIMEOUT_S,
    ) -> RolloutStepBatch:
        """Wait for the batch of `step` (1-based), and return it.

        `check` is called now and then; its exception ends the wait. Active sampling replaces a
        rejected group at once. Prompts that need no resampling are left out of the tickets drawn
        after this batch; those that are out already are still used.

        Raises:
            RunError: a completion could not be generated or judged; nothing arrived for `timeout_s`
                seconds; or active sampling finds nothing to learn from, or nothing that a verifier
                could judge.
        """
        assert step == self._version + 1, (
            f"step {step} is asked for with the weights of version {self._version}"
        )
        groups: list[RolloutGroup] = []
        rejected: list[RolloutGroup] = []
        size = self._rollout.num_unique_prompts_rollout
        while len(groups) < size:
            group = self._next_group(check, timeout_s)
            if is_rejected(group, self._rollout):
                rejected.append(group)
                if len(rejected) == size:
                    refuse_failed_verdicts((*groups, *rejected))
                if len(rejected) > MAX_REJECTED_PER_PROMPT * size:
                    raise RunError(_describe_missing_signal(step, groups, rejected))
                self._fill_flight()
            else:
                groups.append(group)
                self._num_accepted = len(groups)
        groups.sort(key=lambda group: group.ticket)
        batch = RolloutStepBatch(
            groups=tuple(groups),
            rejected=tuple(rejected),
            num_given_up=self._drop_stale_groups(step + 1),
        )
        for row_id in find_solved_rows(batch, self._rollout):
            self._prompts.exclude(row_id)
        return batch

    def weights_published(self, version: int) -> None:
        """Ask the prompts of one more step, as every engine has the weights of `version`.

        A version is the number of steps taken.
        """
        self._version = version
        self._num_accepted = 0
        for ticket, prompt in self._to_ask_again:
            self._ask(ticket, prompt)
        self._to_ask_again = []
        self._fill_flight()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint between two steps, as JSON: the stream and the open tickets.

        Tickets in flight when a run stops are asked again with their own seeds, and the weights of
        that time.
        """
        assert self._num_accepted == 0, "the groups of a step that is not finished would be lost"
        in_flight = [(group.ticket, group.prompt) for group in self._outstanding]
        unconsumed = in_flight + self._to_ask_again
        return {
            "prompts": self._prompts.state_dict(),
            "unconsumed": [[ticket, prompt.row_id] for ticket, prompt in unconsumed],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's state; call it before the first `weights_published`."""
        assert not self._outstanding, "prompts are out already"
        self._prompts.load_state_dict(state["prompts"])
        self._to_ask_again = [
            (ticket, self._prompts.dataset[row_id]) for ticket, row_id in state["unconsumed"]
        ]

    def stats(self) -> dict[str, float]:
        """Counts of completions and groups that are not trained on yet, for the live view.

        `in_flight` completions are with the engines, `verifying` with the verifiers; `waiting`
        groups are complete and wait for their turn.
        """
        with self._condition:
            groups = list(self._outstanding)
        # First, as completions arrive meanwhile.
        num_unanswered = sum(group.num_missing for group in groups)
        num_generated = sum(len(group.completions) for group in groups)
        in_flight = sum(len(group.requests) for group in groups) - num_generated
        return {
            "in_flight": in_flight,
            "verifying": num_unanswered - in_flight,
            "waiting": sum(group.num_missing == 0 for group in groups),
        }

    def close(self) -> None:
        """Give up everything in flight; completions that arrive later are dropped."""
        self._episodes.close()

    def _fill_flight(self) -> None:
        """Draw tickets until all batches that may be out at once are full."""
        rollout = self._rollout
        num_steps_left = self._num_steps - self._version
        if not num_steps_left:
            return
        num_later_prompts = (num_steps_left - 1) * rollout.num_unique_prompts_rollout
        size = rollout.num_unique_prompts_rollout + rollout.num_spare_prompts
        size += min(rollout.max_prompts_ahead, num_later_prompts)
        while len(self._outstanding) + self._num_accepted < size:
            self._ask(*self._prompts.next())

    def _ask(self, ticket: int, prompt: Prompt) -> None:
        requests = build_group_requests(
            ticket,
            prompt,
            rollout=self._rollout,
            response_length=self._response_length,
            seed=self._seed,
        )
        group = self._episodes.ask(ticket, prompt, requests, version=self._version)
        with self._condition:
            self._outstanding.append(group)
        for answer in group.answers:
            answer.add_done_callback(self._note_answer)

    def _next_group(self, check: Callable[[], object], timeout_s: float) -> RolloutGroup:
        """Wait for the first complete group in ticket order; as many as are spare may be passed."""
        num_candidates = 1 + self._rollout.num_spare_prompts
        candidates = list(self._outstanding)[:num_candidates]
        changed_s = time.monotonic()
        while True:
            with self._condition:
                if self._failure is not None:
                    raise self._failure
                complete = [group for group in candidates if not group.num_missing]
                if complete:
                    self._outstanding.remove(complete[0])
                    return complete[0].rollouts()
                # Every verdict resets the clock, which runs only while nothing arrives.
                if self._condition.wait(min(timeout_s, CHECK_INTERVAL_S)):
                    changed_s = time.monotonic()
                elif time.monotonic() - changed_s >= timeout_s:
                    raise RunError(self._describe_stall(candidates[0], timeout_s))
            if time.monotonic() - self._last_check_s >= CHECK_INTERVAL_S:
                check()  # without the lock, which a thread that reports a failure needs
                self._last_check_s = time.monotonic()

    def _drop_stale_groups(self, step: int) -> int:
        """Give up the spare groups that are too old for `step`; returns how many there were."""
        with self._condition:
            is_over = step > self._num_steps
            oldest_version = step - 1 - self._rollout.async_steps
            late = [
                group for group in self._outstanding if is_over or group.version < oldest_version
            ]
            for group in late:
                self._outstanding.remove(group)
        for group in late:
            group.give_up()
        return len(late)

    def _describe_stall(self, head: PendingGroup, timeout_s: float) -> str:
        stats = self.stats()
        return (
            f"no completion came back for {timeout_s:g} s while ticket {head.ticket} (row "
            f"{head.prompt.row_id}) waited for {head.num_missing} of its {len(head.answers)}. "
            f"Tickets up to {self._outstanding[-1].ticket} are out: {stats['in_flight']} "
            f"completions with the engines, {stats['verifying']} with the verifiers"
        )

    def _note_answer(self, answer: Future[Answer]) -> None:
        """Wake the driver; called by a thread of the verifiers or of the engines."""
        error = answer.exception()
        with self._condition:
            if isinstance(error, RunError):
                self._failure = self._failure or error
            self._condition.notify_all()


def _describe_missing_signal(
    step: int, groups: list[RolloutGroup], rejected: list[RolloutGroup]
) -> str:
    rewards = list(chain.from_iterable(group.rewards for group in rejected))
    return (
        f"--active_sampling rejected {spell_count(len(rejected), 'group')} of step {step}, each "
        "with the same reward for all of its completions (their mean is "
        f"{sum(rewards) / len(rewards):.3g}), and found {len(groups)} to learn from. The prompts "
        "are too easy or too hard for this policy: use others, raise "
        "--num_samples_per_prompt_rollout, or leave --active_sampling out"
    )


def build_group_requests(
    ticket: int,
    prompt: Prompt,
    *,
    rollout: RolloutSection,
    response_length: int,
    seed: int,
) -> list[GenerationRequest]:
    """One request for each sample of a ticket's prompt."""
    sampling = SamplingSettings(
        temperature=rollout.temperature,
        top_p=rollout.vllm_top_p,
        max_tokens=response_length,
        stop_strings=tuple(rollout.stop_strings),
    )
    num_samples = rollout.num_samples_per_prompt_rollout
    return build_requests(prompt, num_samples, sampling, seed=seed, place=(ticket,))


def is_rejected(group: RolloutGroup, config: RolloutSection) -> bool:
    """Whether active sampling asks another prompt in place of this group."""
    return config.active_sampling and not has_signal(group.rewards)


def find_solved_rows(batch: RolloutStepBatch, config: RolloutSection) -> Sequence[int]:
    """Rows never to be asked again, in ticket order."""
    rate = config.no_resampling_pass_rate
    if rate is None:
        return []
    groups = sorted((*batch.groups, *batch.rejected), key=lambda group: group.ticket)
    return [
        group.prompt.row_id for group in groups if num_right(group) >= rate * len(group.verdicts)
    ]
