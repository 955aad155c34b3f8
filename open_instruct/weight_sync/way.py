"""The seam of a weight sync: a way carries buckets from the learners to the receivers.

A way is one file with its two ends, `Outgoing` of a learner and `Incoming` of a receiver, and a
line in `ways.py`. Both ends live through one channel, in this order::

    facts = outgoing.offer()              # on learner 0 alone; the facts travel to all others
    outgoing.join(info)                   # before anybody knows who else comes
    outgoing.connect(info, progress)      # once all members have joined
    outgoing.put(position, bucket, ...)   # the buckets of one version after another

with `join`, `connect` and `take` on the receivers' side. Learners run at most `NUM_SLOTS` buckets
ahead of the slowest receiver. `manifest` may be another one for each version: of as many buckets,
in which no rank brings more than in the one that the way was made with.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from open_instruct.weight_sync.manifest import Manifest
from open_instruct.weight_sync.progress import SyncProgress

NUM_SLOTS = 2
CPU = torch.device("cpu")

Info = Mapping[str, Any]
"""The facts of a channel, as `WeightSender.open` returns them."""
LocalOf = Callable[[str], torch.Tensor]
"""Gives this rank's part of a tensor, by the name that it travels under; made on demand."""
Wholes = Mapping[str, torch.Tensor]
"""The tensors of a bucket by name, to be filled."""
WholesAt = Callable[[int], Wholes]
"""Gives those of the bucket at a position, always the same ones; a way may ask for those of the
next one early.
"""


class End:
    """An end of a channel."""

    progress: SyncProgress

    def __init__(self, manifest: Manifest, *, index: int, device: torch.device) -> None:
        """`index`: the rank of a learner, or the number of a receiver; on `device` buckets are
        packed, or arrive.
        """
        self.manifest, self.index, self.device = manifest, index, device

    def join(self, info: Info) -> None:
        """Take hold of what learner 0 offers."""

    def connect(self, info: Info, progress: SyncProgress) -> None:
        """Make ready to send or to receive; all members have joined."""
        self.progress = progress

    def close(self) -> None:
        """Release memory and connections, even if other references to this object remain."""


class Outgoing(End):
    """A learner's end of a channel.

    This class sends nothing: it serves learners whose parts are sent by another copy of the model.
    """

    def offer(self) -> dict[str, Any]:
        """On learner 0: make what the other members connect to; returns facts that they need, plain
        types.
        """
        return {}

    def put(self, position: int, local_of: LocalOf) -> None:
        """Send this rank's parts of the bucket at `position`."""

    def check(self) -> None:
        """Raise an error that occurred since the last `put`; returns at once."""


class Incoming(End):
    """A receiver's end of a channel."""

    def take(self, position: int, wholes_at: WholesAt) -> None:
        """Bring all parts of the bucket at `position` into its tensors.

        Raises:
            RunError: a learner did not bring its part within the time-out (names it), or somebody
                failed.
        """


def wait_for_device(device: torch.device) -> None:
    """Wait for this stream's work, so that another process may read its results.

    Other streams are not waited for, as the next bucket travels on them.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
