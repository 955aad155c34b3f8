"""Keeps prompts in flight ahead of training, and hands out the groups of a step in the order they
were asked in.

Each time a prompt is asked, it gets a ticket, counted from the start of the run. A step's batch is
the next `num_unique_prompts_rollout` accepted tickets in order, and not those that were done first,
so neither quick engines nor late verdicts change it. Tickets are drawn by the driver's own thread
at fixed points of its walk, so the prompt of a ticket does not depend on timing either.

With `num_spare_prompts` a step may pass over as many groups that are late, which are given up
before they are stale. Which groups those are does depend on timing.

While step s waits for its batch the engines have version s - 1, and at most `async_steps` + 1
batches of groups are out: those of steps s to s + `async_steps`. A ticket drawn then is consumed by
step s + `async_steps` at the latest, where the learners are at version s + `async_steps` - 1. So no
token is more than `async_steps` steps stale, whether a sync waits for running completions or
reaches into them (`inflight_updates`): a token is at least as new as its ticket.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain, islice
from typing import Any

from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.rollout_sections import RolloutSection
from open_instruct.core.errors import RunError
from open_instruct.core.records import Prompt, RolloutGroup
from open_instruct.core.text import counted
from open_instruct.data.prompts import PromptStream
from open_instruct.generation.requests import GenerationRequest, SamplingSettings
from open_instruct.losses.advantages import has_signal
from open_instruct.rl.episodes.walk import Answer, AskedGroup, Episodes, samples_of
from open_instruct.rl.samples import RolloutStepBatch, num_right
from open_instruct.rl.step_checks import refuse_failed_verdicts

STALL_TIMEOUT_S = 3600.0
# Seconds between checks of the learners, which meanwhile do nothing.
CHECK_INTERVAL_S = 3.0
# The number of groups that a step may reject for each that it needs, before the run ends as one
# that learns nothing.
MAX_REJECTED_PER_PROMPT = 50


class Conductor:
    """Asks the prompts of a run and hands out its batches; call `weights_published` and
    `next_batch` in turn.

    Args:
        prompts: the endless stream of tickets; nobody else may draw from it.
        episodes: asks and judges; closed with the conductor.
        config: the flags of the run; after its last step no prompt is asked.
    """

    def __init__(self, prompts: PromptStream, episodes: Episodes, *, config: GRPOConfig) -> None:
        self._prompts = prompts
        self._episodes = episodes
        self._config = config
        self._version = 0
        self._num_accepted = 0  # of the step at hand
        self._checked_s = time.monotonic()
        self._outstanding: deque[AskedGroup] = deque()  # in ticket order
        self._to_ask_again: list[tuple[int, Prompt]] = []
        self._failure: RunError | None = None
        self._changed = threading.Condition()

    # The driver's side

    def next_batch(
        self,
        step: int,
        *,
        check: Callable[[], object] = lambda: None,
        timeout_s: float = STALL_TIMEOUT_S,
    ) -> RolloutStepBatch:
        """Wait for the batch of `step` (1-based); `check` is called now and then, and ends the wait
        with its exception.

        Active sampling replaces a rejected group at once, and prompts that need no resampling are
        left out of the tickets drawn after this batch; those that are out already are still used.

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
        size = self._config.rollout.num_unique_prompts_rollout
        while len(groups) < size:
            group = self._next_group(check, timeout_s)
            if is_rejected(group, self._config.rollout):
                rejected.append(group)
                if len(rejected) == size:
                    refuse_failed_verdicts((*groups, *rejected))
                if len(rejected) > MAX_REJECTED_PER_PROMPT * size:
                    raise RunError(_nothing_to_learn(step, groups, rejected))
                self._ask_further()
            else:
                groups.append(group)
                self._num_accepted = len(groups)
        groups.sort(key=lambda group: group.ticket)
        batch = RolloutStepBatch(
            groups=tuple(groups),
            rejected=tuple(rejected),
            num_given_up=self._give_up_before(step + 1),
        )
        for row_id in solved_rows(batch, self._config.rollout):
            self._prompts.exclude(row_id)
        return batch

    def weights_published(self, version: int) -> None:
        """Ask the prompts of one more step; every engine has the weights of `version`, the number
        of steps taken.
        """
        self._version = version
        self._num_accepted = 0
        for ticket, prompt in self._to_ask_again:
            self._ask(ticket, prompt)
        self._to_ask_again = []
        self._ask_further()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint between two steps, as JSON: the stream, and the tickets in
        flight.

        Tickets in flight when a run stops are asked again with their own seeds, and the weights of
        that time.
        """
        assert self._num_accepted == 0, "the groups of a step that is not finished would be lost"
        out = [(group.ticket, group.prompt) for group in self._outstanding] + self._to_ask_again
        return {
            "prompts": self._prompts.state_dict(),
            "unconsumed": [[ticket, prompt.row_id] for ticket, prompt in out],
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
        with self._changed:
            out = list(self._outstanding)
        # First, as completions arrive meanwhile.
        num_unanswered = sum(group.num_missing for group in out)
        num_generated = sum(len(group.completions) for group in out)
        in_flight = sum(len(group.requests) for group in out) - num_generated
        return {
            "in_flight": in_flight,
            "verifying": num_unanswered - in_flight,
            "waiting": sum(group.num_missing == 0 for group in out),
        }

    def close(self) -> None:
        """Give up everything in flight; completions that arrive later are dropped."""
        self._episodes.close()

    def _ask_further(self) -> None:
        """Draw tickets until groups in flight and accepted groups fill all batches that may be out
        at once.
        """
        num_batches = min(
            self._config.rollout.async_steps + 1, self._config.num_steps - self._version
        )
        size = num_batches * self._config.rollout.num_unique_prompts_rollout
        size += self._config.rollout.num_spare_prompts if num_batches else 0
        while len(self._outstanding) + self._num_accepted < size:
            self._ask(*self._prompts.next())

    def _ask(self, ticket: int, prompt: Prompt) -> None:
        requests = requests_of(ticket, prompt, config=self._config)
        group = self._episodes.ask(ticket, prompt, requests, version=self._version)
        with self._changed:
            self._outstanding.append(group)
        for answer in group.answers:
            answer.add_done_callback(self._answered)

    def _next_group(self, check: Callable[[], object], timeout_s: float) -> RolloutGroup:
        """The first group in ticket order that is complete, past as many others as there are spare
        prompts.
        """
        near = list(islice(self._outstanding, 1 + self._config.rollout.num_spare_prompts))
        changed_s = time.monotonic()
        while True:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if (
                    complete := next((group for group in near if not group.num_missing), None)
                ) is not None:
                    self._outstanding.remove(complete)
                    return complete.rollouts()
                # Every verdict resets the clock, which runs only while nothing arrives.
                if self._changed.wait(min(timeout_s, CHECK_INTERVAL_S)):
                    changed_s = time.monotonic()
                elif time.monotonic() - changed_s >= timeout_s:
                    raise RunError(self._stalled(near[0], timeout_s))
            if time.monotonic() - self._checked_s >= CHECK_INTERVAL_S:
                check()  # without the lock, which those need who tell of failures
                self._checked_s = time.monotonic()

    def _give_up_before(self, step: int) -> int:
        """Give up groups that are too old to be learned from in `step`: spare ones.

        Returns how many there were.
        """
        with self._changed:
            is_over = step > self._config.num_steps
            # The weights with which such a group was asked.
            oldest = step - 1 - self._config.rollout.async_steps
            late = [group for group in self._outstanding if is_over or group.version < oldest]
            for group in late:
                self._outstanding.remove(group)
        for group in late:
            group.give_up()
        return len(late)

    def _stalled(self, head: AskedGroup, timeout_s: float) -> str:
        stats = self.stats()
        return (
            f"no completion came back for {timeout_s:g} s while ticket {head.ticket} (row "
            f"{head.prompt.row_id}) waited for {head.num_missing} of its {len(head.answers)}. "
            f"Tickets up to {self._outstanding[-1].ticket} are out: {stats['in_flight']} "
            f"completions with the engines, {stats['verifying']} with the verifiers"
        )

    def _answered(self, answer: Future[Answer]) -> None:
        """Called by a thread of the verifiers or of the engines."""
        error = answer.exception()
        with self._changed:
            if isinstance(error, RunError):
                self._failure = self._failure or error
            self._changed.notify_all()


def _nothing_to_learn(step: int, groups: list[RolloutGroup], rejected: list[RolloutGroup]) -> str:
    rewards = list(chain.from_iterable(group.rewards for group in rejected))
    return (
        f"--active_sampling rejected {counted(len(rejected), 'group')} of step {step}, each with "
        "the same reward for all of its completions (their mean is "
        f"{sum(rewards) / len(rewards):.3g}), and found {len(groups)} to learn from. The prompts "
        "are too easy or too hard for this policy: use others, raise "
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
        group.prompt.row_id for group in groups if num_right(group) >= rate * len(group.verdicts)
    ]
