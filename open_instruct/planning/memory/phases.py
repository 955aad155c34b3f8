"""The memory of a GPU in each phase of a run: the held state, and the rest that is alive at the
worst moment.

Between steps a GPU holds its state (`state.py`); a forward and a backward pass add what
`forward_backward.py` says. Sources of the rest:

- `models/load.py` reads a chunk of one tensor at a time; `models/export.py` and
  `weight_sync/manifest.py` are those of the export and of the weight sync, and
  `models/lora/adapters.py` of adapters that are added for both: the first half of each is whole,
  and a rank's part of one matrix is there in float32, without its adapter and with it.
- `torch.optim.AdamW` is fused and has none. That of Muon works on one parameter after the other,
  with two temporaries of its size. 8-bit AdamW has six of a chunk. OLMo-core's `SkipStepAdamW`
  updates all at once, with three temporaries of the size of all shards. Clipping scales gradients
  in place. Gradients are freed at the start of the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from open_instruct.core.shard_layout import ShardLayout
from open_instruct.planning.memory import state
from open_instruct.planning.memory.forward_backward import (
    GRADIENTS,
    SCRATCH,
    TEMPORARIES,
    Moment,
    Passes,
)
from open_instruct.planning.memory.piece import FLOAT32
from open_instruct.planning.memory.scratch import BLOCK_BYTES, CUBLAS_BYTES, library_bytes
from open_instruct.planning.subject.model import ModelShape, ParameterShape
from open_instruct.planning.subject.workload import Scoring, Workload

# `models.load.CHUNK_BYTES`, which cannot be imported without torch; a test holds the two equal.
READ_CHUNK_BYTES = 8 * 2**20
# `weights.way.NUM_SLOTS`; the same.
NUM_SYNC_SLOTS = 2

PARAMETERS, OPTIMIZER = "parameters", "optimizer states"
POLICY, CRITIC = "policy", "critic"  # the one that is at rest
ENGINE, BUFFERS, CUDA = "vLLM engine", "buffers", "CUDA and libraries"
INPUTS, CHECKPOINT = "inputs of blocks", "a copy to write checkpoints from"
SENT = "weights as engines have them, to find what has changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The worst moment of one phase: labels with their bytes, without those of 0 bytes.

    Example::

        Phase(name="optimizer step", parts=(("parameters", 2**30), ("gradients", 2**30),
              ("optimizer states", 2**31)))
    """

    name: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedShard:
    """A rank's shard of a trained parameter, of which `count` are alike."""

    count: int
    num_values: int
    moment_bytes: tuple[int, ...]  # of each tensor of the optimizer's moments

    @property
    def weight_bytes(self) -> int:
        """Bytes of the shard in float32, and of its gradient."""
        return self.num_values * state.MASTER_BYTES


def memory_by_phase(run: Moments) -> tuple[Phase, ...]:
    """The phases of a run in their order, each at its worst moment on rank 0, which never needs
    less than another.

    A phase that the run does not have is left out. A step after the first is meant: optimizer
    states are there.
    """
    workload = run.workload
    # `stream_load` holds a chunk of one tensor beside the shards; nothing else is there yet.
    loading = run.held(0, is_training=False) | {BUFFERS: READ_CHUNK_BYTES}
    moments: dict[str, Iterable[Moment]] = {"load": [loading]}
    if workload.reference_pass_tokens:
        moments["reference pass"] = run.reference_pass()
    if workload.scorings:
        moments["scoring pass"] = run.scoring_pass()
    if run.critic:
        moments["critic"] = run.critic.learning()
    during_step = run.held(run.passes.accumulated(run.gradients))
    moments |= {
        "forward": run.passes.forward(during_step),
        "backward": run.passes.backward(during_step),
        "optimizer step": run.step(),
    }
    if workload.num_engines:
        moments["weight sync"] = [run.weight_sync()]
    moments["export"] = [run.export()]
    return tuple(phase_of(name, phase_moments) for name, phase_moments in moments.items())


def pinned(num_bytes: int) -> int:
    """Host memory of a pinned tensor in PyTorch's allocator: the next power of two
    (`CachingHostAllocator.h`).
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def phase_of(name: str, moments: Iterable[Moment]) -> Phase:
    """The phase `name`, at the worst of its moments."""
    worst = max(moments, key=lambda moment: sum(moment.values()))
    return Phase(
        name=name,
        parts=tuple((label, num_bytes) for label, num_bytes in worst.items() if num_bytes),
    )


class Moments:
    """The worst moments of the phases, in bytes by label, where FSDP2 shards."""

    buffer_bytes = 0  # of the library that shards, from step to step
    kept_gradients = 0  # bytes of gradients that stay when a step is over

    def __init__(self, shape: ModelShape, layout: ShardLayout, workload: Workload) -> None:
        self.shape, self.layout, self.workload = shape, layout, workload
        self.critic = (
            self.beside(workload.critic.shape, workload.of_critic) if workload.critic else None
        )
        self.other: Moments | None = self.critic  # a model that is at rest while this one works
        if self.critic:
            self.critic.other = self
        self.passes = self.passes_over(self.workload)
        self.parameters, self.gradients, self.optimizer = self.state_bytes()
        # Gradients once all are reduced.
        self.stepped = 0 if workload.has_weights_on_host else self.gradients

    @cached_property
    def trained_shards(self) -> list[TrainedShard]:
        """This rank's shards of the trained parameters, those of blocks that are alike once."""
        shards = []
        for unit in self.shape.units:
            for parameter in unit.trained:
                num_values = self.shard_size(parameter)
                moment_bytes = state.moment_bytes(parameter, num_values, self.layout, self.workload)
                shards.append(
                    TrainedShard(count=unit.count, num_values=num_values, moment_bytes=moment_bytes)
                )
        return shards

    @property
    def num_trained_values(self) -> int:
        """Values of all trained parameters together that this rank has."""
        return sum(shard.count * shard.num_values for shard in self.trained_shards)

    def shard_size(self, parameter: ParameterShape) -> int:
        """Values of a parameter that this rank has."""
        return state.local_size(parameter, self.layout).own

    def beside(self, shape: ModelShape, workload: Workload) -> Moments:
        """The memory of another model that is trained in the same run."""
        return Moments(shape, self.layout, workload)

    def learning(self) -> Iterator[Moment]:
        """All moments of a model's part of a step: it scores, learns, and takes its own step."""
        yield from self.scoring_pass()
        held = self.held(self.passes.accumulated(self.gradients))
        yield from self.passes.forward(held)
        yield from self.passes.backward(held)
        yield from self.step()

    def state_bytes(self) -> tuple[int, int, int]:
        """Parameters, gradients and optimizer states: what is there from step to step, but for the
        gradients.
        """
        parameters, gradients, optimizer = state.state_bytes(self.shape, self.layout, self.workload)
        if self.workload.has_weights_on_host:
            return 0, gradients, 0
        return parameters, gradients, 0 if self.workload.has_moments_on_host else optimizer

    def passes_over(self, workload: Workload) -> Passes:
        """The passes of the policy."""
        return Passes(self.shape, self.layout, workload)

    def on_host(self) -> dict[str, int]:
        """Bytes in the host's memory: state, inputs of all blocks, copies for checkpoints and for
        weight syncs.
        """
        frozen = [
            each
            for each in self.workload.scorings
            if each.stands_as and self.workload.has_weights_on_host
        ]
        beside = {each.stands_as: self._pinned_weights(each.shape) for each in frozen}
        offloaded = self.passes.kept_by_blocks if self.passes.offloads else []
        copies = self.copies() if self.workload.on_cuda else {}
        return {**self.state_on_host(), **beside, INPUTS: sum(map(pinned, offloaded)), **copies}

    def state_on_host(self) -> dict[str, int]:
        """What `state_bytes` leaves out, and gradients on which the host steps."""
        workload = self.workload
        has_moments = workload.has_moments_on_host or workload.has_weights_on_host
        optimizer = state.state_bytes(self.shape, self.layout, workload)[2] if has_moments else 0
        if not workload.has_weights_on_host:
            return {OPTIMIZER: optimizer}
        gradients = sum(shard.count * pinned(shard.weight_bytes) for shard in self.trained_shards)
        return {
            PARAMETERS: self._pinned_weights(self.shape),
            GRADIENTS: gradients,
            OPTIMIZER: optimizer,
        }

    def _pinned_weights(self, shape: ModelShape) -> int:
        """Bytes of a model's shards where each is pinned by itself."""
        item_bytes = {True: state.MASTER_BYTES, False: self.workload.compute_bytes}
        total_bytes = 0
        for unit in shape.units:
            for parameter in unit.parameters:
                num_values = state.local_size(parameter, self.layout).padded
                sizes = parameter.bytes_of(num_values, item_bytes[parameter.is_trained])
                total_bytes += unit.count * sum(map(pinned, sizes))
        return total_bytes

    def step(self) -> Iterable[Moment]:
        """The moments of the optimizer step."""
        yield self.held(self.stepped) | {TEMPORARIES: self.step_temporaries()}

    def held(self, gradients: int, *, is_training: bool = True) -> dict[str, int]:
        """The memory held throughout a phase; before training without optimizer states and frozen
        models.
        """
        held = self.held_alone(gradients, is_training=is_training)
        if self.other is None:
            return held
        at_rest = self.other.held_alone(
            self.other.kept_gradients if is_training else 0, is_training=is_training
        )
        num_bytes = sum(size for part, size in at_rest.items() if part not in (SCRATCH, CUDA))
        of_libraries = max(held[CUDA], at_rest[CUDA])  # of both models and the engines
        return held | {POLICY if self.critic is None else CRITIC: num_bytes, CUDA: of_libraries}

    def held_alone(self, gradients: int, *, is_training: bool) -> dict[str, int]:
        """`held` without a model that is at rest."""
        frozen = [each for each in self.workload.scorings if each.stands_as and is_training]
        engine = (
            self.shape.num_params * self.workload.sync_bytes_per_param
            + self.workload.kv_cache_bytes
        )
        return {
            PARAMETERS: self.parameters,
            GRADIENTS: gradients,
            OPTIMIZER: self.optimizer if is_training else 0,
            **{each.stands_as: self._frozen_bytes(each) for each in frozen},
            ENGINE: engine if self.workload.shares_device else 0,
            BUFFERS: self._rope_bytes()
            + self.buffer_bytes
            + (0 if self.workload.on_cuda or not is_training else sum(self.copies().values())),
            SCRATCH: self.scratch_bytes if self.workload.on_cuda else 0,
            CUDA: self.library_bytes if self.workload.on_cuda else 0,
        }

    @cached_property
    def scratch_bytes(self) -> int:
        """Bytes of cuBLAS, and those by which weights, gradients and moments are rounded up."""
        if self.workload.has_weights_on_host:
            return CUBLAS_BYTES
        rounding_bytes = 0
        for shard in self.trained_shards:
            sizes = [shard.weight_bytes, shard.weight_bytes]  # and its gradient
            if not self.workload.has_moments_on_host:
                sizes += shard.moment_bytes
            rounding_bytes += shard.count * sum(-size % BLOCK_BYTES for size in sizes)
        return CUBLAS_BYTES + rounding_bytes

    @cached_property
    def library_bytes(self) -> int:
        sends_weights = self.workload.num_engines > 0 and self.workload.sync_backend == "nccl"
        return library_bytes(
            self.layout, sends_weights=sends_weights, num_trained=1 if self.critic is None else 2
        )

    def checkpoint_copy(self) -> int:
        """Bytes of the host copy that asynchronous checkpoints are written from; it is kept between
        checkpoints.

        Replicas divide the copy among them. Beside a GPU each tensor is pinned by itself.
        """
        if not self.workload.copies_checkpoints:
            return 0
        num_models = 1 + sum(each.moves for each in self.workload.scorings)
        if self.workload.on_cuda:
            copied = sum(
                shard.count
                * (num_models * pinned(shard.weight_bytes) + sum(map(pinned, shard.moment_bytes)))
                for shard in self.trained_shards
            )
        else:
            copied = num_models * self.num_trained_values * state.MASTER_BYTES + self.optimizer
        # Of experts that are split no replica has another's part.
        num_writers = 1 if self.layout.expert_parallel_degree > 1 else self.layout.num_replicas
        return copied // num_writers

    def copies(self) -> dict[str, int]:
        """Bytes that a process keeps in its host's memory beside a GPU's, and in its own without
        one.

        Of a weight sync by changes (`SentParts`) they are a rank's part as engines have it, pinned
        beside a GPU, of one bucket what changed, and messages about as many buckets as there are
        slots and one more, at most.
        """
        is_delta = self.workload.sync_choice[0] == "delta"
        own = (
            [each for each, _ in state.sync_buckets(self.shape, self.layout, self.workload)]
            if is_delta
            else [0]
        )
        kept = sum(map(pinned if self.workload.on_cuda else int, own))
        return {CHECKPOINT: self.checkpoint_copy(), SENT: kept + (NUM_SYNC_SLOTS + 2) * max(own)}

    def _frozen_bytes(self, frozen: Scoring) -> int:
        """Bytes of a frozen model: sharded as the policy is; on a single device in --param_dtype
        alone.
        """
        shape, num_bytes = frozen.shape, self.workload.compute_bytes
        if self.layout.single_device:
            return shape.num_params * num_bytes
        head_bytes = 0 if frozen.num_values else shape.vocab_size * shape.d_model * num_bytes
        shards = (
            0
            if self.workload.has_weights_on_host
            else state.state_bytes(shape, self.layout, self.workload)[0]
        )
        return shards + head_bytes

    def _rope_bytes(self) -> int:
        """Sine and cosine of every position of a row, float32: one pair for the layers that have a
        window, if any, and one for those that have none.
        """
        num_pairs = len({window is None for window in self.shape.windows})
        return (
            num_pairs
            * 2
            * FLOAT32
            * self.workload.with_full_rows().tokens_per_microbatch
            * self.shape.turned_dim
        )

    def reference_pass(self) -> Iterator[Moment]:
        """Moments of the pass over the start weights before training, which may have more documents
        than a step.
        """
        workload = replace(self.workload, tokens_per_microbatch=self.workload.reference_pass_tokens)
        held = self.held(0, is_training=False)
        yield from self.passes_over(workload).forward(held, keeps=False)

    def scoring_pass(self) -> Iterator[Moment]:
        """Moments of forward passes within a step: before its first update, or beside it for a
        teacher without head.
        """
        for each in self.workload.scorings:
            passes = (
                Passes(each.shape, self.layout, self.workload) if each.stands_as else self.passes
            )
            runs_head = each.num_values > 0
            held = self.held(0 if runs_head else self.passes.accumulated(self.gradients))
            yield from passes.forward(held, keeps=False, runs_head=runs_head)

    def step_temporaries(self) -> int:
        """Bytes of the optimizer's temporaries."""
        if self.workload.has_weights_on_host:
            return 0
        if self.workload.optimizer == "skip_step_adamw":
            return 3 * self.num_trained_values * state.MASTER_BYTES
        adamw_bytes = 2 * max(shard.weight_bytes for shard in self.trained_shards)
        if self.workload.optimizer == "adamw_8bit" or self.workload.has_moments_on_host:
            return min(3 * adamw_bytes, state.CHUNK_BYTES)
        if self.workload.optimizer == "muon":
            # A rank orthogonalises a whole matrix in bfloat16: it has that, torch's momentum and
            # step of it, two iterates, and two squares of its shorter side. AdamW is not fused
            # there.
            matrices = [
                each for each in self.shape.parameters if state.uses_muon(each, self.workload)
            ]
            return max(
                [
                    adamw_bytes,
                    *(2 * (5 * each.num_params + 2 * min(each.shape) ** 2) for each in matrices),
                ]
            )
        return 0

    def _merging(self) -> dict[str, int]:
        """Temporaries of merging adapters, see the head of this file."""
        return (
            {TEMPORARIES: FLOAT32 * self.merged_values()} if self.shape.adapters is not None else {}
        )

    def merged_values(self) -> int:
        """Values that merging adapters needs: their first matrices, whole, and twice a rank's part
        of a matrix.
        """
        whole = sum(half.num_params for half in self.shape.first_halves)
        return whole + 2 * max(
            state.local_size(each, self.layout).own for each in self.shape.in_blocks
        )

    def weight_sync(self) -> Moment:
        """Memory of two buckets: one is filled while another travels, and a rank has its own part
        of each.

        Source: `WeightManifest` and `PartBroadcaster`. Over shared memory of the host nothing more
        is on a GPU; where learner and engine share one (ipc), the slots hold whole buckets.
        Adapters that travel alone are scaled first.
        """
        held = self.held(self.stepped)
        held |= (
            {TEMPORARIES: FLOAT32 * self.num_trained_values}
            if self.workload.sends_adapter
            else self._merging()
        )
        if self.workload.sync_backend in ("shm", "files"):
            return held
        largest = max(
            own_bytes for own_bytes, _ in state.sync_buckets(self.shape, self.layout, self.workload)
        )
        return held | {BUFFERS: held[BUFFERS] + NUM_SYNC_SLOTS * largest}

    def export(self) -> Moment:
        """`deliver` brings one tensor together at a time, cast already, on the CPU of its owner.

        On the GPU are the parts that arrive, and those sent to other owners: together less than the
        tensor twice. A run on CPUs has a tensor that is written besides.
        """
        largest = self.shape.num_params_of_largest
        held = self.held(self.stepped) | self._merging()
        times = (0 if self.workload.has_weights_on_host else 2) if self.workload.on_cuda else 3
        return held | {
            BUFFERS: held[BUFFERS] + times * largest * self.workload.export_bytes_per_param
        }
