"""What is alive in a step under ZeRO, as a plan counts it. Without torch, and without DeepSpeed.

On top of what stays (`planned_state.py`), and of what the passes keep: at stage 3 what is gathered; gradients that stay
whole below stage 2; and what gradients are reduced through, which is the bucket, a copy of what is in it, and at stages
2 and 3 the gradient that was just made. Those are the largest that they get; a model smaller than the bucket fills as
much of the copy as it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property

from open_instruct.learner.deepspeed.gathering import Gathered, Modules, gathered_in_step
from open_instruct.learner.deepspeed.planned_state import Shares, SplitShape, Zero, state_of
from open_instruct.parallel.training_state import ADAMW_MOMENTS, GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES
from open_instruct.planning.memory.forward_backward import GATHERED, GRADIENTS, REDUCED, TEMPORARIES, Moment, Passes
from open_instruct.planning.memory.phases import BUFFERS, OPTIMIZER, PARAMETERS, Moments
from open_instruct.planning.subject.model import ModelShape, Unit
from open_instruct.planning.subject.workload import Workload
from open_instruct.planning.traffic.per_step import sync_buckets
from open_instruct.records import ShardLayout

# What stage 0 and BF16_Optimizer reduce at once: `MEMORY_OPT_ALLREDUCE_SIZE`.
UNSHARED_BUCKET = 500_000_000


class ZeroPasses(Passes):
    """No unit is gathered or reduced by itself: that comes on top of every moment."""

    splits_rows = False

    def __init__(self, run: ZeroMoments, workload: Workload) -> None:
        super().__init__(run.shares.shape, run.layout, workload)
        zero, shares = run.zero, run.shares
        self.is_sharded, self.keeps_whole, self.until_step = False, zero.stage < 2, run.state.until_step
        # Of a gradient that stays whole: what it was computed as where another adds it up.
        self.stays_bytes = self.c if zero.adds_up_flat(self.c) else GRADIENT_BYTES
        self.gathered = self.c * (run.gathered.most_values + shares.copied_nearby(trained=True))
        # Whether all of it is there at once says how much of the bucket is copied.
        moved, self.moves = min(shares.shape.num_trained, zero.reduce_bucket_size), 0
        if zero.stage == 2:
            again = self.until_step[GRADIENTS] if self.c == MASTER_BYTES and self.accumulates else 0
            of_moved = GRADIENT_BYTES + (0 if self.c == MASTER_BYTES else self.c)
            self.moves = self.c * (zero.reduce_bucket_size + shares.largest) + of_moved * moved + again
        elif zero.stage == 3:
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

    def __init__(self, zero: Zero, shape: ModelShape, layout: ShardLayout, workload: Workload, rank: int = 0) -> None:
        self.zero, degree = zero, layout.tensor_parallel_degree
        split = SplitShape(degree=degree, **{each.name: getattr(shape, each.name) for each in fields(shape)})
        self.shares = Shares(shape=split, zero=zero, num_ranks=layout.shard_group_size, rank=rank // degree)
        self.state = state_of(self.shares, workload.compute_bytes)
        super().__init__(shape, layout, workload)
        self.gradients, self.own = self.stays[GRADIENTS], list(self.shares.parts)

    @property
    def stays(self) -> Counter[str]:
        """From step to step, where it counts."""
        return self.state.device if self.workload.on_cuda else self.state.device + self.state.host

    def state_bytes(self) -> tuple[int, int, int]:
        return self.stays[PARAMETERS], self.stays[GRADIENTS] + self.state.until_step[GRADIENTS], self.stays[OPTIMIZER]

    @cached_property
    def gathered(self) -> Gathered:
        """At stage 3, in an update and what goes before it."""
        workload = self.workload
        if self.zero.stage < 3 or self.shares.num_ranks == 1:
            return Gathered(Counter())
        num_forward = sum(each.num_rounds for each in workload.scorings if not each.stands_as)
        modules = Modules(shape=self.shares.shape, is_recomputed=workload.checkpointing != "none")
        num_passes = (num_forward * workload.num_microbatches, workload.num_microbatches)
        begins_forward = bool(workload.reference_pass_tokens or num_forward)
        return gathered_in_step(modules, self.zero, num_passes, begins_forward=begins_forward)

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
        until_step, stage = self.state.until_step, self.zero.stage
        with_gradients = self.held(self.gradients + until_step[GRADIENTS])
        if stage == 0:
            yield with_gradients | {REDUCED: GRADIENT_BYTES * min(self.shape.num_trained, UNSHARED_BUCKET)}
        elif until_step[BUFFERS]:
            yield with_gradients | {REDUCED: max(until_step[BUFFERS], GRADIENT_BYTES * self.shares.touched)}
        copies = stage and not self.zero.optimizer_on_host and not self.zero.adds_up_flat(self.workload.compute_bytes)
        copied = GRADIENT_BYTES * min(max(self.shares.parts), self.zero.sub_group_size) if copies else 0
        stepped = max(self.shares.parts) if stage else self.shares.largest
        made = 0 if self.workload.on_cuda else 2 * stepped * MASTER_BYTES
        yield with_gradients | {TEMPORARIES: copied + made}
