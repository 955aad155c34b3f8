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
- Where ranks split matrices, a rank shares its part of the model with those that have the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

from open_instruct.parallel.training_state import ADAMW_MOMENTS, GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES
from open_instruct.planning.memory.forward_backward import GRADIENTS
from open_instruct.planning.memory.phases import BUFFERS, OPTIMIZER, PARAMETERS
from open_instruct.planning.memory.state import STEP_BYTES, tensor_local_shape
from open_instruct.planning.subject.model import ModelShape, ParameterShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """How DeepSpeed shares, in its own words and in values, not bytes; and what the optimizer treats otherwise.

    What a run never changes is as DeepSpeed has it where its configuration says nothing; a test holds them equal.
    """

    stage: int
    nearby: int
    optimizer_on_host: bool
    weights_on_host: bool
    not_decayed: tuple[str, ...]
    reduce_bucket_size: int = 500_000_000
    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    param_persistence_threshold: int = 100_000

    def adds_up_flat(self, compute_bytes: int) -> bool:
        """Whether it is `BF16_Optimizer` that steps."""
        return self.stage == 1 and compute_bytes < MASTER_BYTES and not self.optimizer_on_host


@dataclass(frozen=True, kw_only=True)
class SplitShape(ModelShape):
    """What each of `degree` ranks has of a model whose matrices they split as `tensor_parallel.py` does."""

    degree: int

    @cached_property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """Parts of equal size; `tensor_axis` is the one that each was cut along."""
        cut = [replace(each, tensor_axis=self._axis(each)) for each in super().parameters]
        return tuple(replace(each, shape=tensor_local_shape(each, self.degree, 0)) for each in cut)

    def _axis(self, whole: ParameterShape) -> int | None:
        over_heads = self.qk_norm == "full" and whole.name.endswith((".q_norm.weight", ".k_norm.weight"))
        axis = 0 if over_heads else whole.tensor_axis
        stays = axis is None or whole.name.startswith("embeddings") or whole.shape[axis] % self.degree
        return None if stays else axis


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What a rank has of a model that `num_ranks` share, in values; it is the one at `rank` of them."""

    shape: SplitShape
    zero: Zero
    num_ranks: int
    rank: int = 0

    @cached_property
    def groups(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """Names and sizes of the parameters that the optimizer treats alike; the first are those not decayed."""
        groups: tuple[list[tuple[str, int]], ...] = ([], [])
        for each in (each for each in self.shape.parameters if each.is_trained):
            decays = not any(fnmatch(each.name, pattern) for pattern in self.zero.not_decayed)
            groups[decays].append((each.name, each.num_params))
        return tuple(tuple(group) for group in groups if group)

    @cached_property
    def flat(self) -> tuple[int, ...]:
        """Below stage 3: each group's weights, filled up."""
        step = 2 * self.num_ranks
        return tuple(-(-sum(size for _, size in group) // step) * step for group in self.groups)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Each group's, as the optimizer has them."""
        if self.zero.stage in (1, 2):
            return tuple(size // self.num_ranks for size in self.flat)
        own = self.part if self.zero.stage == 3 else int
        return tuple(sum(own(size) for _, size in group) for group in self.groups)

    @property
    def own(self) -> int:
        return sum(self.parts)

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Below stage 3, of what is trained: where it begins in its group, and a rank's part of that."""
        found = dict[str, tuple[int, int]]()
        for group, part in zip(self.groups, self.parts, strict=True):
            ends = accumulate(size for _, size in group)
            found |= {name: (end - size, part) for (name, size), end in zip(group, ends, strict=True)}
        return found

    def held(self, parameter: ParameterShape, rank: int) -> int:
        """Values that a rank has of a parameter, no two the same: of what all have, the first."""
        size = parameter.num_params
        start, part = (0, self.part(size)) if self.zero.stage == 3 else self.places.get(parameter.name, (0, size))
        return max(0, min((rank + 1) * part, start + size) - max(rank * part, start))

    def rows_of_ranks(self, parameter: ParameterShape) -> Iterator[tuple[int, int, int]]:
        """See `planning.traffic.per_step.RowsOfRanks`; what is shared is runs of values, of each part of a matrix."""
        is_shared = self.zero.stage == 3 or (self.zero.stage and parameter.is_trained)
        (part,) = (each for each in self.shape.parameters if each.name == parameter.name)
        width, num_parts = 1 if is_shared else prod(parameter.shape[1:]), parameter.num_params // part.num_params
        ranks = [*range(self.num_ranks)] * num_parts
        return ((1, self.held(part, rank) // width, width) for rank in ranks)

    @property
    def touched(self) -> int:
        """Values of all parameters of which something is in this rank's part."""
        return sum(each.num_params for each in self.shape.parameters if each.is_trained and self.held(each, self.rank))

    def part(self, size: int) -> int:
        """A rank's of one parameter, at stage 3."""
        return -(-size // self.num_ranks)

    @property
    def largest(self) -> int:
        """Values of the largest parameter that is trained."""
        return max(size for group in self.groups for _, size in group)

    @property
    def persistent(self) -> list[int]:
        """Of the parameters that stay whole at stage 3."""
        at_most = self.zero.param_persistence_threshold if self.num_ranks > 1 else 0
        return [each.num_params for each in self.shape.parameters if each.num_params <= at_most]

    def copied_nearby(self, *, trained: bool) -> int:
        """Of a second copy that neighbours hold, once everything was gathered in a step; of what is frozen it stays."""
        sizes = [each.num_params for each in self.shape.parameters if each.is_trained is trained]
        parts = sum(self.part(size) for size in sizes if size > self.zero.param_persistence_threshold)
        return parts * self.num_ranks // self.zero.nearby if self.zero.nearby > 1 and self.num_ranks > 1 else 0


class State(NamedTuple):
    """Bytes by label: what stays on the device and on its host, and on the device until the step, if a backward ran."""

    device: Counter[str]
    host: Counter[str]
    until_step: Counter[str]


def state_of(shares: Shares, compute_bytes: int) -> State:
    """A rank's, after a first step."""
    zero, own, c = shares.zero, shares.own, compute_bytes
    flat, num_trained, in_float32 = sum(shares.flat), shares.shape.num_trained, c == MASTER_BYTES
    device, host, until_step = Counter[str](), Counter[str](), Counter[str]()
    of_optimizer = host if zero.optimizer_on_host else device
    num_flat = len(shares.parts) if zero.stage else sum(map(len, shares.groups))
    of_optimizer[PARAMETERS] += own * MASTER_BYTES
    of_optimizer[OPTIMIZER] += own * ADAMW_MOMENTS * MOMENT_BYTES + num_flat * STEP_BYTES
    frozen = [each.num_params for each in shares.shape.parameters if not each.is_trained]  # whole below stage 3
    alone = own + sum(map(shares.part, frozen)) if zero.stage == 3 else sum(frozen)
    (host if zero.weights_on_host else device)[PARAMETERS] += alone * c
    if zero.stage == 3:
        device[PARAMETERS] += (sum(shares.persistent) + shares.copied_nearby(trained=False)) * c
        device[BUFFERS] += zero.reduce_bucket_size * GRADIENT_BYTES
        of_optimizer[GRADIENTS] += own * GRADIENT_BYTES
    elif zero.stage:
        device[PARAMETERS] += flat * c
    if zero.adds_up_flat(c):
        device[GRADIENTS] += flat * GRADIENT_BYTES
        until_step[GRADIENTS] += num_trained * c
    elif zero.stage < 2:
        until_step[GRADIENTS] += num_trained * GRADIENT_BYTES
        until_step[BUFFERS] += zero.stage * zero.reduce_bucket_size * GRADIENT_BYTES
    elif zero.stage == 2:
        adds_up = host if in_float32 and zero.optimizer_on_host else until_step
        adds_up[GRADIENTS] += (shares.touched if in_float32 else own) * GRADIENT_BYTES
    if zero.optimizer_on_host:
        host[GRADIENTS] += own * GRADIENT_BYTES
        if zero.stage < 3:
            device[BUFFERS] += shares.largest * c
            host[BUFFERS] += (own + shares.largest) * c
    return State(device=device, host=host, until_step=until_step)
