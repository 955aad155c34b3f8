"""The two ends of a weight sync's channel, which a transport implements.

A transport carries buckets from the learners to the receivers. It is one file with two classes,
an `Outgoing` for a learner and an `Incoming` for a receiver, and a line in `transports.py`. The
methods of both are called in this order::

    facts = outgoing.offer_together()     # on all learners
    facts |= outgoing.offer()             # on learner 0 alone; the facts travel to all others
    outgoing.join(info)                   # before anybody knows who else comes
    outgoing.connect(info, progress)      # once all members have joined
    outgoing.put(position, bucket, ...)   # the buckets of one version after another

and a receiver calls `join`, `connect` and `take`. Learners run at most `NUM_SLOTS` buckets ahead of
the slowest receiver. Each version may have a manifest of its own, with as many buckets, in which no
rank brings more bytes than in the manifest that the channel was made with.
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
FindLocal = Callable[[str], torch.Tensor]
"""Returns this rank's part of a tensor, by the name that it travels under."""
WholeTensors = Mapping[str, torch.Tensor]
"""The tensors of a bucket by name, to be filled."""
FindWholes = Callable[[int], WholeTensors]
"""Returns the tensors of the bucket at a position, always the same; a transport may ask early."""


class ChannelEnd:
    """One end of a channel: a learner's (`Outgoing`) or a receiver's (`Incoming`)."""

    progress: SyncProgress

    def __init__(self, manifest: Manifest, *, index: int, device: torch.device) -> None:
        """Note what travels; nothing is allocated before `join`.

        Args:
            index: the rank of a learner, or the number of a receiver.
            device: where buckets are packed, or arrive.
        """
        self.manifest = manifest
        self.index = index
        self.device = device

    def join(self, info: Info) -> None:
        """Open what learner 0 offers."""

    def connect(self, info: Info, progress: SyncProgress) -> None:
        """Prepare to send or to receive, once all members have joined."""
        self.progress = progress

    def close(self) -> None:
        """Release memory and connections, even if other references to this object remain."""


class Outgoing(ChannelEnd):
    """A learner's end of a channel.

    This class itself sends nothing: it serves learners whose parts another copy of the model sends.
    """

    serves_all = False
    """Whether all learners have such an end, also those whose parts another copy sends."""

    def offer_together(self) -> dict[str, Any]:
        """Make what a receiver of one's own connects to; returns facts, the same on all learners.

        Collective.
        """
        return {}

    def offer(self) -> dict[str, Any]:
        """On learner 0: make what the others connect to; returns the facts that they need."""
        return {}

    def put(self, position: int, find_local: FindLocal) -> None:
        """Send this rank's parts of the bucket at `position`."""

    def check(self) -> None:
        """Raise an error that occurred since the last `put`; returns at once."""


class Incoming(ChannelEnd):
    """A receiver's end of a channel."""

    def take(self, position: int, find_wholes: FindWholes) -> None:
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
