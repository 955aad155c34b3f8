"""What the way of travelling costs without us: copies through the slot for shm, broadcasts for
gloo.
"""

import time
from pathlib import Path
from typing import Any

import torch

from open_instruct.cluster.addresses import LOOPBACK
from open_instruct.weight_sync import broadcasts, slots
from open_instruct.weight_sync.manifest import WeightManifest
from open_instruct.weight_sync.progress import SyncProgress
from sync_runs.told import TIMEOUT_S, awaited, publish


class Bare:
    """The same buckets between two processes, between memory that is there already."""

    def __init__(self, info: dict[str, Any], *, rank: int, port_path: Path) -> None:
        self.manifest = WeightManifest(**info["manifest"])
        self.rank = rank
        self.is_shared = info["backend"] == "shm"
        slot_bytes = self.manifest.largest_bucket_bytes
        self.position = 0
        if rank == 0:
            self.roll = SyncProgress.host(LOOPBACK, timeout_s=TIMEOUT_S)
            path = str(slots.create_shared_file(slot_bytes))
            publish(port_path, {"port": self.roll.store.port, "path": path})
        else:
            told = awaited(port_path)
            path = told["path"]
            self.roll = SyncProgress.join(
                {"address": LOOPBACK, "port": told["port"], "timeout_s": TIMEOUT_S},
                member="receiver 0",
            )
        # The sender's are as many as the weights: fewer would stay in the processor's cache.
        self.memory = torch.ones(slot_bytes if rank else self.manifest.num_bytes, dtype=torch.uint8)
        self.slots = slots.map_shared_file(path, slot_bytes)
        self.roll.report("mapped")
        self.roll.wait("mapped", ["learner 0", "receiver 0"], to="map the file")
        Path(path).unlink(missing_ok=True)
        meeting = {
            "backend": "gloo",
            "address": LOOPBACK,
            "port": 1,
            "num_receivers": 1,
            "timeout_s": TIMEOUT_S,
        }
        self.group = broadcasts.broadcast_group(
            meeting, self.roll, sender="learner 0", rank=rank, device=torch.device("cpu")
        )

    def send(self) -> float:
        """Seconds until the peer has all of it."""
        self.roll.wait(f"began/{self.position}", ["receiver 0"], to="begin")
        started_s = time.perf_counter()
        first_byte = 0
        for index, bucket in enumerate(self.manifest.buckets):
            position = self.position + index
            source = self.memory[first_byte : first_byte + bucket.num_bytes]
            first_byte += bucket.num_bytes
            if not self.is_shared:
                broadcasts.broadcast(self.group, source).wait()
                continue
            if index >= broadcasts.NUM_SLOTS:
                self.roll.wait(f"done/{position - broadcasts.NUM_SLOTS}", ["receiver 0"], to="copy")
            slots.view_slot(self.slots, position, bucket).copy_(source)
            self.roll.report(f"filled/{position}")
        self.position += len(self.manifest.buckets)
        self.roll.wait(f"done/{self.position - 1}", ["receiver 0"], to="copy")
        return time.perf_counter() - started_s

    def receive(self) -> None:
        self.roll.report(f"began/{self.position}")
        for bucket in self.manifest.buckets:
            if self.is_shared:
                self.roll.wait(f"filled/{self.position}", ["learner 0"], to="copy")
                self.memory[: bucket.num_bytes].copy_(
                    slots.view_slot(self.slots, self.position, bucket)
                )
            else:
                broadcasts.broadcast(self.group, self.memory[: bucket.num_bytes]).wait()
            self.roll.report(f"done/{self.position}")
            self.position += 1
