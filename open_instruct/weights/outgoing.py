"""One rank of the learners sends its parts of a bucket, by shared memory or by broadcast."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from open_instruct.weights.manifest import Bucket
from open_instruct.weights.progress import SyncProgress
from open_instruct.weights.wire import NUM_SLOTS, broadcast, slot_of, wait_for_device

# The time, after a broken broadcast, in which receivers that did get it may report so.
SECONDS_TO_ANSWER = 1.0

LocalOf = Callable[[str], torch.Tensor]
"""What this rank holds of a tensor, by the name that travels; made when it is asked for."""


class Outgoing:
    """Carries buckets away from one rank. Positions count them through the life of a channel.

    This class sends nothing: it serves ranks whose parts are sent by another copy of the model.
    """

    def put(self, position: int, bucket: Bucket, local_of: LocalOf) -> None:
        """Send this rank's parts of a bucket; all receivers have taken the bucket before the last."""

    def check(self) -> None:
        """Raise an error that occurred since the last `put`; returns at once."""

    def close(self) -> None:
        """Release memory and connections, even if other references to this object remain."""


@dataclass(kw_only=True)
class SharedMemoryWriter(Outgoing):
    """Writes its parts to their places in a slot that the receivers see."""

    slots_SN: torch.Tensor
    progress: SyncProgress
    dtype: torch.dtype
    rank: int

    def put(self, position: int, bucket: Bucket, local_of: LocalOf) -> None:
        flat = slot_of(self.slots_SN, position, bucket)
        bucket.pack(flat, local_of, rank=self.rank, dtype=self.dtype)
        wait_for_device(flat.device)
        self.progress.report(f"filled/{position}")

    def close(self) -> None:
        del self.slots_SN


@dataclass(kw_only=True)
class PartBroadcaster(Outgoing):
    """Broadcasts its parts of a bucket to the receivers in one message, and packs the next while that is on its way.

    `own_SN` are two slots, each as large as the rank's largest part of a bucket.
    """

    own_SN: torch.Tensor
    group: Any
    progress: SyncProgress
    receivers: Sequence[str]
    dtype: torch.dtype
    rank: int
    under_way: dict[int, dist.Work] = field(default_factory=dict)

    def put(self, position: int, bucket: Bucket, local_of: LocalOf) -> None:
        self._finish(position - NUM_SLOTS)
        start, stop = bucket.span(self.rank)
        if start < stop:
            own = self.own_SN[position % NUM_SLOTS, : stop - start]
            bucket.pack(own, local_of, rank=self.rank, dtype=self.dtype, first_byte=start)
            self.under_way[position] = broadcast(self.group, own)

    def check(self) -> None:
        for position in list(self.under_way):
            if self.under_way[position].is_completed():
                self._finish(position)

    def close(self) -> None:
        # A receiver waits for what it asked for until the group, and everything that was begun in it, is gone.
        self.group.abort()
        self.under_way.clear()
        del self.group, self.own_SN

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
