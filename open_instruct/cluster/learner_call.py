"""One call to all learners, and the first cause of its failures.

Learners meet in collectives. When one dies the others hang, or fail with words about a closed
connection. The error names the rank that died, not those that waited for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from open_instruct.cluster.actor_host import HostFacts
from open_instruct.core.errors import InputError, RunError
from open_instruct.parallel import heartbeats
from open_instruct.parallel.heartbeats import HeartbeatReader, LostRank

if TYPE_CHECKING:
    from ray import ObjectRef

# For so long after a first failure, others are awaited that may explain it.
CAUSE_TIMEOUT_S = 3.0
# Seconds between readings of the learners' heartbeats while a call runs.
LOOK_S = 5.0

Result = TypeVar("Result")

# Words in Ray's message about a lost actor, and their meaning.
REASONS = {
    "running low on memory": "the machine ran out of memory, and Ray ended it",
    "its node has died": "its node is gone",
    "killed by `ray.kill`": "it was ended on purpose",
    "connection error code 2": "its process was killed or crashed",
    "all references to the actor were removed": (
        "Ray's head could not talk to this program. Either a firewall is between the two, or this "
        "program has a token (RAY_AUTH_TOKEN, or ~/.ray/auth_token) and the cluster was started "
        "without: then give RAY_AUTH_MODE=disabled here too"
    ),
}
# Ray ends its message so where an actor was lost before it began; its reason is the line before.
NEVER_RAN = "The actor never ran"


class LearnerLost(RunError):
    """Learners died or do not answer; the group must be restarted."""


@dataclass(frozen=True)
class LearnerCall(Generic[Result]):
    """A method that every learner is running.

    `refs` are Ray's promises in rank order. `facts` are empty while the processes are being
    started.
    """

    what: str
    refs: Sequence[ObjectRef]
    facts: Sequence[HostFacts]
    heartbeats: HeartbeatReader

    def result(self, timeout_s: float) -> list[Result]:
        """The return values of all learners, in rank order.

        Raises:
            LearnerLost: a learner died, is frozen, or its machine is silent, or some did not answer
                within `timeout_s`; names the ranks.
            Exception: as raised in a learner, InputError and RunError as they are.
        """
        import ray

        deadline = time.monotonic() + timeout_s
        results: dict[ObjectRef, Result] = {}
        pending = [*self.refs]
        while pending:
            left_s = max(0.0, deadline - time.monotonic())
            finished_refs, pending = ray.wait(pending, num_returns=1, timeout=min(left_s, LOOK_S))
            if not finished_refs:
                if left_s <= LOOK_S:
                    raise self._describe_silence(pending, timeout_s)
                self._raise_for_frozen()
                continue
            try:
                results[finished_refs[0]] = ray.get(finished_refs[0])
            except ray.exceptions.RayError as error:
                self._raise_first_cause(finished_refs[0], error, pending)
        return [results[ref] for ref in self.refs]

    def _raise_first_cause(
        self, ref: ObjectRef, error: Exception, pending: list[ObjectRef]
    ) -> None:
        import ray

        failures = [(ref, error)]
        deadline = time.monotonic() + CAUSE_TIMEOUT_S
        while pending and _distance_from_cause(failures[-1][1]) and time.monotonic() < deadline:
            finished_refs, pending = ray.wait(
                pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic())
            )
            for other in finished_refs:
                try:
                    ray.get(other)
                except ray.exceptions.RayError as other_error:
                    failures.append((other, other_error))
        ref, error = min(failures, key=lambda failure: _distance_from_cause(failure[1]))
        if isinstance(error, ray.exceptions.RayTaskError):
            # The text of `error` is the learner's traceback, which our message does not need.
            if isinstance(error.cause, InputError | RunError):
                raise error.cause from None
            raise error.cause from error
        rank = self.refs.index(ref)
        raise LearnerLost(
            f"{self._name(rank)} was lost during {self.what}: {explain_loss(error)}"
        ) from None

    def _raise_for_frozen(self) -> None:
        """Raise if a learner's process does nothing at all, long before a step may be over."""
        losses: list[LostRank] = []
        with suppress(RuntimeError):  # of the store
            losses = self.heartbeats.find_lost(silent_s=heartbeats.SILENT_S)
        if losses:
            words = "; ".join(
                f"{self._name(loss.heartbeat.rank)} was lost during {self.what}, while "
                f"{loss.heartbeat.status}: {loss.reason}"
                for loss in losses
            )
            raise LearnerLost(words)

    def _describe_silence(self, pending: Sequence[ObjectRef], timeout_s: float) -> LearnerLost:
        """The error after a time-out: which learners did not answer, and what they were doing."""
        statuses: dict[int, str] = {}
        with suppress(RuntimeError):
            statuses = {each.rank: f", while {each.status}" for each in self.heartbeats.read()}
        ranks = [self.refs.index(ref) for ref in pending]
        names = "; ".join(self._name(rank) + statuses.get(rank, "") for rank in ranks)
        return LearnerLost(f"no answer to {self.what} within {timeout_s:g} s from {names}")

    def _name(self, rank: int) -> str:
        if not self.facts:
            return f"learner rank {rank}"
        return f"learner rank {rank} (node {self.facts[rank].address}, pid {self.facts[rank].pid})"


def _distance_from_cause(error: Exception) -> int:
    """Rank a failure: 0 is a cause itself, 1 an error in a learner, 2 a connection that it lost."""
    cause = getattr(error, "cause", None)
    # An error without a cause means that the process itself is gone.
    if cause is None or isinstance(cause, InputError):
        return 0
    if any(words in str(cause) for words in heartbeats.LOST_PEER_WORDS):
        return 2
    return 1


def explain_loss(error: Exception) -> str:
    """Say the reason of a loss in a few words; Ray's own message about a lost actor is a page."""
    text = str(error)
    for words, reason in REASONS.items():
        if words in text:
            return reason
    lines = text.strip().splitlines()
    return [line for line in lines if not line.startswith(NEVER_RAN)][-1].strip()
