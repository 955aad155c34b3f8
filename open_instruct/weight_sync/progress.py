"""Members of a weight sync report their progress in a key-value store, so that a time-out can name
missing members.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, DistStoreError, TCPStore

from open_instruct.core.errors import RunError
from open_instruct.parallel.listening import listen_at


def learner_name(rank: int) -> str:
    return f"learner {rank}"


def receiver_name(index: int) -> str:
    return f"receiver {index}"


def list_receivers(info: Mapping[str, Any]) -> list[str]:
    """The names of all receivers of a channel."""
    return [receiver_name(index) for index in range(info["num_receivers"])]


HOST_RANK = 0
HOST = learner_name(HOST_RANK)
"""The member whose process keeps the store."""

FAILED = "failed"
SHORTEST_NAP_S = 0.0001
LONGEST_NAP_S = 0.003
NAP_GROWTH = 1.03
SECONDS_BETWEEN_CHECKS = 0.25
SECONDS_FOR_LAST_WORDS = 5.0


class SyncProgress:
    """One member's view of the store.

    A stage is a word such as "done/17"; a member reports it once. Reports are kept for two rounds,
    after which everybody has seen them.
    """

    def __init__(self, store: TCPStore, *, member: str, timeout_s: float) -> None:
        self.store = store
        self.member = member
        self.timeout_s = timeout_s
        self._reported: list[list[str]] = [[], []]

    @classmethod
    def host(cls, address: str, *, timeout_s: float) -> SyncProgress:
        """Keep the store, in this process, at `address` and no other; be the first member."""
        return cls(
            listen_at(address, timeout=timedelta(seconds=timeout_s)),
            member=HOST,
            timeout_s=timeout_s,
        )

    @classmethod
    def join(cls, info: Mapping[str, Any], *, member: str, patience_s: float = 0.0) -> SyncProgress:
        """Reach the store of a channel, which another process keeps; `patience_s` are added to its
        time-out.

        Raises:
            RunError: nothing answers there.
        """
        timeout_s = info["timeout_s"] + patience_s
        try:
            limit = timedelta(seconds=timeout_s)
            store = TCPStore(
                info["address"],
                info["port"],
                is_master=False,
                wait_for_workers=False,
                timeout=limit,
            )
        except DistError as error:
            raise RunError(
                f"weight sync: {member} did not reach {HOST} at {info['address']}:{info['port']} "
                f"within {timeout_s:g} s"
            ) from error
        return cls(store, member=member, timeout_s=timeout_s)

    def report(self, stage: str, words: str = "") -> None:
        """Report that this member has reached `stage`, with words that others may read."""
        key = f"{stage}/{self.member}"
        self._reported[-1].append(key)
        with self._reaching_host():
            self.store.set(key, words)

    def read_reports(self, stage: str, members: Sequence[str], *, to: str) -> list[str]:
        """The words with which `members` have reported `stage`; waits for them, and raises, as
        `wait` does.
        """
        self.wait(stage, members, to=to)
        with self._reaching_host():
            return [self.store.get(f"{stage}/{member}").decode() for member in members]

    def new_round(self) -> None:
        """Delete the reports of the round before the last one."""
        with self._reaching_host():
            for key in self._reported.pop(0):
                self.store.delete_key(key)
        self._reported.append([])

    def wait(
        self,
        stage: str,
        members: Sequence[str],
        *,
        to: str,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Return when all of `members` have reached `stage`.

        Args:
            to: the work of the stage, for the message: "take bucket 3 of 9".
            meanwhile: called now and then; its exception ends the wait.

        Raises:
            RunError: some did not within the time-out (they are named), or a member has failed
                meanwhile.
        """
        keys = [f"{stage}/{member}" for member in members]
        self.wait_until(
            lambda: self._have_come(keys),
            who=lambda: self.missing(stage, members),
            to=to,
            meanwhile=meanwhile,
        )

    def wait_until(
        self,
        condition: Callable[[], bool],
        *,
        who: Callable[[], Sequence[str]],
        to: str,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Return when `condition` holds;

        `who` names the missing members after a time-out. Raises as `wait` does.
        """
        deadline = time.monotonic() + self.timeout_s
        nap_s = SHORTEST_NAP_S
        next_check = 0.0
        with self._reaching_host():
            while not condition():
                now = time.monotonic()
                if now >= next_check:
                    next_check = now + SECONDS_BETWEEN_CHECKS
                    if self.store.check([FAILED]):
                        raise RunError(self.store.get(FAILED).decode())
                    if meanwhile is not None:
                        meanwhile()
                if now >= deadline:
                    raise self.fail(
                        f"{self.member} waited {self.timeout_s:g} s for {' and '.join(who())} to "
                        f"{to}; busy, frozen or gone? --weight_sync_timeout_s sets the limit"
                    )
                time.sleep(nap_s)
                nap_s = min(nap_s * NAP_GROWTH, LONGEST_NAP_S)

    def _have_come(self, keys: list[str]) -> bool:
        """Whether the store has all keys, within the time between two checks; the store wakes who
        waits at it.
        """
        try:
            self.store.wait(keys, timedelta(seconds=SECONDS_BETWEEN_CHECKS))
        except DistStoreError:
            return False
        return True

    def missing(self, stage: str, members: Sequence[str]) -> list[str]:
        """The `members` that have not reached `stage`."""
        return [member for member in members if not self.store.check([f"{stage}/{member}"])]

    def fail(self, reason: str) -> RunError:
        """Have all waiting members give up.

        Returns the error to raise, with the reason of the first failure.
        """
        try:
            return RunError(self.store.compare_set(FAILED, "", f"weight sync: {reason}").decode())
        except DistError:
            return self._host_is_gone()

    def lost(self, reason: str) -> RunError:
        """As `fail`, after a peer went away; waits a little, as the peer may still report its
        reason.
        """
        with suppress(DistError):
            self.store.wait([FAILED], timedelta(seconds=SECONDS_FOR_LAST_WORDS))
        return self.fail(reason)

    @contextmanager
    def _reaching_host(self) -> Iterator[None]:
        """Within, the loss of the store is raised as a RunError."""
        try:
            yield
        except DistError as error:
            raise self._host_is_gone() from error

    def _host_is_gone(self) -> RunError:
        return RunError(
            f"weight sync: {self.member} lost {HOST}: its process is gone, or it closed the channel"
        )


def abandon(info: Mapping[str, Any], reason: str) -> None:
    """Have all members of a channel give it up at once, and not at the time-out, after a member is
    known to be gone.

    Args:
        info: as `WeightSender.open` gave it.
        reason: the message of their errors: "engine 1 died".
    """
    # Learner 0 is gone, and with it the channel; engines are not called meanwhile.
    with suppress(RunError):
        SyncProgress.join({**info, "timeout_s": SECONDS_FOR_LAST_WORDS}, member="the driver").fail(
            reason
        )
