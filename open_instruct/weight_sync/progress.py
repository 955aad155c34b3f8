"""Members of a weight sync report their progress in a store, so a time-out can name the missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistError, DistStoreError, TCPStore

from open_instruct.core.errors import RunError
from open_instruct.parallel.listening import open_listening_store


def learner_name(rank: int) -> str:
    return f"learner {rank}"


def receiver_name(index: int) -> str:
    return f"receiver {index}"


def list_receivers(info: Mapping[str, Any]) -> list[str]:
    """Name all receivers of a channel."""
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

    A stage is a word such as "done/17", which a member reports once. Reports stay for two rounds;
    by then everybody has seen them.
    """

    def __init__(self, store: TCPStore, *, member: str, timeout_s: float) -> None:
        self.store = store
        self.member = member
        self.timeout_s = timeout_s
        self._reports: list[list[str]] = [[], []]

    @classmethod
    def host(cls, address: str, *, timeout_s: float) -> SyncProgress:
        """Keep the store in this process, at `address` and no other, as the first member."""
        store = open_listening_store(address, timeout=timedelta(seconds=timeout_s))
        return cls(store, member=HOST, timeout_s=timeout_s)

    @classmethod
    def join(cls, info: Mapping[str, Any], *, member: str, patience_s: float = 0.0) -> SyncProgress:
        """Connect to the store of a channel, which another process keeps.

        Args:
            info: the facts of the channel.
            patience_s: seconds that this member waits beyond the time-out of the channel.

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
        self._reports[-1].append(key)
        with self._reaching_host():
            self.store.set(key, words)

    def read_reports(self, stage: str, members: Sequence[str], *, to: str) -> list[str]:
        """Wait as `wait` does; returns the words with which `members` reported `stage`."""
        self.wait(stage, members, to=to)
        with self._reaching_host():
            return [self.store.get(f"{stage}/{member}").decode() for member in members]

    def new_round(self) -> None:
        """Delete the reports of the round before the last one."""
        with self._reaching_host():
            for key in self._reports.pop(0):
                self.store.delete_key(key)
        self._reports.append([])

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
        have_arrived = partial(self._have_arrived, keys)
        find_missing = partial(self.find_missing, stage, members)
        self.wait_until(have_arrived, who=find_missing, to=to, meanwhile=meanwhile)

    def wait_until(
        self,
        condition: Callable[[], bool],
        *,
        who: Callable[[], Sequence[str]],
        to: str,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Return when `condition` holds; raises as `wait` does.

        Args:
            who: names the missing members after a time-out.
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

    def _have_arrived(self, keys: list[str]) -> bool:
        """Whether the store has all keys; waits for them, at most until the next check is due."""
        try:
            self.store.wait(keys, timedelta(seconds=SECONDS_BETWEEN_CHECKS))
        except DistStoreError:
            return False
        return True

    def find_missing(self, stage: str, members: Sequence[str]) -> list[str]:
        """Find the `members` that have not reached `stage`."""
        return [member for member in members if not self.store.check([f"{stage}/{member}"])]

    def fail(self, reason: str) -> RunError:
        """Have all waiting members give up; returns the error to raise, of the first failure."""
        try:
            return RunError(self.store.compare_set(FAILED, "", f"weight sync: {reason}").decode())
        except DistError:
            return self._make_host_error()

    def fail_after_loss(self, reason: str) -> RunError:
        """Fail after a peer went away; waits a little for the peer's own reason."""
        with suppress(DistError):
            self.store.wait([FAILED], timedelta(seconds=SECONDS_FOR_LAST_WORDS))
        return self.fail(reason)

    @contextmanager
    def _reaching_host(self) -> Iterator[None]:
        """While it runs, a loss of the store raises a RunError."""
        try:
            yield
        except DistError as error:
            raise self._make_host_error() from error

    def _make_host_error(self) -> RunError:
        return RunError(
            f"weight sync: {self.member} lost {HOST}: its process is gone, or it closed the channel"
        )


def abandon(info: Mapping[str, Any], reason: str) -> None:
    """Have all members of a channel give it up now, instead of at the time-out.

    Args:
        info: as `WeightSender.open` returned it.
        reason: the message of their errors: "engine 1 died".
    """
    patient_info = {**info, "timeout_s": SECONDS_FOR_LAST_WORDS}
    # It cannot join if learner 0 is gone, and with it the channel; nobody waits for it then.
    with suppress(RunError):
        SyncProgress.join(patient_info, member="the driver").fail(reason)
