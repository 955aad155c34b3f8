"""How one rank of the learners brings its part of a bucket, for each way that weights travel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from open_instruct.rollout.roll_call import RollCall
from open_instruct.rollout.weight_gather import Shards, gather, write_own
from open_instruct.rollout.weight_manifest import Bucket, WeightManifest
from open_instruct.rollout.weight_wire import NUM_SLOTS, broadcast, settle, slot_of

# After a broadcast broke: how long those receivers that did get it may take to say so.
SECONDS_TO_ANSWER = 1.0


class Outgoing(Protocol):
    """Carries buckets away from one rank. Positions count them through the life of a channel."""

    def put(self, position: int, bucket: Bucket, shards: Sequence[Shards]) -> None:
        """Bring this rank's part of a bucket; all receivers have taken the one before the last."""

    def check(self) -> None:
        """Raise what went wrong since the last `put`; returns at once."""

    def close(self) -> None:
        """Let go of memory and connections, whoever still knows this object."""


class SharedMemoryWriter:
    """Writes its boxes to their places in a slot that the receivers see."""

    def __init__(self, slots_SN: torch.Tensor, roll: RollCall, *, dtype: torch.dtype, rank: int) -> None:
        self._slots_SN = slots_SN
        self._roll = roll
        self._dtype = dtype
        self._rank = rank

    def put(self, position: int, bucket: Bucket, shards: Sequence[Shards]) -> None:
        flat = slot_of(self._slots_SN, position, bucket)
        for own, (_, whole) in zip(shards, bucket.views(flat, self._dtype), strict=True):
            write_own(own, whole, rank=self._rank)
        settle(flat.device)
        self._roll.report(f"filled/{position}")

    def check(self) -> None:
        pass

    def close(self) -> None:
        del self._slots_SN


class PartSender:
    """Sends its boxes to the rank that gathers."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device, rank: int) -> None:
        self._dtype = dtype
        self._device = device
        self._rank = rank

    def put(self, position: int, bucket: Bucket, shards: Sequence[Shards]) -> None:
        gather(shards, None, dtype=self._dtype, device=self._device, rank=self._rank)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class Broadcaster:
    """Gathers a bucket, while the one before it is on its way to the receivers, and sends it after that one."""

    def __init__(
        self,
        group: Any,
        roll: RollCall,
        receivers: Sequence[str],
        *,
        manifest: WeightManifest,
        device: torch.device,
        rank: int,
    ) -> None:
        self._group = group
        self._roll = roll
        self._receivers = receivers
        self._dtype = manifest.dtype
        self._rank = rank
        self._slots_SN = torch.empty(NUM_SLOTS, manifest.largest_bucket_bytes, dtype=torch.uint8, device=device)
        self._under_way: dict[int, dist.Work] = {}

    def put(self, position: int, bucket: Bucket, shards: Sequence[Shards]) -> None:
        self._finish(position - NUM_SLOTS)
        flat = slot_of(self._slots_SN, position, bucket)
        wholes = [whole for _, whole in bucket.views(flat, self._dtype)]
        gather(shards, wholes, dtype=self._dtype, device=flat.device, rank=self._rank)
        self._under_way[position] = broadcast(self._group, flat)

    def check(self) -> None:
        for position in list(self._under_way):
            if self._under_way[position].is_completed():
                self._finish(position)

    def close(self) -> None:
        # A receiver waits for what it asked for until the group, and everything that was begun in it, is gone.
        self._under_way.clear()
        del self._group, self._slots_SN

    def _finish(self, position: int) -> None:
        if position not in self._under_way:
            return
        try:
            self._under_way[position].wait()
        except RuntimeError as error:
            time.sleep(SECONDS_TO_ANSWER)
            missing = self._roll.missing(f"done/{position}", self._receivers)
            raise self._roll.fail(
                f"the broadcast broke before {' and '.join(missing) or 'all receivers'} had the whole bucket: {error}"
            ) from error
        del self._under_way[position]
