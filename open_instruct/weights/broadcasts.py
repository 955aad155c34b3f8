"""Two ways through process groups, gloo from CPU to CPU and NCCL from device to device.

Every rank of one copy of the model broadcasts its own parts of a bucket to all receivers in one message, over a group
of its own, and packs the next ones meanwhile. Nothing is gathered.
"""

import os
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from open_instruct.cluster.addresses import address_towards
from open_instruct.weights.manifest import Bucket, Manifest
from open_instruct.weights.progress import HOST, SyncProgress, learner_name, receivers_of
from open_instruct.weights.way import NUM_SLOTS, Incoming, Info, LocalOf, Outgoing, Wholes

# The time, after a broken broadcast, in which receivers that did get it may report so.
SECONDS_TO_ANSWER = 1.0
# Extra seconds of a process group's time-out, so that a member's own time-out, which names the missing one, is first.
GROUP_PATIENCE_S = 10.0
# Read by a process group of NCCL as it is made: a peer that is gone, or late, ends the communicator, not this process.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
GIVE_UP_COMMUNICATOR = "2"


class PartBroadcaster(Outgoing):
    """Broadcasts a rank's parts from two slots of its own, each as large as its largest part of a bucket."""

    def __init__(self, manifest: Manifest, *, rank: int, device: torch.device) -> None:
        super().__init__(manifest, rank=rank, device=device)
        self.group: Any = None
        self.own_SN = torch.empty(0)
        self.under_way: dict[int, dist.Work] = {}

    def connect(self, info: Info, progress: SyncProgress) -> None:
        super().connect(info, progress)
        self.receivers = receivers_of(info)
        self.group = broadcast_group(info, progress, sender=learner_name(self.rank), rank=0, device=self.device)
        most_bytes = self.manifest.most_bytes_of(self.rank)
        self.own_SN = torch.empty(NUM_SLOTS, most_bytes, dtype=torch.uint8, device=self.device)

    def put(self, position: int, local_of: LocalOf) -> None:
        self._finish(position - NUM_SLOTS)
        bucket = self.manifest.bucket_at(position)
        start, stop = bucket.span(self.rank)
        if start < stop:
            own = self.own_SN[position % NUM_SLOTS, : stop - start]
            bucket.pack(own, local_of, rank=self.rank, first_byte=start)
            self.under_way[position] = broadcast(self.group, own)

    def check(self) -> None:
        for position in list(self.under_way):
            if self.under_way[position].is_completed():
                self._finish(position)

    def close(self) -> None:
        # A receiver waits for what it asked for until the group, and everything that was begun in it, is gone.
        if self.group is not None:
            self.group.abort()
        self.under_way.clear()
        self.group = None
        self.own_SN = torch.empty(0)

    def _finish(self, position: int) -> None:
        if position not in self.under_way:
            return
        try:
            self.under_way[position].wait()
        except RuntimeError as error:
            time.sleep(SECONDS_TO_ANSWER)
            missing = self.progress.missing(f"done/{position}", self.receivers)
            raise self.progress.fail(
                f"the broadcast broke before {' and '.join(missing) or 'all receivers'} had the whole bucket: {error}"
            ) from error
        del self.under_way[position]


class PartReceiver(Incoming):
    """Receives every rank's parts over the group of that rank. The next bucket travels while one is unpacked."""

    def __init__(self, manifest: Manifest, *, index: int, device: torch.device) -> None:
        super().__init__(manifest, index=index, device=device)
        self._groups: dict[int, Any] = {}
        self._flats: dict[int, torch.Tensor] = {}
        self._arriving: dict[int, dist.Work] = {}

    def join(self, info: Info) -> None:
        """Nothing is offered: groups are made once all have joined."""

    def connect(self, info: Info, progress: SyncProgress) -> None:
        super().connect(info, progress)
        # Receivers join the groups in the same order; the learner of each group waits for no other group.
        for rank in self.manifest.ranks:
            sender = learner_name(rank)
            self._groups[rank] = broadcast_group(info, progress, sender=sender, rank=self.index + 1, device=self.device)
            most_bytes = self.manifest.most_bytes_of(rank)
            self._flats[rank] = torch.empty(most_bytes, dtype=torch.uint8, device=self.device)

    def take(self, position: int, wholes: Wholes) -> None:
        bucket = self.manifest.bucket_at(position)
        ranks = set(self.manifest.ranks)
        if bucket is self.manifest.buckets[0]:
            self.progress.wait(f"go/{position}", [HOST], to="begin to send")
            self._begin(bucket, ranks)
        following = None if bucket is self.manifest.buckets[-1] else self.manifest.bucket_at(position + 1)
        self._begin(following, ranks - bucket.parts.keys())
        senders = list(bucket.parts)
        for number, rank in enumerate(senders):
            self._finish(senders[number:], to=f"send bucket {self.manifest.number_at(position)}")
            bucket.unpack(self._flats[rank], wholes, rank=rank, first_byte=bucket.span(rank)[0])
            self._begin(following, [rank])

    def close(self) -> None:
        # Destroying a group waits for its open operations, until its peers are gone too.
        for group in self._groups.values():
            group.abort()
        self._arriving.clear()
        self._groups.clear()

    def _begin(self, bucket: Bucket | None, ranks: Iterable[int]) -> None:
        """Begin to receive these ranks' parts of a bucket, if there is one."""
        if bucket is None:
            return
        for rank in ranks:
            start, stop = bucket.span(rank)
            if start < stop:
                self._arriving[rank] = broadcast(self._groups[rank], self._flats[rank][: stop - start])

    def _finish(self, ranks: Sequence[int], *, to: str) -> None:
        """Return when the parts of the first of `ranks` have arrived; the others are still to come."""

        def absent() -> list[str]:
            return [learner_name(rank) for rank in ranks if not self._arriving[rank].is_completed()]

        work = self._arriving[ranks[0]]
        self.progress.wait_until(work.is_completed, who=absent, to=to)
        try:
            work.wait()
        except RuntimeError as error:
            lost = f"{self.progress.member} waited for {learner_name(ranks[0])} to {to}, and lost it: {error}"
            raise self.progress.lost(lost) from error


def broadcast_group(info: Info, progress: SyncProgress, *, sender: str, rank: int, device: torch.device) -> Any:
    """A process group of `sender`, its rank 0, and a channel's receivers, beside any that these processes are in.

    Returns when all are connected. Members wait for each other here, and not in the group, which could not say who is
    missing; NCCL connects them when the first byte is sent, which therefore is sent now.

    Raises:
        RunError: some did not come within the time-out (they are named), or could not be connected.
    """
    members = [sender, *receivers_of(info)]
    # First see that all are there: a member that waits with another sender is not missing.
    for stage in ("connecting", f"connecting/{sender}"):
        progress.report(stage)
        progress.wait(stage, members, to=f"connect with {sender}")
    try:
        group = _group(info, progress.store, sender=sender, rank=rank)
        first = broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device))
        others = [member for member in members if member != progress.member]
        progress.wait_until(first.is_completed, who=lambda: others, to=f"be connected with {sender}")
        first.wait()
    except RuntimeError as error:
        raise progress.lost(
            f"{progress.member} could not be connected with {' and '.join(members)}: {error}"
        ) from error
    return group


def _group(info: Info, store: TCPStore, *, sender: str, rank: int) -> Any:
    prefixed = PrefixStore(f"{info['backend']}/{sender}/", store)
    size = info["num_receivers"] + 1
    if info["backend"] == "gloo":
        gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # At the address that reaches the store, and no other: on one host all stays on loopback.
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(info["address"], info["port"]))]
        gloo._timeout = timedelta(seconds=info["timeout_s"] + GROUP_PATIENCE_S)
        return dist.ProcessGroupGloo(prefixed, rank, size, gloo)
    nccl = dist.ProcessGroupNCCL.Options()
    # Its clock starts when a bucket is asked for, while the one before is still being loaded.
    nccl._timeout = timedelta(seconds=2 * info["timeout_s"] + GROUP_PATIENCE_S)
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = GIVE_UP_COMMUNICATOR
    try:
        return dist.ProcessGroupNCCL(prefixed, rank, size, nccl)
    finally:
        os.environ.pop(ERROR_HANDLING)
        if before is not None:
            os.environ[ERROR_HANDLING] = before


def broadcast(group: Any, flat: torch.Tensor) -> dist.Work:
    """Begin to send `flat` from rank 0 of the group, which is the default, to all others."""
    work: dist.Work = group.broadcast([flat])
    return work
