"""Two ways through process groups, gloo from CPU to CPU and NCCL from device to device.

Every rank of one copy of the model broadcasts its own parts of a bucket to all receivers, over a
group of its own, and packs the next ones meanwhile. Nothing is gathered. A part that is a message
of its own travels from the model's memory into the tensor that is put together, where it lies in
both just as it travels; others are copied on both sides.
"""

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from open_instruct.cluster.addresses import address_towards
from open_instruct.models.shards import at
from open_instruct.weight_sync.channel import (
    NUM_SLOTS,
    FindLocal,
    FindWholes,
    Incoming,
    Info,
    Outgoing,
)
from open_instruct.weight_sync.manifest import Bucket, Manifest
from open_instruct.weight_sync.progress import HOST, SyncProgress, learner_name, list_receivers

# The time, after a broken broadcast, in which receivers that did get it may report so.
SECONDS_TO_ANSWER = 1.0
# Extra seconds of a process group's time-out, so that a member's own time-out, which names the
# missing one, is first.
GROUP_PATIENCE_S = 10.0
# Of a part that is a message of its own: a copy of it would take longer than one message more.
LARGE_BYTES = 2**20
# Read by a process group of NCCL as it is made: a peer that is gone, or late, ends the
# communicator, not this process.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
GIVE_UP_COMMUNICATOR = "2"


class PartBroadcaster(Outgoing):
    """Broadcasts a rank's parts from two slots of its own, each as large as its largest part of a
    bucket.
    """

    def __init__(self, manifest: Manifest, *, index: int, device: torch.device) -> None:
        super().__init__(manifest, index=index, device=device)
        self.group: Any = None
        self.own_SN = torch.empty(0)
        self.under_way: dict[int, list[dist.Work]] = {}

    def connect(self, info: Info, progress: SyncProgress) -> None:
        super().connect(info, progress)
        self.receivers = list_receivers(info)
        self.group = broadcast_group(
            info, progress, sender=learner_name(self.index), rank=0, device=self.device
        )
        most_bytes = self.manifest.largest_span(self.index)
        self.own_SN = torch.empty(NUM_SLOTS, most_bytes, dtype=torch.uint8, device=self.device)

    def put(self, position: int, find_local: FindLocal) -> None:
        self._finish(position - NUM_SLOTS)
        bucket = self.manifest.bucket_at(position)
        works = self.under_way[position] = []
        for message, flat in messages(
            bucket, self.index, self.own_SN[position % NUM_SLOTS], self.device
        ):
            own = {name: find_local(name) for name in message.parts[self.index]}
            values = [own[name][part.own] for name, part in message.parts[self.index].items()]
            told = find_flat_bytes(values, message.dtype, self.device, otherwise=flat)
            if told is flat:
                message.pack(
                    flat, own.__getitem__, rank=self.index, first_byte=message.span(self.index)[0]
                )
            works.append(broadcast(self.group, told))

    def check(self) -> None:
        for position, works in list(self.under_way.items()):
            if all(work.is_completed() for work in works):
                self._finish(position)

    def close(self) -> None:
        # A receiver waits for what it asked for until the group, and everything that was begun in
        # it, is gone.
        if self.group is not None:
            self.group.abort()
        self.under_way.clear()
        self.group = None
        self.own_SN = torch.empty(0)

    def _finish(self, position: int) -> None:
        try:
            for work in self.under_way.get(position, ()):
                work.wait()
        except RuntimeError as error:
            time.sleep(SECONDS_TO_ANSWER)
            missing = self.progress.missing(f"done/{position}", self.receivers)
            raise self.progress.fail(
                f"the broadcast broke before {' and '.join(missing) or 'all receivers'} had the "
                f"whole bucket: {error}"
            ) from error
        self.under_way.pop(position, None)


class PartReceiver(Incoming):
    """Receives every rank's parts over the group of that rank.

    The next bucket travels while one is loaded.
    """

    def __init__(self, manifest: Manifest, *, index: int, device: torch.device) -> None:
        super().__init__(manifest, index=index, device=device)
        self._groups: dict[int, Any] = {}
        self._flats: dict[int, torch.Tensor] = {}
        self._arriving: dict[int, list[tuple[dist.Work, Bucket, torch.Tensor | None]]] = {}

    def connect(self, info: Info, progress: SyncProgress) -> None:
        super().connect(info, progress)
        # Receivers join the groups in the same order; the learner of each group waits for no other
        # group.
        for rank in self.manifest.ranks:
            sender = learner_name(rank)
            self._groups[rank] = broadcast_group(
                info, progress, sender=sender, rank=self.index + 1, device=self.device
            )
            most_bytes = self.manifest.largest_span(rank)
            self._flats[rank] = torch.empty(most_bytes, dtype=torch.uint8, device=self.device)

    def take(self, position: int, find_wholes: FindWholes) -> None:
        bucket = self.manifest.bucket_at(position)
        ranks = set(self.manifest.ranks)
        if bucket is self.manifest.buckets[0]:
            self.progress.wait(f"go/{position}", [HOST], to="begin to send")
            self._begin(position, ranks, find_wholes)
        following = None if bucket is self.manifest.buckets[-1] else position + 1
        self._begin(following, ranks - bucket.parts.keys(), find_wholes)
        senders = list(bucket.parts)
        for number, rank in enumerate(senders):
            self._finish(senders[number:], to=f"send bucket {self.manifest.number_at(position)}")
            for _, message, flat in self._arriving.pop(rank):
                if flat is not None:
                    message.unpack(
                        flat, find_wholes(position), rank=rank, first_byte=message.span(rank)[0]
                    )
            self._begin(following, [rank], find_wholes)

    def close(self) -> None:
        # Destroying a group waits for its open operations, until its peers are gone too.
        for group in self._groups.values():
            group.abort()
        self._arriving.clear()
        self._groups.clear()

    def _begin(self, position: int | None, ranks: Iterable[int], find_wholes: FindWholes) -> None:
        """Begin to receive these ranks' parts of the bucket at a position, if there is one."""
        if position is None:
            return
        bucket = self.manifest.bucket_at(position)
        for rank in bucket.parts.keys() & ranks:
            arriving = self._arriving[rank] = []
            for message, flat in messages(bucket, rank, self._flats[rank], self.device):
                parts = message.parts[rank].items()
                # Else it is early for the tensor.
                is_alone = len(parts) == 1 and self.device.type == "cpu"
                values = (
                    [at(find_wholes(position)[name], part.box) for name, part in parts]
                    if is_alone
                    else []
                )
                told = find_flat_bytes(values, message.dtype, self.device, otherwise=flat)
                work = broadcast(self._groups[rank], told)
                arriving.append((work, message, flat if told is flat else None))

    def _finish(self, ranks: Sequence[int], *, to: str) -> None:
        """Return when the parts of the first of `ranks` have arrived; the others are still to
        come.
        """

        def has_come(rank: int) -> bool:
            return all(work.is_completed() for work, *_ in self._arriving[rank])

        def absent() -> list[str]:
            return [learner_name(rank) for rank in ranks if not has_come(rank)]

        self.progress.wait_until(lambda: has_come(ranks[0]), who=absent, to=to)
        try:
            for work, *_ in self._arriving[ranks[0]]:
                work.wait()
        except RuntimeError as error:
            lost = (
                f"{self.progress.member} waited for {learner_name(ranks[0])} to {to}, and lost "
                f"it: {error}"
            )
            raise self.progress.lost(lost) from error


def messages(
    bucket: Bucket, rank: int, memory_N: torch.Tensor, device: torch.device
) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """What a rank sends of a bucket, each message with a place in memory. On a CPU, where copies
    are dear, every large part is one.
    """
    parts = bucket.parts.get(rank, {})
    least_bytes = LARGE_BYTES if device.type == "cpu" else math.inf
    for _, names in groupby(
        parts, key=lambda name: name if parts[name].num_bytes >= least_bytes else None
    ):
        message = replace(bucket, parts={rank: {name: parts[name] for name in names}})
        first, start, stop = (bucket.span(rank)[0], *message.span(rank))
        yield message, memory_N[start - first : stop - first]


def find_flat_bytes(
    values: Sequence[torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    *,
    otherwise: torch.Tensor,
) -> torch.Tensor:
    """The bytes of the one tensor of `values`, if it lies in a CPU's memory just as it travels."""
    if (
        len(values) != 1
        or device.type != "cpu"
        or (values[0].dtype, values[0].device) != (dtype, device)
    ):
        return otherwise
    return values[0].view(-1).view(torch.uint8) if values[0].is_contiguous() else otherwise


def broadcast_group(
    info: Info, progress: SyncProgress, *, sender: str, rank: int, device: torch.device
) -> Any:
    """A process group of `sender`, its rank 0, and a channel's receivers, beside any that these
    processes are in.

    Returns when all are connected. Members wait for each other here, and not in the group, which
    could not say who is missing; NCCL connects them when the first byte is sent, which therefore is
    sent now.

    Raises:
        RunError: some did not come within the time-out (they are named), or could not be connected.
    """
    members = [sender, *list_receivers(info)]
    # First see that all are there: a member that waits with another sender is not missing.
    for stage in ("connecting", f"connecting/{sender}"):
        progress.report(stage)
        progress.wait(stage, members, to=f"connect with {sender}")
    try:
        group = _group(info, progress.store, sender=sender, rank=rank)
        first = broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device))
        others = [member for member in members if member != progress.member]
        progress.wait_until(
            first.is_completed, who=lambda: others, to=f"be connected with {sender}"
        )
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
        gloo._devices = [
            dist.ProcessGroupGloo.create_device(
                hostname=address_towards(info["address"], info["port"])
            )
        ]
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
