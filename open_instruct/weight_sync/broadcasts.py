"""Two transports by process groups: gloo from CPU to CPU, NCCL from device to device.

Every rank of one copy of the model broadcasts its own parts of a bucket to all receivers, over a
group of its own, and packs the next ones meanwhile. Nothing is gathered. A part that is a message
of its own travels straight from the model's memory into the tensor at the receiver, if its bytes
lie in both in the order of the message; other parts are copied on both sides.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from open_instruct.cluster.addresses import find_address_towards
from open_instruct.models.shards import select_box
from open_instruct.weight_sync.channel import (
    NUM_SLOTS,
    FindLocal,
    FindWholes,
    Incoming,
    Info,
    Outgoing,
)
from open_instruct.weight_sync.manifest import Bucket, Manifest, Part
from open_instruct.weight_sync.progress import HOST, SyncProgress, learner_name, list_receivers

# The time, after a broken broadcast, in which receivers that did get it may report so.
SECONDS_TO_ANSWER = 1.0
# Extra seconds of a process group's time-out, so that a member's own time-out, which names the
# missing one, is first.
GROUP_PATIENCE_S = 10.0
# A part of this size is a message of its own: to copy it would take longer than one more message.
LARGE_BYTES = 2**20
# NCCL reads this variable when it makes a process group. With it, a peer that is gone or late ends
# the communicator, and not this process.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
GIVE_UP_COMMUNICATOR = "2"


class PartBroadcaster(Outgoing):
    """Broadcasts a rank's parts from two slots, each of the size of its largest message."""

    def __init__(self, manifest: Manifest, *, index: int, device: torch.device) -> None:
        super().__init__(manifest, index=index, device=device)
        self.group: Any = None
        self.slots_SN = torch.empty(0)
        self.sending: dict[int, list[dist.Work]] = {}  # by position

    def connect(self, info: Info, progress: SyncProgress) -> None:
        super().connect(info, progress)
        self.receivers = list_receivers(info)
        self.group = broadcast_group(
            info, progress, sender=learner_name(self.index), rank=0, device=self.device
        )
        most_bytes = self.manifest.largest_span(self.index)
        self.slots_SN = torch.empty(NUM_SLOTS, most_bytes, dtype=torch.uint8, device=self.device)

    def put(self, position: int, find_local: FindLocal) -> None:
        self._finish(position - NUM_SLOTS)
        bucket = self.manifest.find_bucket(position)
        slot = self.slots_SN[position % NUM_SLOTS]
        works: list[dist.Work] = []
        self.sending[position] = works
        for message, memory in split_messages(bucket, self.index, slot, self.device):
            parts = message.parts[self.index]
            tensors = {name: find_local(name) for name in parts}
            values = [tensors[name][part.local_box] for name, part in parts.items()]
            flat = find_flat_bytes(values, message.dtype, self.device)
            if flat is None:
                first_byte, _ = message.span(self.index)
                message.pack(memory, tensors.__getitem__, rank=self.index, first_byte=first_byte)
                flat = memory
            works.append(broadcast(self.group, flat))

    def check(self) -> None:
        for position, works in list(self.sending.items()):
            if all(work.is_completed() for work in works):
                self._finish(position)

    def close(self) -> None:
        # Until the group and all of its work is gone, a receiver goes on waiting.
        if self.group is not None:
            self.group.abort()
        self.sending.clear()
        self.group = None
        self.slots_SN = torch.empty(0)

    def _finish(self, position: int) -> None:
        try:
            for work in self.sending.get(position, ()):
                work.wait()
        except RuntimeError as error:
            time.sleep(SECONDS_TO_ANSWER)
            missing = self.progress.find_missing(f"done/{position}", self.receivers)
            raise self.progress.fail(
                f"the broadcast broke before {' and '.join(missing) or 'all receivers'} had the "
                f"whole bucket: {error}"
            ) from error
        self.sending.pop(position, None)


class PartReceiver(Incoming):
    """Receives every rank's parts over the group of that rank.

    The next bucket travels while one is loaded.
    """

    def __init__(self, manifest: Manifest, *, index: int, device: torch.device) -> None:
        super().__init__(manifest, index=index, device=device)
        self._groups: dict[int, Any] = {}
        self._memories: dict[int, torch.Tensor] = {}
        # By rank: each message, with the memory to unpack it from, or None if it needs none.
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
            self._memories[rank] = torch.empty(most_bytes, dtype=torch.uint8, device=self.device)

    def take(self, position: int, find_wholes: FindWholes) -> None:
        bucket = self.manifest.find_bucket(position)
        ranks = set(self.manifest.ranks)
        if bucket is self.manifest.buckets[0]:
            self.progress.wait(f"go/{position}", [HOST], to="begin to send")
            self._begin(position, ranks, find_wholes)
        following = None if bucket is self.manifest.buckets[-1] else position + 1
        self._begin(following, ranks - bucket.parts.keys(), find_wholes)
        senders = list(bucket.parts)
        for number, rank in enumerate(senders):
            self._finish(
                senders[number:], to=f"send bucket {self.manifest.describe_bucket(position)}"
            )
            for _, message, memory in self._arriving.pop(rank):
                if memory is not None:
                    first_byte, _ = message.span(rank)
                    wholes = find_wholes(position)
                    message.unpack(memory, wholes, rank=rank, first_byte=first_byte)
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
        bucket = self.manifest.find_bucket(position)
        for rank in bucket.parts.keys() & ranks:
            arriving: list[tuple[dist.Work, Bucket, torch.Tensor | None]] = []
            self._arriving[rank] = arriving
            for message, memory in split_messages(bucket, rank, self._memories[rank], self.device):
                parts = message.parts[rank]
                values: list[torch.Tensor] = []
                # Otherwise the tensor need not have memory yet.
                if len(parts) == 1 and self.device.type == "cpu":
                    wholes = find_wholes(position)
                    values = [select_box(wholes[name], part.box) for name, part in parts.items()]
                flat = find_flat_bytes(values, message.dtype, self.device)
                if flat is None:
                    work = broadcast(self._groups[rank], memory)
                    arriving.append((work, message, memory))
                else:
                    work = broadcast(self._groups[rank], flat)
                    arriving.append((work, message, None))

    def _finish(self, ranks: Sequence[int], *, to: str) -> None:
        """Return when the parts of the first of `ranks` have arrived.

        The other ranks are named too if they are missing at a time-out.
        """

        def has_arrived(rank: int) -> bool:
            return all(work.is_completed() for work, *_ in self._arriving[rank])

        def find_missing() -> list[str]:
            return [learner_name(rank) for rank in ranks if not has_arrived(rank)]

        self.progress.wait_until(partial(has_arrived, ranks[0]), who=find_missing, to=to)
        try:
            for work, *_ in self._arriving[ranks[0]]:
                work.wait()
        except RuntimeError as error:
            reason = (
                f"{self.progress.member} waited for {learner_name(ranks[0])} to {to}, and lost "
                f"it: {error}"
            )
            raise self.progress.fail_after_loss(reason) from error


def split_messages(
    bucket: Bucket,
    rank: int,
    memory_N: torch.Tensor,
    device: torch.device,
) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Yield the messages of a rank's parts of a bucket, each with its place in `memory_N`.

    On a CPU, where copies are expensive, every large part is a message of its own; parts between
    two of them are one message.
    """
    parts = bucket.parts.get(rank, {})
    groups: list[dict[str, Part]] = []
    is_open = False  # whether the last group takes more parts
    for name, part in parts.items():
        is_large = device.type == "cpu" and part.num_bytes >= LARGE_BYTES
        if is_large or not is_open:
            groups.append({})
        groups[-1][name] = part
        is_open = not is_large
    first, _ = bucket.span(rank)
    for group in groups:
        message = replace(bucket, parts={rank: group})
        start, stop = message.span(rank)
        yield message, memory_N[start - first : stop - first]


def find_flat_bytes(
    values: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """The bytes of the one tensor of `values`, if a CPU holds them in the order of the message.

    None if there are several tensors, or if the bytes must be copied.
    """
    if len(values) != 1 or device.type != "cpu":
        return None
    (tensor,) = values
    if tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
        return None
    return tensor.view(-1).view(torch.uint8)


def broadcast_group(
    info: Info,
    progress: SyncProgress,
    *,
    sender: str,
    rank: int,
    device: torch.device,
) -> Any:
    """Connect a process group of `sender`, its rank 0, and all receivers of a channel.

    It is apart from any other groups of these processes. Members wait for each other here, and not
    in the group, which could not say who is missing. NCCL connects them with the first byte, so one
    is sent now.

    Raises:
        RunError: members did not come within the time-out (it names them), or cannot be connected.
    """
    members = [sender, *list_receivers(info)]
    # The first stage is for all: a member that waits for another sender is not missing.
    for stage in ("connecting", f"connecting/{sender}"):
        progress.report(stage)
        progress.wait(stage, members, to=f"connect with {sender}")
    try:
        group = _make_group(info, progress.store, sender=sender, rank=rank)
        first = broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device))
        others = [member for member in members if member != progress.member]
        progress.wait_until(
            first.is_completed, who=lambda: others, to=f"be connected with {sender}"
        )
        first.wait()
    except RuntimeError as error:
        raise progress.fail_after_loss(
            f"{progress.member} could not be connected with {' and '.join(members)}: {error}"
        ) from error
    return group


def _make_group(
    info: Info,
    store: TCPStore,
    *,
    sender: str,
    rank: int,
) -> Any:
    prefixed = PrefixStore(f"{info['backend']}/{sender}/", store)
    size = info["num_receivers"] + 1
    if info["backend"] == "gloo":
        gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # At the address that reaches the store, and no other: on one host all stays on loopback.
        address = find_address_towards(info["address"], info["port"])
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        gloo._timeout = timedelta(seconds=info["timeout_s"] + GROUP_PATIENCE_S)
        return dist.ProcessGroupGloo(prefixed, rank, size, gloo)
    nccl = dist.ProcessGroupNCCL.Options()
    # Its clock starts with the request for a bucket, while the one before is still being loaded.
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
    """Begin to send `flat` from rank 0 of the group, which is the default, to all other ranks."""
    work: dist.Work = group.broadcast([flat])
    return work
