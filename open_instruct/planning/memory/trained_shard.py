"""A rank's shard of a parameter that is trained, and what a tensor takes in pinned host memory."""

from dataclasses import dataclass

from open_instruct.planning.memory.state import MASTER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedShard:
    """A rank's shard of a trained parameter, of which `count` are alike."""

    count: int
    num_values: int
    moment_bytes: tuple[int, ...]  # of each tensor of the optimizer's moments

    @property
    def weight_bytes(self) -> int:
        """Bytes of the shard in float32, and of its gradient."""
        return self.num_values * MASTER_BYTES


def pinned_bytes(num_bytes: int) -> int:
    """Host memory of a pinned tensor: the next power of two (`CachingHostAllocator.h`)."""
    if num_bytes == 0:
        return 0
    return 1 << (num_bytes - 1).bit_length()
