"""What a rank holds under ZeRO from step to step, byte for byte. Without torch, and without DeepSpeed.

Sources, in DeepSpeed 0.19 (`stage_1_and_2.py`, `bf16_optimizer.py`, `stage3.py`):

- Below stage 3 weights lie in one flat buffer for each group of the optimizer, filled up to twice the ranks; of that a
  rank's optimizer has an equal part in float32. At stage 3 each parameter is cut into equal parts by itself.
- Stages 0 and 1 keep whole gradients until the step, in float32; `BF16_Optimizer`, which is stage 1 in bfloat16 without
  host memory, always has a float32 one of everything, and those that were computed until the step. Stage 2 adds up a
  rank's part; in float32 whole gradients of all parameters that have something in it. Stage 3 has its part always.
- Gradients are collected in a bucket of fixed size. It stays at stage 3, and at stage 1 from a step's first to its end.
- In host memory the optimizer's gradients have a place of their own, beside those that add up, and below stage 3 the
  part that was stepped in the dtype that is computed in; below stage 3 the device and the host each have a place for
  the largest parameter.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from itertools import accumulate

from open_instruct.parallel.training_state import ADAMW_MOMENTS, GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES
from open_instruct.planning.memory.forward_backward import GRADIENTS
from open_instruct.planning.memory.phases import BUFFERS, OPTIMIZER, PARAMETERS
from open_instruct.planning.memory.state import STEP_BYTES
from open_instruct.planning.subject.model import ModelShape

# As `learner.olmo_core.optimizers`, which cannot be imported without torch, has them; a test holds the two equal.
NOT_DECAYED = ("embeddings.*", "*norm.weight", "*.bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """How DeepSpeed shares, in its own words and in values, not bytes. `decays`: some parameters do, and others not."""

    stage: int
    nearby: int
    optimizer_on_host: bool
    weights_on_host: bool
    decays: bool
    reduce_bucket_size: int
    sub_group_size: int
    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int
    param_persistence_threshold: int

    def adds_up_flat(self, compute_bytes: int) -> bool:
        """Whether it is `BF16_Optimizer` that steps."""
        return self.stage == 1 and compute_bytes < MASTER_BYTES and not self.optimizer_on_host


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What a rank has of a model, in values."""

    shape: ModelShape
    zero: Zero
    world_size: int
    rank: int = 0

    @cached_property
    def groups(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """Names and sizes of the parameters that the optimizer treats alike; the first are those not decayed."""
        sizes = [(each.name, each.num_params) for each in self.shape.parameters]
        if not self.zero.decays:
            return (tuple(sizes),)
        is_kept = {name: any(fnmatch(name, pattern) for pattern in NOT_DECAYED) for name, _ in sizes}
        return tuple(tuple(each for each in sizes if is_kept[each[0]] is first) for first in (True, False))

    @cached_property
    def flat(self) -> tuple[int, ...]:
        """Below stage 3: each group's weights, filled up."""
        step = 2 * self.world_size
        return tuple(-(-sum(size for _, size in group) // step) * step for group in self.groups)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Each group's, as the optimizer has them."""
        if self.zero.stage == 0:
            return tuple(sum(size for _, size in group) for group in self.groups)
        if self.zero.stage < 3:
            return tuple(size // self.world_size for size in self.flat)
        return tuple(sum(self.part(size) for _, size in group) for group in self.groups)

    @property
    def own(self) -> int:
        return sum(self.parts)

    @property
    def touched(self) -> int:
        """Values of all parameters of which something is in this rank's part."""
        total = 0
        for group, part in zip(self.groups, self.parts, strict=True):
            ends = accumulate(size for _, size in group)
            start, stop = self.rank * part, (self.rank + 1) * part
            total += sum(size for (_, size), end in zip(group, ends, strict=True) if end > start and end - size < stop)
        return total

    def part(self, size: int) -> int:
        """A rank's of one parameter, at stage 3."""
        return -(-size // self.world_size)

    @property
    def persistent(self) -> list[int]:
        """Of the parameters that stay whole at stage 3."""
        at_most = self.zero.param_persistence_threshold if self.world_size > 1 else 0
        return [each.num_params for each in self.shape.parameters if each.num_params <= at_most]

    @property
    def copied_nearby(self) -> int:
        """Of a second copy that neighbours hold, once everything was gathered in a step."""
        cut = (self.own - sum(map(self.part, self.persistent))) * self.world_size
        return cut // self.zero.nearby if self.zero.nearby > 1 and self.world_size > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Bytes by label: what stays on the device and on its host, and on the device until the step, if a backward ran."""

    device: Counter[str]
    host: Counter[str]
    until_step: Counter[str]


def state_of(shares: Shares, compute_bytes: int) -> State:
    """A rank's, after a first step."""
    zero, own, c = shares.zero, shares.own, compute_bytes
    flat, num_params, in_float32 = sum(shares.flat), shares.shape.num_params, c == MASTER_BYTES
    largest = max(parameter.num_params for parameter in shares.shape.parameters)
    device, host, until_step = Counter[str](), Counter[str](), Counter[str]()
    of_optimizer = host if zero.optimizer_on_host else device
    num_flat = len(shares.parts) if zero.stage else len(shares.shape.parameters)
    of_optimizer[PARAMETERS] += own * MASTER_BYTES
    of_optimizer[OPTIMIZER] += own * ADAMW_MOMENTS * MOMENT_BYTES + num_flat * STEP_BYTES
    if zero.stage == 3:
        (host if zero.weights_on_host else device)[PARAMETERS] += own * c
        device[PARAMETERS] += sum(shares.persistent) * c
        device[BUFFERS] += zero.reduce_bucket_size * GRADIENT_BYTES
        of_optimizer[GRADIENTS] += own * GRADIENT_BYTES
    elif zero.stage:
        device[PARAMETERS] += flat * c
    if zero.adds_up_flat(c):
        device[GRADIENTS] += flat * GRADIENT_BYTES
        until_step[GRADIENTS] += num_params * c
    elif zero.stage < 2:
        until_step[GRADIENTS] += num_params * GRADIENT_BYTES
        until_step[BUFFERS] += zero.stage * zero.reduce_bucket_size * GRADIENT_BYTES
    elif zero.stage == 2:
        adds_up = host if in_float32 and zero.optimizer_on_host else until_step
        adds_up[GRADIENTS] += (shares.touched if in_float32 else own) * GRADIENT_BYTES
    if zero.optimizer_on_host:
        host[GRADIENTS] += own * GRADIENT_BYTES
        if zero.stage < 3:
            device[BUFFERS] += largest * c
            host[BUFFERS] += (own + largest) * c
    return State(device=device, host=host, until_step=until_step)
