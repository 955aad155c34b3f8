"""A forward and a backward pass over sharded units: the memory alive at the worst moments.

Units are gathered and freed as FSDP2 does it; one block's and the head's own needs are
`activations.py`'s. Sources, in PyTorch 2.13:

- `FSDPParamGroup.unshard` and `wait_for_unshard`: shards are cast into one flat buffer, gathered
  into another, and copied out into the parameters. In the forward pass the gather buffer lives
  until the next unit is copied out (so that the copy overlaps the next gather); in the backward
  pass it is freed at once, and the unit before is gathered ahead of its turn. A shard group of one
  casts or copies without gathering. Forward, `set_modules_to_forward_prefetch` has the buffers of
  the next blocks filled while one is at work (`--fsdp_prefetch_factor`).
- The root unit is gathered before all others and freed after its forward; it is gathered again for
  the head's backward and stays to the end. Embeddings of their own are not gathered for the
  backward pass.
- `FSDPParamGroup.post_backward` and `foreach_reduce`: a unit's gradients, in the dtype that is
  computed in, are copied into the float32 input of a reduce-scatter, which lives until the next
  unit has its own; its output is the gradient. Root and embeddings are reduced last. Under HSDP all
  microbatches but the last keep that output and add to it; their last reduce-scatter's input is not
  freed before the next microbatch has its first.
- Where only the last microbatch reduces, those before add their gradients to whole ones in float32
  (`FSDPParam.to_accumulated_grad_if_needed`), of which each unit's are freed when it is reduced.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod

from open_instruct.core.shard_layout import ShardLayout
from open_instruct.planning.memory.activations import profile_piece
from open_instruct.planning.memory.autograd_sizes import Profile, Usage
from open_instruct.planning.memory.parts import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    HEAD,
    REDUCED,
    SCRATCH,
    TEMPORARIES,
    Moment,
)
from open_instruct.planning.memory.piece import FLOAT32
from open_instruct.planning.memory.state import (
    MASTER_BYTES,
    gathered_bytes,
    gathered_shape,
    local_size,
)
from open_instruct.planning.subject.model import ModelShape, Unit
from open_instruct.planning.subject.workload import Workload


class Passes:
    """Memory of both passes by moment, beside the constant state.

    Without FSDP nothing is gathered or reduced.
    """

    splits_rows = True  # between matrices that tensor ranks split

    def __init__(self, shape: ModelShape, layout: ShardLayout, workload: Workload) -> None:
        self.shape = shape
        self.layout = layout
        self.workload = workload
        self.root, self.embeddings, *block_units = shape.units
        profile = partial(
            profile_piece,
            shape=shape,
            layout=layout,
            workload=workload,
            splits_rows=self.splits_rows,
        )
        self.head = profile(None)
        units = {unit.kind: unit for unit in block_units}
        profiles = {kind: _apply_budget(profile(kind), workload) for kind in units}
        kinds = [layer.kind for layer in shape.layers]
        self.blocks = [units[kind] for kind in kinds]
        self.profiles = [profiles[kind] for kind in kinds]
        self.head_gradient = self.head.backward[-1].weight_gradients
        self.item_bytes = workload.compute_bytes
        self.is_sharded = not layout.single_device
        # Of the trained parameters.
        self.has_copy = layout.single_device and self.item_bytes < MASTER_BYTES
        self.stream_bytes = self.head.source_bytes
        self.kept_by_blocks: list[int] = []
        for block_profile in self.profiles:
            kept_bytes = block_profile.kept_bytes + self._kept_input_bytes(block_profile)
            self.kept_by_blocks.append(kept_bytes)
        self.kept_before = [*accumulate(self.kept_by_blocks, initial=0)]
        self.offloads = workload.checkpointing == "offload" and workload.on_cuda
        self.embedding_unit = self.root if shape.is_tied else self.embeddings
        self.reduced_last = self.embedding_unit
        if shape.adapters is not None:
            self.reduced_last = self.blocks[0]
        # Sizes that every moment needs, by unit.
        self.gathered: dict[str, int] = {}
        self.reduced: dict[str, int] = {}
        self.shards: dict[str, int] = {}
        for unit in shape.units:
            self.gathered[unit.name] = gathered_bytes(unit.parameters, layout, self.item_bytes)
            self.reduced[unit.name] = gathered_bytes(unit.trained, layout, FLOAT32)
            self.shards[unit.name] = self._shard_bytes(unit)
        # Gradients of an earlier microbatch are alive in a later one; `adds_up`: whole ones, not
        # shards.
        self.accumulates = workload.num_microbatches > 1
        self.adds_up = self.accumulates and workload.reduces_last and self.is_sharded

    def accumulated_bytes(self, shards: int) -> int:
        """Bytes of the gradients of earlier microbatches; `shards` are their bytes once reduced."""
        if self.adds_up:
            whole_bytes = 0
            for unit in self.shape.units:
                whole_bytes += unit.count * self._gradient_bytes(unit)
            return whole_bytes * FLOAT32 // self.item_bytes
        if self.accumulates:
            return shards
        return 0

    def forward(
        self, resident: Moment, *, keeps: bool = True, runs_head: bool = True
    ) -> Iterator[Moment]:
        """The moments of a forward pass; without `keeps` no backward pass follows."""
        root = self._gathered_bytes(self.root)
        now = dict(resident)
        now[REDUCED] = 0
        if keeps:
            now[REDUCED] = self._left_over_bytes()
        looked_up = self._cast_bytes(self.embeddings) + self._buffer_bytes(self.embeddings)
        gathered_bytes = root + self._buffer_bytes(self.root) + looked_up
        yield {**now, GATHERED: gathered_bytes}
        now[TEMPORARIES] = self.stream_bytes
        # A block's memory comes beside what those before it keep, and what those after it are
        # gathered in.
        num_ahead = self.workload.gathered_ahead
        for layer, block in enumerate(self.blocks):
            peak = self.profiles[layer].find_forward_peak(keeps=keeps)
            filled_ahead = self.blocks[layer : layer + 1 + num_ahead]
            buffers = sum(self._buffer_bytes(each) for each in filled_ahead)
            activations = peak.activations
            if keeps:
                activations += self._kept_bytes(layer)
            yield {
                **now,
                GATHERED: root + buffers + self._gathered_bytes(block),
                ACTIVATIONS: activations,
                TEMPORARIES: peak.temporaries + self.stream_bytes,
            }
        now[GATHERED] = root + self._buffer_bytes(self.blocks[-1])
        now[ACTIVATIONS] = 0
        if keeps:
            now[ACTIVATIONS] = self._kept_bytes(len(self.blocks))
        now[HEAD] = 0
        if runs_head:
            now[HEAD] = sum(self.head.find_forward_peak(keeps=keeps))
        yield now

    def backward(self, resident: Moment) -> Iterator[Moment]:
        """The moments of a backward pass: head, blocks from the last on, embeddings and root."""
        root = self._gathered_bytes(self.root)
        yield from self._through_head(resident)

        # Blocks, the last first. The gradient of the head's matrix waits for the root to be reduced
        # in the end.
        waiting = self._unreduced_bytes(self.head_gradient)
        gradients = resident[GRADIENTS]
        if not self.accumulates:
            gradients += self._in_place_bytes(self.head_gradient)
        # The whole gradients of a unit are freed once they are copied into the input of its
        # reduce-scatter, whose output comes on top. The matrix of a score is a unit of its own,
        # which is reduced before the blocks.
        reduced = 0
        if not self.shape.scores:
            reduced = self._left_over_bytes()
        for layer in reversed(range(len(self.blocks))):
            block = self.blocks[layer]
            peak = self.profiles[layer].backward_peak
            gathered_bytes = root + self._gathered_bytes(block)
            if layer > 0:
                gathered_bytes += self._prefetched_bytes(self.blocks[layer - 1])
            yield {
                **self._in_block({**resident, GRADIENTS: gradients}, layer, peak),
                GATHERED: gathered_bytes,
                REDUCED: waiting + reduced + self._unreduced_bytes(peak.weight_gradients),
                TEMPORARIES: peak.temporaries + self._in_place_bytes(peak.weight_gradients),
            }
            reduced = self._reduce_input_bytes(block)
            if self.adds_up:
                reduced = self.shards[block.name]
            if not self.accumulates:
                gradients += self.shards[block.name]

        # The embeddings; then the root is reduced, and they last where they are a unit.
        looked_up = self._gradient_bytes(self.embedding_unit)
        after_blocks = {**resident, GRADIENTS: gradients}
        reduced_bytes = waiting + reduced + self._unreduced_bytes(looked_up)
        temporaries = self.stream_bytes + self._in_place_bytes(looked_up)
        if self.has_copy:
            temporaries += looked_up
        yield {**after_blocks, GATHERED: root, REDUCED: reduced_bytes, TEMPORARIES: temporaries}
        if not self.is_sharded:
            return
        unreduced_bytes = self._gradient_bytes(self.root) + self._gradient_bytes(self.embeddings)
        if self.adds_up:
            for block in self.blocks:
                whole_bytes = self._gradient_bytes(block) * FLOAT32 // self.item_bytes
                gradients += self.shards[block.name] - whole_bytes
        for unit in (self.root, self.embeddings):
            if not self.accumulates:
                gradients += self.shards[unit.name]
            reduced_bytes = unreduced_bytes + self._reduce_input_bytes(unit)
            yield {**after_blocks, GRADIENTS: gradients, REDUCED: reduced_bytes}
            unreduced_bytes -= self._gradient_bytes(unit)

    def _through_head(self, resident: Moment) -> Iterator[Moment]:
        """The moments of the head's backward pass."""
        root = self._gathered_bytes(self.root)
        head_stream = self._kept_input_bytes(self.head)
        now = dict(resident)
        now[REDUCED] = self._left_over_bytes()
        now[ACTIVATIONS] = self._kept_bytes(len(self.blocks))
        now[GATHERED] = root + self._prefetched_bytes(self.root)
        now[HEAD] = self.head.kept_bytes + head_stream
        yield dict(now)
        now[GATHERED] = root + self._prefetched_bytes(self.blocks[-1])
        worst_bytes = sum(self.head.backward_peak) + self._growth_bytes(self.head_gradient)
        now[HEAD] = worst_bytes + head_stream
        yield now

    def _in_block(self, resident: Moment, layer: int, usage: Usage) -> Moment:
        """A moment of a block's backward pass, but for weights and their gradients."""
        kept_bytes = self._kept_bytes(layer) + self._kept_input_bytes(self.profiles[layer])
        return {
            **resident,
            ACTIVATIONS: kept_bytes + usage.activations,
            TEMPORARIES: usage.temporaries,
            SCRATCH: resident[SCRATCH] + usage.kernels,
        }

    def _kept_input_bytes(self, piece: Profile) -> int:
        """Bytes of the input of a block or of the head, where that is kept."""
        if piece.keeps_source:
            return self.stream_bytes
        return 0

    def _kept_bytes(self, num_blocks: int) -> int:
        """Bytes that the first blocks keep on the device: one input, where others are offloaded."""
        if self.offloads and num_blocks:
            return self.kept_by_blocks[num_blocks - 1]
        return self.kept_before[num_blocks]

    # Sizes of a unit.

    def _gathered_bytes(self, unit: Unit) -> int:
        """Bytes of a unit's gathered parameters, and of the buffer that they are gathered in."""
        if self.is_sharded:
            return self.gathered[unit.name]
        return 0

    def _buffer_bytes(self, unit: Unit) -> int:
        """Bytes of the buffer that a unit is gathered into; a shard group of one has none."""
        if self.layout.shard_group_size > 1:
            return self._gathered_bytes(unit)
        return 0

    def _cast_bytes(self, unit: Unit) -> int:
        """The flat buffer of this rank's shards in the dtype that is gathered."""
        if self.item_bytes == MASTER_BYTES:
            return 0
        num_values = self._reduce_input_bytes(unit) // FLOAT32
        return num_values * self.item_bytes // self.layout.shard_group_size

    def _prefetched_bytes(self, unit: Unit) -> int:
        """Bytes of a unit that is gathered ahead of its turn in the backward pass."""
        return self._buffer_bytes(unit) + self._cast_bytes(unit)

    def _reduce_input_bytes(self, unit: Unit) -> int:
        """Bytes of the float32 input of a unit's reduce-scatter."""
        if self.is_sharded:
            return self.reduced[unit.name]
        return 0

    def _left_over_bytes(self) -> int:
        """Bytes of the input of the previous microbatch's last reduce-scatter."""
        if self.accumulates and not self.adds_up:
            return self._reduce_input_bytes(self.reduced_last)
        return 0

    def _gradient_bytes(self, unit: Unit) -> int:
        """Bytes of a unit's gradients in backward: a tensor rank's parts, without padding."""
        num_values = 0
        for parameter in unit.trained:
            num_values += prod(gathered_shape(parameter, self.layout))
        return num_values * self.item_bytes

    def _unreduced_bytes(self, num_bytes: int) -> int:
        """Bytes of gradients before their reduction; 0 without FSDP, which reduces none."""
        if self.is_sharded:
            return num_bytes
        return 0

    def _growth_bytes(self, num_bytes: int) -> int:
        """Bytes by which gradients grow on their way from the compute copy to the float32 masters.

        0 after a first microbatch, whose gradients are there already and take them in.
        """
        if self.accumulates or not self.has_copy:
            return 0
        return num_bytes * (MASTER_BYTES - self.item_bytes) // self.item_bytes

    def _in_place_bytes(self, num_bytes: int) -> int:
        """Bytes of gradients that the optimizer reads unreduced: all without FSDP, 0 with it."""
        if self.is_sharded:
            return 0
        return num_bytes + self._growth_bytes(num_bytes)

    def _shard_bytes(self, unit: Unit) -> int:
        """Bytes of a unit's reduced gradients, which the optimizer reads."""
        num_values = 0
        for parameter in unit.trained:
            num_values += local_size(parameter, self.layout).padded
        return num_values * MASTER_BYTES


def _apply_budget(block: Profile, workload: Workload) -> Profile:
    """The profile of a block that keeps its input and a share (the budget) of the rest.

    Source: `torch._functorch.config.activation_memory_budget`: 0 is recomputing everything, 1
    keeping everything.
    """
    if workload.activation_memory_budget >= 1.0:
        return block
    return replace(
        block,
        kept_bytes=round(block.kept_bytes * workload.activation_memory_budget),
        keeps_source=True,
    )
