"""A transport for engines on the learners' own GPUs: each learner gathers for the one beside it.

An engine has all weights, a learner a shard, and no two processes of one GPU can be in one group of
NCCL. So learners send each other their parts of a bucket, over the group that they train in, into a
slot on every learner's device; the receiver on the same device copies from there. Receiver k is on
the device of learner k.
"""

from typing import Any

import torch.distributed as dist

from open_instruct.parallel.process import gather_objects
from open_instruct.weight_sync.channel import FindLocal, FindWholes, Info, wait_for_device
from open_instruct.weight_sync.progress import learner_name
from open_instruct.weight_sync.slots import SlotReader, SlotWriter, view_slot

SLOTS = "slots_of_learners"


class GatheringWriter(SlotWriter):
    """A learner's end: its own two slots, in which all parts of a bucket come together."""

    serves_all = True

    def offer(self) -> dict[str, Any]:
        return {}

    def offer_together(self) -> dict[str, Any]:
        return {SLOTS: gather_objects(super().offer())}

    def join(self, info: Info) -> None:
        super().join(info[SLOTS][self.index])

    def put(self, position: int, find_local: FindLocal) -> None:
        bucket = self.manifest.find_bucket(position)
        flat = view_slot(self.slots_SN, position, bucket)
        bucket.pack(flat, find_local, rank=self.index)
        for rank in bucket.parts:
            start, stop = bucket.span(rank)
            if start < stop:
                dist.broadcast(flat[start:stop], src=rank)
        wait_for_device(self.device)
        self.progress.report(f"filled/{position}")


class GatheredReader(SlotReader):
    """A receiver's end: it copies all parts out of the slot of the learner on its own device."""

    def join(self, info: Info) -> None:
        super().join(info[SLOTS][self.index])

    def take(self, position: int, find_wholes: FindWholes) -> None:
        bucket = self.manifest.find_bucket(position)
        self.progress.wait(
            f"filled/{position}",
            [learner_name(self.index)],
            to=f"gather bucket {self.manifest.describe_bucket(position)}",
        )
        flat = view_slot(self.slots_SN, position, bucket)
        for rank in bucket.parts:
            bucket.unpack(flat, find_wholes(position), rank=rank)
