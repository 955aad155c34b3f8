"""Memory of a GPU by phase of a run: what is held, and what is alive besides at the worst moment.

Between steps a GPU holds its state (`state.py`). A forward and a backward pass are walked unit by unit as FSDP2 gathers
and frees them, with one block's and the head's own needs from `activations.py`. Sources, in PyTorch 2.13:

- `FSDPParamGroup.unshard` and `wait_for_unshard`: shards are cast into one flat buffer, gathered into another, and
  copied out into the parameters. In the forward pass the gather buffer lives until the next unit is copied out (so that
  the copy overlaps the next gather); in the backward pass it is freed at once, and the unit before is gathered ahead of
  its turn. A shard group of one casts or copies without gathering.
- The root unit is gathered before all others and freed after its forward; it is gathered again for the head's backward
  and stays to the end. Embeddings of their own are not gathered for the backward pass.
- `FSDPParamGroup.post_backward` and `foreach_reduce`: a unit's gradients, in the dtype that is computed in, are copied
  into the float32 input of a reduce-scatter, which lives until the next unit has its own; its output is the gradient.
  Root and embeddings are reduced last. Under HSDP all microbatches but the last keep that output and add to it; their
  last reduce-scatter's input is not freed before the next microbatch has its first.
- `torch.optim.AdamW` on a CPU works on one parameter after the other, with two temporaries of its size; fused, on CUDA,
  with none. OLMo-core's `SkipStepAdamW` updates all at once, with three temporaries of the size of all shards.
  Clipping scales gradients in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from open_instruct.planning.activations import FLOAT32, Pass, block_profile, head_profile, pass_of
from open_instruct.planning.model_shape import ModelShape, Unit
from open_instruct.planning.state import MASTER_BYTES, gathered_params, local_size, state_bytes, uses_muon
from open_instruct.planning.tape import Profile
from open_instruct.planning.workload import Workload
from open_instruct.records import ShardLayout

CUDA_BYTES = 3 * 2**29
"""An allowance, not a formula: the CUDA context, the workspaces of cuBLAS and the buffers of NCCL. 1.5 GiB."""
READ_CHUNK_BYTES = 8 * 2**20
"""`models.load.CHUNK_BYTES`, which cannot be imported without torch; a test holds the two equal."""
NUM_SYNC_SLOTS = 2
"""`rollout.weight_wire.NUM_SLOTS`; the same."""

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer states"
REFERENCE, ENGINE = "reference policy", "vLLM engine"
GATHERED, REDUCED = "gathered weights", "gradients on their way"
ACTIVATIONS, HEAD, TEMPORARIES = "activations", "head and logits", "temporaries"
BUFFERS, CUDA = "buffers", "CUDA and libraries"

Moment = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The worst moment of one phase: labels with their bytes, of what is not zero.

    Example::

        Phase(name="optimizer step", parts=(("parameters", 2**30), ("gradients", 2**30), ("optimizer states", 2**31)))
    """

    name: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.parts)


def memory_by_phase(shape: ModelShape, layout: ShardLayout, workload: Workload) -> tuple[Phase, ...]:
    """The phases of a run in their order, each at its worst moment on rank 0, which never needs less than another.

    A phase that the run does not have is left out. A step after the first is meant: optimizer states are there.
    """
    walk = _Walk(shape, layout, workload)
    moments: dict[str, Iterator[Moment]] = {"load": iter([walk.load()])}
    if workload.reference_pass_tokens:
        moments["reference pass"] = walk.reference_pass()
    moments |= {
        "forward": walk.forward(),
        "backward": walk.backward(),
        "optimizer step": iter([walk.optimizer_step()]),
    }
    if workload.num_engines:
        moments["weight sync"] = iter([walk.weight_sync()])
    moments["export"] = iter([walk.export()])
    return tuple(_phase(name, of_phase) for name, of_phase in moments.items())


def peak_phase(phases: Sequence[Phase]) -> Phase:
    """The phase that needs most."""
    return max(phases, key=lambda phase: phase.total_bytes)


def _phase(name: str, moments: Iterator[Moment]) -> Phase:
    worst = max(moments, key=lambda moment: sum(moment.values()))
    return Phase(name=name, parts=tuple((label, num_bytes) for label, num_bytes in worst.items() if num_bytes))


class _Walk:
    def __init__(self, shape: ModelShape, layout: ShardLayout, workload: Workload) -> None:
        self.shape, self.layout, self.workload = shape, layout, workload
        self.sizes: Pass = pass_of(layout, workload)
        self.block: Profile = _with_budget(shape, self.sizes, workload)
        self.head: Profile = head_profile(shape, self.sizes)
        self.c = workload.compute_bytes
        num_rows = -(-self.sizes.num_tokens // self.sizes.tensor_degree)
        self.stream_bytes = num_rows * shape.d_model * self.c
        self.parameters, self.gradients, self.optimizer = state_bytes(shape, layout, workload)
        self.root = shape.units[0]
        self.embeddings = None if shape.is_tied else shape.units[1]
        self.last_block = shape.units[-1]

    # What is there throughout.

    def _held(self, *, gradients: bool, optimizer: bool = True, reference: bool = True) -> dict[str, int]:
        has_resident_reference = self.workload.has_reference and self.workload.algorithm == "grpo" and reference
        engine = 0
        if self.workload.num_engines and self.layout.single_device:
            engine = self.shape.num_params * self.workload.sync_bytes_per_param + self.workload.kv_cache_bytes
        return {
            PARAMETERS: self.parameters,
            GRADIENTS: self.gradients if gradients else 0,
            OPTIMIZER: self.optimizer if optimizer else 0,
            REFERENCE: self.parameters if has_resident_reference else 0,
            ENGINE: engine,
            # Sine and cosine of every position, made once for all layers.
            BUFFERS: 2 * FLOAT32 * self.sizes.num_tokens * self.shape.head_dim,
            CUDA: CUDA_BYTES if self.workload.on_cuda else 0,
        }

    def _gathered(self, unit: Unit | None) -> int:
        """Bytes of a unit that was gathered, and of the buffer that it was gathered in."""
        if unit is None or self.layout.single_device:
            return 0
        return gathered_params(unit.parameters, self.layout) * self.c

    def _buffer(self, unit: Unit | None) -> int:
        return self._gathered(unit) if self.layout.shard_group_size > 1 else 0

    def _cast(self, unit: Unit | None) -> int:
        """The flat buffer of this rank's shards in the dtype that is gathered."""
        return 0 if self.c == MASTER_BYTES else self._gathered(unit) // self.layout.shard_group_size

    def _reduced(self, unit: Unit | None) -> int:
        """The float32 input of a unit's reduce-scatter."""
        if unit is None or self.layout.single_device:
            return 0
        return gathered_params(unit.parameters, self.layout) * FLOAT32

    def _weight_gradient_bytes(self, unit: Unit | None) -> int:
        """Of a unit whose backward has run and whose gradients are not reduced yet."""
        if unit is None or self.layout.single_device:
            return 0
        local = sum(local_size(parameter, self._whole_layout).own for parameter in unit.parameters)
        return local * self.c

    @property
    def _whole_layout(self) -> ShardLayout:
        """The same tensor ranks, without FSDP: shapes of gathered parameters, without padding."""
        tensor_degree = self.layout.tensor_parallel_degree
        return ShardLayout(
            gpus_per_node=(tensor_degree,), shard_degree=1, num_replicas=1, tensor_parallel_degree=tensor_degree
        )

    # The phases.

    def load(self) -> Moment:
        """`stream_load` holds a chunk of one tensor beside the shards; nothing else is there yet."""
        held = self._held(gradients=False, optimizer=False, reference=False)
        return held | {BUFFERS: READ_CHUNK_BYTES}

    def reference_pass(self) -> Iterator[Moment]:
        """DPO's, over the start weights before the optimizer has states, or GRPO's, before the first update."""
        is_grpo = self.workload.algorithm == "grpo"
        held = self._held(gradients=is_grpo, optimizer=is_grpo)
        yield from self._forward(held, keeps=False)

    def forward(self) -> Iterator[Moment]:
        held = self._held(gradients=self._accumulates)
        yield from self._forward(held | {REDUCED: self._left_over()}, keeps=True)

    def _left_over(self) -> int:
        """The last reduce-scatter's input of a microbatch that another follows lives until that one's first."""
        return self._reduced(self.embeddings or self.root) if self._accumulates else 0

    @property
    def _accumulates(self) -> bool:
        """Whether gradients of an earlier microbatch are there when the worst one runs."""
        return self.workload.num_microbatches > 1

    def _forward(self, held: dict[str, int], *, keeps: bool) -> Iterator[Moment]:
        root = self._gathered(self.root)
        block_peak = self.block.forward_peak if keeps else self.block.scoring_peak
        head_peak = self.head.forward_peak if keeps else self.head.scoring_peak
        kept_by_block = self._kept_by_block if keeps else 0
        # Embeddings: while they are gathered, while they are looked up.
        before = self.root
        if self.embeddings is not None:
            yield held | {GATHERED: root + self._gathering(self.embeddings, self.root)}
            yield held | {
                GATHERED: root + self._buffer(self.embeddings) + self._gathered(self.embeddings),
                TEMPORARIES: self.stream_bytes,
            }
            before = self.embeddings
        # Blocks need the same each, on top of what those before it kept: the first, second and last suffice.
        for layer in sorted({0, min(1, self.shape.num_layers - 1), self.shape.num_layers - 1}):
            activations = layer * kept_by_block
            previous = before if layer == 0 else self.last_block
            yield held | {
                GATHERED: root + self._gathering(self.last_block, previous),
                ACTIVATIONS: activations,
                TEMPORARIES: self.stream_bytes,
            }
            yield held | {
                GATHERED: root + self._buffer(self.last_block) + self._gathered(self.last_block),
                ACTIVATIONS: activations + block_peak.activations,
                TEMPORARIES: block_peak.temporaries + self.stream_bytes,
            }
        yield held | {
            GATHERED: root + self._buffer(self.last_block),
            ACTIVATIONS: self.shape.num_layers * kept_by_block,
            HEAD: head_peak.total,
            TEMPORARIES: self.stream_bytes,
        }

    def _gathering(self, unit: Unit, previous: Unit) -> int:
        """While `unit` is gathered the buffer of the one before is still there; when it is copied out, that is gone."""
        while_gathered = self._buffer(previous) + self._cast(unit) + self._buffer(unit)
        while_copied = self._buffer(unit) + self._gathered(unit)
        return max(while_gathered, while_copied)

    @property
    def _kept_by_block(self) -> int:
        return self.block.kept_bytes + (self.stream_bytes if self._keeps_stream else 0)

    @property
    def _keeps_stream(self) -> bool:
        return self.block.keeps_source

    def backward(self) -> Iterator[Moment]:
        held = self._held(gradients=self._accumulates)
        left_over = {REDUCED: self._left_over()}
        root, num_layers = self._gathered(self.root), self.shape.num_layers
        block, kept = self.last_block, num_layers * self._kept_by_block
        head_kept = self.head.kept_bytes + (self.stream_bytes if self.head.keeps_source else 0)
        yield (
            held
            | left_over
            | {
                GATHERED: root + self._buffer(self.root) + self._cast(self.root),
                ACTIVATIONS: kept,
                HEAD: head_kept,
            }
        )
        yield (
            held
            | left_over
            | {
                GATHERED: root + self._buffer(block) + self._cast(block),
                ACTIVATIONS: kept,
                HEAD: self.head.backward_peak.total + head_kept - self.head.kept_bytes,
            }
        )
        # The matrix of the head has its gradient from here on, until the root is reduced in the end.
        root_gradients = self._unless_single(self.head.weight_gradient_bytes)
        for layer in reversed(range(num_layers)):
            if layer not in (0, 1, num_layers - 2, num_layers - 1):
                continue
            reduced_bytes = self._left_over() if layer == num_layers - 1 else self._reduced(block)
            prefetched = self._buffer(block) + self._cast(block) if layer else 0
            new_gradients = self._new_gradients(num_layers - 1 - layer)
            below = layer * self._kept_by_block + (self.stream_bytes if self._keeps_stream else 0)
            peak = self.block.backward_peak
            yield (
                held
                | self._plus(held, new_gradients)
                | {
                    GATHERED: root + self._gathered(block) + prefetched,
                    REDUCED: root_gradients + reduced_bytes + self._unless_single(peak.weight_gradients),
                    ACTIVATIONS: below + peak.activations,
                    TEMPORARIES: peak.temporaries + self._unless_single(0, peak.weight_gradients),
                }
            )
            yield (
                held
                | self._plus(held, new_gradients + self._shard(block))
                | {
                    GATHERED: root + prefetched,
                    REDUCED: root_gradients + self._weight_gradient_bytes(block) + self._reduced(block),
                    ACTIVATIONS: layer * self._kept_by_block,
                    TEMPORARIES: self.stream_bytes,
                }
            )
        new_gradients = self._new_gradients(num_layers)
        embedding_gradients = self._weight_gradient_bytes(self.embeddings or self.root)
        yield (
            held
            | self._plus(held, new_gradients)
            | {
                GATHERED: root,
                REDUCED: root_gradients + self._reduced(block) + embedding_gradients,
                TEMPORARIES: self.stream_bytes,
            }
        )
        # The embeddings' own gradient waits while the root, in which they may be, is reduced.
        waiting = self._weight_gradient_bytes(self.embeddings)
        yield (
            held
            | self._plus(held, new_gradients + self._shard(self.root))
            | {REDUCED: waiting + self._weight_gradient_bytes(self.root) + self._reduced(self.root)}
        )
        yield (
            held
            | self._plus(held, new_gradients + self._shard(self.root) + self._shard(self.embeddings))
            | {REDUCED: waiting + self._reduced(self.embeddings)}
        )

    def _unless_single(self, num_bytes: int, otherwise: int = 0) -> int:
        """Without FSDP there is no gradient beside the one that the optimizer reads."""
        return otherwise if self.layout.single_device else num_bytes

    def _shard(self, unit: Unit | None) -> int:
        """Bytes of a unit's reduced gradient."""
        if unit is None:
            return 0
        if self.layout.single_device:
            return sum(parameter.num_params for parameter in unit.parameters) * self.c
        return sum(local_size(parameter, self.layout).padded for parameter in unit.parameters) * MASTER_BYTES

    def _new_gradients(self, num_blocks: int) -> int:
        """Reduced gradients of the blocks whose backward has run. Earlier microbatches' are there already."""
        return 0 if self._accumulates else num_blocks * self._shard(self.last_block)

    def _plus(self, held: Moment, num_bytes: int) -> dict[str, int]:
        return {GRADIENTS: held[GRADIENTS] + num_bytes}

    def optimizer_step(self) -> Moment:
        return self._held(gradients=True) | {TEMPORARIES: self._step_temporaries()}

    def _step_temporaries(self) -> int:
        own = [local_size(parameter, self.layout).own for parameter in self.shape.parameters]
        number_bytes = self.c if self.layout.single_device else MASTER_BYTES
        if self.workload.optimizer == "skip_step_adamw":
            return 3 * sum(own) * number_bytes
        if self.workload.optimizer == "muon":
            # A matrix is gathered for its orthogonalisation, in bfloat16: itself, two products and the next iterate.
            whole = [p.num_params for p in self.shape.parameters if uses_muon(p, self.workload)]
            return 4 * 2 * max(whole, default=0)
        return 0 if self.workload.on_cuda else 2 * max(own) * number_bytes

    def weight_sync(self) -> Moment:
        """Buckets of whole tensors, twice: one is filled while another travels; of each a rank has its own part.

        Source: `WeightManifest` and `PartBroadcaster`. Over shared memory of the host nothing more is on a GPU; where
        learner and engine share one (ipc), the slots hold whole buckets.
        """
        held = self._held(gradients=True)
        if self.workload.sync_backend == "shm":
            return held
        largest = max(num_bytes for num_bytes in self._bucket_parts())
        return held | {BUFFERS: held[BUFFERS] + NUM_SYNC_SLOTS * largest}

    def _bucket_parts(self) -> Iterator[int]:
        """Bytes that rank 0 brings of each bucket."""
        bucket_bytes = own_bytes = 0
        for parameter in self.shape.parameters:
            num_bytes = parameter.num_params * self.workload.sync_bytes_per_param
            if bucket_bytes and bucket_bytes + num_bytes > self.workload.sync_bucket_bytes:
                yield own_bytes
                bucket_bytes = own_bytes = 0
            bucket_bytes += num_bytes
            own_bytes += local_size(parameter, self.layout).own * self.workload.sync_bytes_per_param
        yield own_bytes

    def export(self) -> Moment:
        """`deliver` brings one tensor together at a time, cast already, on the CPU of its owner.

        On the GPU are the parts that arrive, and those sent to other owners: together less than the tensor twice. A
        run on CPUs has a tensor that is written besides.
        """
        largest = (
            max(parameter.num_params for parameter in self.shape.parameters) * self.workload.export_bytes_per_param
        )
        held = self._held(gradients=True)
        return held | {BUFFERS: held[BUFFERS] + (2 if self.workload.on_cuda else 3) * largest}


def _with_budget(shape: ModelShape, sizes: Pass, workload: Workload) -> Profile:
    """One block's profile. A memory budget keeps that share of what a block would keep beyond its input.

    Source: `torch._functorch.config.activation_memory_budget`: 0 is recomputing everything, 1 keeping everything.
    """
    profile = block_profile(shape, sizes)
    if workload.activation_memory_budget >= 1.0:
        return profile
    kept_bytes = round(profile.kept_bytes * workload.activation_memory_budget)
    return replace(profile, kept_bytes=kept_bytes, keeps_source=True)
