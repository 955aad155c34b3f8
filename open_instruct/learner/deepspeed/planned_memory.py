"""What a rank holds under ZeRO, by formulas. Without torch, and without DeepSpeed.

Sources, in DeepSpeed 0.19 (`stage_1_and_2.py`, `bf16_optimizer.py`, `stage3.py`):

- Below stage 3 weights lie in a flat buffer, of which a rank's optimizer has an equal part in float32. At stage 3 each
  parameter is cut into equal parts by itself.
- Stages 0 and 1 keep whole gradients until the step, in float32; `BF16_Optimizer`, which is stage 1 in bfloat16 without
  host memory, always has a float32 one of everything, and those that were computed until the step. Stage 2 adds up a
  rank's part; in float32 whole gradients of all parameters that have something in it. Stage 3 has its part always.
- Gradients are collected in a bucket of fixed size. It stays at stage 3, and at stage 1 from a step's first to its end.
  They are reduced through a copy of what is in it; at stages 2 and 3 the gradient that was just made is there besides.
- Stage 3 fetches weights ahead, up to the most that may be whole, and then one module's more.
- In host memory the optimizer's gradients have a place of their own, beside those that add up, and below stage 3 the
  part that was stepped in the dtype that is computed in; below stage 3 the device and the host each have a place for
  the largest parameter.
- Where ranks split matrices, a rank shares its part of the model with those that have the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

from open_instruct.parallel.training_state import ADAMW_MOMENTS, GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES
from open_instruct.planning.memory.forward_backward import GATHERED, GRADIENTS, REDUCED, TEMPORARIES, Moment, Passes
from open_instruct.planning.memory.phases import BUFFERS, OPTIMIZER, PARAMETERS, Moments
from open_instruct.planning.memory.state import tensor_local_shape
from open_instruct.planning.subject.model import ModelShape, ParameterShape, Unit
from open_instruct.planning.subject.workload import Workload
from open_instruct.planning.traffic.per_step import sync_buckets
from open_instruct.records import ShardLayout

# What stage 0 and BF16_Optimizer reduce at once: `MEMORY_OPT_ALLREDUCE_SIZE`.
UNSHARED_BUCKET = 500_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """How DeepSpeed shares, in its own words and in values, not bytes.

    What a run never changes is as DeepSpeed has it where its configuration says nothing; a test holds them equal.
    """

    stage: int
    nearby: int
    optimizer_on_host: bool
    weights_on_host: bool
    reduce_bucket_size: int = 500_000_000
    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
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


class Shares:
    """What a rank has of a model that `num_ranks` share, in values."""

    def __init__(self, shape: SplitShape, zero: Zero, num_ranks: int) -> None:
        self.shape, self.zero, self.num_ranks = shape, zero, num_ranks
        self.trained = {each.name: each.num_params for each in shape.parameters if each.is_trained}
        self.frozen = [each.num_params for each in shape.parameters if not each.is_trained]
        self.largest = max(self.trained.values())
        # What the optimizer of a rank has: all, a part of all in a row, or a part of each.
        in_parts = sum(map(self.part, self.trained.values()))
        self.own = in_parts if zero.stage == 3 else -(-shape.num_trained // (num_ranks if zero.stage else 1))
        self.starts = dict(zip(self.trained, accumulate(self.trained.values(), initial=0), strict=False))
        # Most values of the parameters of which something is in a part of all in a row.
        self.touched = min(shape.num_trained, self.own + self.largest)

    def part(self, size: int) -> int:
        """A rank's of one parameter, at stage 3."""
        return -(-size // self.num_ranks)

    @property
    def persistent(self) -> list[int]:
        """Of the parameters that stay whole at stage 3."""
        at_most = self.zero.param_persistence_threshold if self.num_ranks > 1 else 0
        return [each.num_params for each in self.shape.parameters if each.num_params <= at_most]

    def gathered(self, *, trained: bool) -> int:
        """Of those that stage 3 gathers, at full size with what fills them up."""
        if self.num_ranks == 1:
            return 0
        sizes = self.trained.values() if trained else self.frozen
        parts = sum(self.part(size) for size in sizes if size > self.zero.param_persistence_threshold)
        return parts * self.num_ranks

    def copied_nearby(self, *, trained: bool) -> int:
        """Of a second copy that neighbours hold, once everything was gathered in a step; of what is frozen it stays."""
        return self.gathered(trained=trained) // self.zero.nearby if self.zero.nearby > 1 else 0

    @property
    def most_gathered(self) -> int:
        """At once at stage 3: one module's more than may be whole, and what they are gathered in."""
        all_gathered = self.gathered(trained=True) + self.gathered(trained=False)
        largest = max(*self.trained.values(), *self.frozen)
        return min(all_gathered, self.zero.max_live_parameters + largest) + (largest if all_gathered else 0)

    def rows_of_ranks(self, parameter: ParameterShape) -> Iterator[tuple[int, int, int]]:
        """See `planning.traffic.per_step.RowsOfRanks`; what is shared is runs of values, of each part of a matrix."""
        (local,) = (each for each in self.shape.parameters if each.name == parameter.name)
        start, part, width = 0, local.num_params, prod(parameter.shape[1:])
        if self.zero.stage == 3:
            part, width = self.part(part), 1
        elif self.zero.stage and local.is_trained:
            start, part, width = self.starts[local.name], self.own, 1
        for rank in [*range(self.num_ranks)] * (parameter.num_params // local.num_params):
            own = min((rank + 1) * part, start + local.num_params) - max(rank * part, start)
            yield 1, max(0, own) // width, width


class State(NamedTuple):
    """Bytes by label: what stays on the device and on its host, and on the device until the step, if a backward ran."""

    device: Counter[str]
    host: Counter[str]
    until_step: Counter[str]


def state_of(shares: Shares, compute_bytes: int) -> State:
    """A rank's, after a first step."""
    zero, own, c = shares.zero, shares.own, compute_bytes
    num_trained, in_float32 = shares.shape.num_trained, c == MASTER_BYTES
    device, host, until_step = Counter[str](), Counter[str](), Counter[str]()
    of_optimizer = host if zero.optimizer_on_host else device
    of_optimizer[PARAMETERS] += own * MASTER_BYTES
    of_optimizer[OPTIMIZER] += own * ADAMW_MOMENTS * MOMENT_BYTES
    alone = own + sum(map(shares.part, shares.frozen)) if zero.stage == 3 else sum(shares.frozen)
    (host if zero.weights_on_host else device)[PARAMETERS] += alone * c
    if zero.stage == 3:
        device[PARAMETERS] += (sum(shares.persistent) + shares.copied_nearby(trained=False)) * c
        device[BUFFERS] += zero.reduce_bucket_size * GRADIENT_BYTES
        of_optimizer[GRADIENTS] += own * GRADIENT_BYTES
    elif zero.stage:
        device[PARAMETERS] += num_trained * c
    if zero.adds_up_flat(c):
        device[GRADIENTS] += num_trained * GRADIENT_BYTES
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


class ZeroPasses(Passes):
    """No unit is gathered or reduced by itself: that comes on top of every moment, the largest that it gets."""

    splits_rows = False

    def __init__(self, run: ZeroMoments, workload: Workload) -> None:
        super().__init__(run.shares.shape, run.layout, workload)
        zero, shares = run.zero, run.shares
        self.is_sharded, self.keeps_whole, self.until_step = False, zero.stage < 2, run.state.until_step
        # Of a gradient that stays whole: what it was computed as where another adds it up.
        self.stays_bytes = self.c if zero.adds_up_flat(self.c) else GRADIENT_BYTES
        self.gathered = self.moves = 0
        # A model smaller than the bucket fills as much of the copy as it has.
        moved = min(shares.shape.num_trained, zero.reduce_bucket_size)
        if zero.stage == 2:
            again = self.until_step[GRADIENTS] if self.c == MASTER_BYTES and self.accumulates else 0
            of_moved = GRADIENT_BYTES + (0 if self.c == MASTER_BYTES else self.c)
            self.moves = self.c * (zero.reduce_bucket_size + shares.largest) + of_moved * moved + again
        elif zero.stage == 3:
            self.gathered = self.c * (
                sum(shares.persistent) + shares.most_gathered + shares.copied_nearby(trained=True)
            )
            self.moves = self.c * shares.largest + GRADIENT_BYTES * moved

    def accumulated(self, shards: int) -> int:
        return shards + (self.until_step[GRADIENTS] if self.accumulates or not self.keeps_whole else 0)

    def forward(self, held: Moment, *, keeps: bool = True, runs_head: bool = True) -> Iterator[Moment]:
        waits = self.until_step[BUFFERS] if keeps and self.accumulates else 0
        for moment in super().forward(held, keeps=keeps, runs_head=runs_head):
            yield {**moment, GATHERED: self.gathered, REDUCED: waits}

    def backward(self, held: Moment) -> Iterator[Moment]:
        for moment in super().backward(held):
            yield {**moment, GATHERED: self.gathered, REDUCED: self.until_step[BUFFERS] + self.moves}

    def _whole(self, unit: Unit) -> int:
        return sum(each.num_params for each in unit.trained) * self.c

    def _shard(self, unit: Unit) -> int:
        return self._whole(unit) * self.stays_bytes // self.c if self.keeps_whole else 0

    def _made_in_place(self, num_bytes: int) -> int:
        return num_bytes * self.stays_bytes // self.c if self.keeps_whole else 0


class ZeroMoments(Moments):
    """Of a policy that DeepSpeed shares. Without CUDA what is in host memory counts like everything else."""

    def __init__(self, zero: Zero, shape: ModelShape, layout: ShardLayout, workload: Workload) -> None:
        self.zero = zero
        given = {each.name: getattr(shape, each.name) for each in fields(shape)}
        split = SplitShape(degree=layout.tensor_parallel_degree, **given)
        self.shares = Shares(split, zero, layout.shard_group_size)
        self.state = state_of(self.shares, workload.compute_bytes)
        super().__init__(shape, layout, workload)
        self.gradients, self.own = self.stays[GRADIENTS], [self.shares.own]

    @property
    def stays(self) -> Counter[str]:
        """From step to step, where it counts."""
        return self.state.device if self.workload.on_cuda else self.state.device + self.state.host

    def state_bytes(self) -> tuple[int, int, int]:
        return self.stays[PARAMETERS], self.stays[GRADIENTS] + self.state.until_step[GRADIENTS], self.stays[OPTIMIZER]

    def passes_over(self, workload: Workload) -> ZeroPasses:
        return ZeroPasses(self, workload)

    def held(self, gradients: int, *, is_training: bool = True) -> dict[str, int]:
        held = super().held(gradients, is_training=is_training)
        return held | {BUFFERS: held[BUFFERS] + self.stays[BUFFERS]}

    def checkpoint_copy(self) -> int:
        """Of what is trained; where nothing is shared, ranks share it out."""
        num_bytes = self.shares.own * (MASTER_BYTES + ADAMW_MOMENTS * MOMENT_BYTES)
        return num_bytes // (1 if self.zero.stage else self.layout.world_size) * self.workload.copies_checkpoints

    def merged_values(self) -> int:
        shares, stage = self.shares, self.zero.stage
        sizes = [each.num_params for each in self.shape.parameters if each.layer == 0]
        return (self.shape.num_trained if stage else 0) + 2 * max(shares.part(n) if stage == 3 else n for n in sizes)

    def sync_buckets(self) -> Iterator[tuple[int, int]]:
        return sync_buckets(self.shape, self.workload, self.shares.rows_of_ranks)

    def on_host(self) -> dict[str, int]:
        return super().on_host() | (self.state.host if self.workload.on_cuda else {})

    def step(self) -> Iterator[Moment]:
        """Below stage 2 gradients are reduced first. The optimizer steps with a copy of its part of them."""
        until_step, stage, own = self.state.until_step, self.zero.stage, self.shares.own
        with_gradients = self.held(self.gradients + until_step[GRADIENTS])
        if stage == 0:
            yield with_gradients | {REDUCED: GRADIENT_BYTES * min(self.shape.num_trained, UNSHARED_BUCKET)}
        elif until_step[BUFFERS]:
            yield with_gradients | {REDUCED: max(until_step[BUFFERS], GRADIENT_BYTES * self.shares.touched)}
        copies = stage and not self.zero.optimizer_on_host and not self.zero.adds_up_flat(self.workload.compute_bytes)
        copied = GRADIENT_BYTES * min(own, self.zero.sub_group_size) if copies else 0
        made = 0 if self.workload.on_cuda else 2 * (own if stage else self.shares.largest) * MASTER_BYTES
        yield with_gradients | {TEMPORARIES: copied + made}
