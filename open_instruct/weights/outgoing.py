"""How one rank of the learners brings its part of a bucket, for each way that weights travel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from open_instruct.weights.manifest import Bucket, WeightManifest
from open_instruct.weights.progress import SyncProgress
from open_instruct.weights.wire import NUM_SLOTS, broadcast, slot_of, wait_for_device

# After a broadcast broke: how long those receivers that did get it may take to say so.
SECONDS_TO_ANSWER = 1.0

LocalOf = Callable[[str], torch.Tensor]
"""What this rank holds of a tensor, by the name that travels; made when it is asked for."""


class Outgoing:
    """Carries buckets away from one rank. Positions count them through the life of a channel.

    As it stands it is that of a rank whose parts another copy of the model brings.
    """

    def put(self, position: int, bucket: Bucket, local_of: LocalOf) -> None:
        """Bring this rank's parts of a bucket; all receivers have taken the one before the last."""

    def check(self) -> None:
        """Raise what went wrong since the last `put`; returns at once."""

    def close(self) -> None:
        """Let go of memory and connections, whoever still knows this object."""


class SharedMemoryWriter(Outgoing):
    """Writes its parts to their places in a slot that the receivers see."""

    def __init__(self, slots_SN: torch.Tensor, progress: SyncProgress, *, dtype: torch.dtype, rank: int) -> None:
        self._slots_SN = slots_SN
        self._progress = progress
        self._dtype = dtype
        self._rank = rank

    def put(self, position: int, bucket: Bucket, local_of: LocalOf) -> None:
        flat = slot_of(self._slots_SN, position, bucket)
        bucket.pack(flat, local_of, rank=self._rank, dtype=self._dtype)
        wait_for_device(flat.device)
        self._progress.report(f"filled/{position}")

    def close(self) -> None:
        del self._slots_SN


class PartBroadcaster(Outgoing):
    """Broadcasts its parts of a bucket to the receivers in one message, and packs the next while that is on its way."""

    def __init__(
        self,
        group: Any,
        progress: SyncProgress,
        receivers: Sequence[str],
        *,
        manifest: WeightManifest,
        device: torch.device,
        rank: int,
    ) -> None:
        self._group = group
        self._progress = progress
        self._receivers = receivers
        self._dtype = manifest.dtype
        self._rank = rank
        self._slots_SN = torch.empty(NUM_SLOTS, manifest.most_bytes_of(rank), dtype=torch.uint8, device=device)
        self._under_way: dict[int, dist.Work] = {}

    def put(self, position: int, bucket: Bucket, local_of: LocalOf) -> None:
        self._finish(position - NUM_SLOTS)
        start, stop = bucket.span(self._rank)
        if start < stop:
            own = self._slots_SN[position % NUM_SLOTS, : stop - start]
            bucket.pack(own, local_of, rank=self._rank, dtype=self._dtype, first_byte=start)
            self._under_way[position] = broadcast(self._group, own)

    def check(self) -> None:
        for position in list(self._under_way):
            if self._under_way[position].is_completed():
                self._finish(position)

    def close(self) -> None:
        # A receiver waits for what it asked for until the group, and everything that was begun in it, is gone.
        self._group.abort()
        self._under_way.clear()
        del self._group, self._slots_SN

    def _finish(self, position: int) -> None:
        if position not in self._under_way:
            return
        try:
            self._under_way[position].wait()
        except RuntimeError as error:
            time.sleep(SECONDS_TO_ANSWER)
            missing = self._progress.missing(f"done/{position}", self._receivers)
            raise self._progress.fail(
                f"the broadcast broke before {' and '.join(missing) or 'all receivers'} had the whole bucket: {error}"
            ) from error
        del self._under_way[position]
