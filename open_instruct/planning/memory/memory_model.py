"""The memory of a model that is trained, at every moment of a run that FSDP2 shards.

The state from step to step is `state.py`'s, and what a forward and a backward pass add is
`forward_backward.py`'s. Sources of the rest:

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
from dataclasses import replace
from functools import cached_property

from open_instruct.core.shard_layout import ShardLayout
from open_instruct.planning.memory import scratch, state
from open_instruct.planning.memory.forward_backward import Passes
from open_instruct.planning.memory.parts import (
    BUFFERS,
    CHECKPOINT,
    CRITIC,
    CUDA,
    ENGINE,
    GRADIENTS,
    INPUTS,
    INTERPRETER,
    OPTIMIZER,
    PARAMETERS,
    POLICY,
    SCRATCH,
    SENT,
    TEMPORARIES,
    Moment,
)
from open_instruct.planning.memory.piece import FLOAT32
from open_instruct.planning.memory.sync_buckets import sync_buckets
from open_instruct.planning.memory.trained_shard import TrainedShard, pinned_bytes
from open_instruct.planning.subject.model import ModelShape, ParameterShape
from open_instruct.planning.subject.workload import Scoring, Workload

# `weight_sync.way.NUM_SLOTS`, which cannot be imported without torch; a test holds the two equal.
NUM_SYNC_SLOTS = 2


class MemoryModel:
    """The moments of a model that is trained, in bytes by label; another backend overrides some.

    It is one rank's, of the policy or of the critic. It is not a plan: `phases.py` finds the worst
    moment of each phase.
    """

    buffer_bytes = 0  # of the library that shards, from step to step
    idle_gradient_bytes = 0  # bytes of gradients that stay when a step is over

    def __init__(self, shape: ModelShape, layout: ShardLayout, workload: Workload) -> None:
        self.shape = shape
        self.layout = layout
        self.workload = workload
        self.critic: MemoryModel | None = None
        if workload.critic:
            self.critic = self.build_sibling(workload.critic.shape, workload.critic_workload)
            self.critic.idle_model = self
        self.idle_model: MemoryModel | None = self.critic  # at rest while this one works
        self.passes = self.build_passes(workload)
        self.parameters, self.gradients, self.optimizer = self.state_bytes()
        # Gradients once all are reduced.
        self.reduced_gradients = self.gradients
        if workload.has_weights_on_host:
            self.reduced_gradients = 0

    def build_sibling(self, shape: ModelShape, workload: Workload) -> MemoryModel:
        """The memory of another model that is trained in the same run."""
        return MemoryModel(shape, self.layout, workload)

    def build_passes(self, workload: Workload) -> Passes:
        """The passes of this model over such microbatches."""
        return Passes(self.shape, self.layout, workload)

    def shard_size(self, parameter: ParameterShape) -> int:
        """Values of a parameter that this rank has."""
        return state.local_size(parameter, self.layout).shard

    @cached_property
    def trained_shards(self) -> list[TrainedShard]:
        """This rank's shards of the trained parameters; blocks that are alike have one record."""
        shards = []
        for unit in self.shape.units:
            for parameter in unit.trained:
                num_values = self.shard_size(parameter)
                sizes = state.moment_bytes(parameter, num_values, self.layout, self.workload)
                shards.append(
                    TrainedShard(count=unit.count, num_values=num_values, moment_bytes=sizes)
                )
        return shards

    @property
    def num_trained_values(self) -> int:
        """Values of all trained parameters together that this rank has."""
        return sum(shard.count * shard.num_values for shard in self.trained_shards)

    # The state, on the device and on its host.

    def state_bytes(self) -> tuple[int, int, int]:
        """Parameters, gradients and optimizer states on the device.

        All but gradients are there from step to step.
        """
        parameters, gradients, optimizer = state.state_bytes(self.shape, self.layout, self.workload)
        if self.workload.has_weights_on_host:
            return 0, gradients, 0
        if self.workload.has_moments_on_host:
            return parameters, gradients, 0
        return parameters, gradients, optimizer

    def host_parts(self) -> dict[str, int]:
        """Bytes in the host's memory: state, inputs of all blocks, and copies of the weights."""
        parts = dict(self.host_state())
        if self.workload.has_weights_on_host:
            for scoring in self.workload.scorings:
                if scoring.stands_as:
                    parts[scoring.stands_as] = self._pinned_weights(scoring.shape)
        parts[INPUTS] = 0
        if self.passes.offloads:
            parts[INPUTS] = sum(map(pinned_bytes, self.passes.kept_by_blocks))
        if self.workload.on_cuda:
            parts |= self.host_copies()
        return parts

    def host_state(self) -> dict[str, int]:
        """What `state_bytes` leaves out, and gradients on which the host steps."""
        workload = self.workload
        optimizer = 0
        if workload.has_moments_on_host or workload.has_weights_on_host:
            _, _, optimizer = state.state_bytes(self.shape, self.layout, workload)
        if not workload.has_weights_on_host:
            return {OPTIMIZER: optimizer}
        gradients = sum(
            shard.count * pinned_bytes(shard.weight_bytes) for shard in self.trained_shards
        )
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
                sizes = parameter.tensor_bytes(num_values, item_bytes[parameter.is_trained])
                total_bytes += unit.count * sum(map(pinned_bytes, sizes))
        return total_bytes

    def host_copies(self) -> dict[str, int]:
        """Bytes of a process's copies in its host's memory, or in its own without a GPU.

        Of a weight sync by changes (`SentParts`) they are a rank's part as engines have it, pinned
        beside a GPU, of one bucket what changed, and messages about as many buckets as there are
        slots and one more, at most.
        """
        sent_bytes = 0
        if self.workload.sync_choice[0] == "delta":
            buckets = sync_buckets(self.shape, self.layout, self.workload)
            sizes = [own_bytes for own_bytes, _ in buckets]
            copies = sizes
            if self.workload.on_cuda:
                copies = [pinned_bytes(size) for size in sizes]
            sent_bytes = sum(copies) + (NUM_SYNC_SLOTS + 2) * max(sizes)
        return {CHECKPOINT: self.checkpoint_copy(), SENT: sent_bytes}

    def checkpoint_copy(self) -> int:
        """Bytes of the host copy that asynchronous checkpoints are written from.

        It stays between checkpoints. Replicas divide it among them. Beside a GPU each tensor is
        pinned by itself.
        """
        if not self.workload.copies_checkpoints:
            return 0
        num_models = 1 + sum(each.moves for each in self.workload.scorings)
        if self.workload.on_cuda:
            copied_bytes = 0
            for shard in self.trained_shards:
                weight_bytes = num_models * pinned_bytes(shard.weight_bytes)
                moment_bytes = sum(map(pinned_bytes, shard.moment_bytes))
                copied_bytes += shard.count * (weight_bytes + moment_bytes)
        else:
            copied_bytes = (
                num_models * self.num_trained_values * state.MASTER_BYTES + self.optimizer
            )
        # Of experts that are split no replica has another's part.
        if self.layout.expert_parallel_degree > 1:
            return copied_bytes
        return copied_bytes // self.layout.num_replicas

    # The memory that stays throughout a phase.

    def resident_parts(self, gradients: int, *, is_training: bool = True) -> dict[str, int]:
        """The memory that stays throughout a phase, with the memory of a model at rest.

        Before training there are no optimizer states and no frozen models.
        """
        parts = self._resident_alone(gradients, is_training=is_training)
        if self.idle_model is None:
            return parts
        idle_gradients = 0
        if is_training:
            idle_gradients = self.idle_model.idle_gradient_bytes
        at_rest = self.idle_model._resident_alone(idle_gradients, is_training=is_training)
        cuda_bytes = max(parts[CUDA], at_rest[CUDA])  # of both models and the engines
        counted_once = at_rest[SCRATCH] + at_rest[CUDA] + at_rest[INTERPRETER]
        num_bytes = sum(at_rest.values()) - counted_once
        label = POLICY if self.critic is None else CRITIC
        return parts | {label: num_bytes, CUDA: cuda_bytes}

    def _resident_alone(self, gradients: int, *, is_training: bool) -> dict[str, int]:
        """`resident_parts` without a model that is at rest."""
        parts = {
            PARAMETERS: self.parameters,
            GRADIENTS: gradients,
            OPTIMIZER: 0,
        }
        if is_training:
            parts[OPTIMIZER] = self.optimizer
            for scoring in self.workload.scorings:
                if scoring.stands_as:
                    parts[scoring.stands_as] = self._frozen_bytes(scoring)
        parts[ENGINE] = self._engine_bytes()
        parts[BUFFERS] = self._rope_bytes() + self.buffer_bytes
        parts |= {SCRATCH: 0, CUDA: 0, INTERPRETER: 0}
        if self.workload.on_cuda:
            return parts | {SCRATCH: self.scratch_bytes, CUDA: self.library_bytes}
        parts[INTERPRETER] = scratch.PROCESS_BYTES
        if is_training:
            parts[BUFFERS] += sum(self.host_copies().values())
        return parts

    def _engine_bytes(self) -> int:
        """Bytes of an engine that shares the device."""
        if not self.workload.shares_device:
            return 0
        weight_bytes = self.shape.num_params * self.workload.sync_bytes_per_param
        return weight_bytes + self.workload.kv_cache_bytes

    @cached_property
    def scratch_bytes(self) -> int:
        """Bytes of cuBLAS, and those by which weights, gradients and moments are rounded up."""
        if self.workload.has_weights_on_host:
            return scratch.CUBLAS_BYTES
        rounding_bytes = 0
        for shard in self.trained_shards:
            sizes = [shard.weight_bytes, shard.weight_bytes]  # and its gradient
            if not self.workload.has_moments_on_host:
                sizes += shard.moment_bytes
            rounding_bytes += shard.count * sum(-size % scratch.BLOCK_BYTES for size in sizes)
        return scratch.CUBLAS_BYTES + rounding_bytes

    @cached_property
    def library_bytes(self) -> int:
        """Bytes of CUDA and of the communicators of all models that are trained."""
        sends_weights = self.workload.num_engines > 0 and self.workload.sync_backend == "nccl"
        num_trained = 1 if self.critic is None else 2
        return scratch.library_bytes(
            self.layout, sends_weights=sends_weights, num_trained=num_trained
        )

    def _frozen_bytes(self, frozen: Scoring) -> int:
        """Bytes of a frozen model, sharded as the policy; on one device in --param_dtype alone."""
        shape = frozen.shape
        item_bytes = self.workload.compute_bytes
        if self.layout.single_device:
            return shape.num_params * item_bytes
        frozen_bytes = 0
        if not self.workload.has_weights_on_host:
            frozen_bytes, _, _ = state.state_bytes(shape, self.layout, self.workload)
        if not frozen.num_values:  # the policy's head multiplies with its matrix
            frozen_bytes += shape.vocab_size * shape.d_model * item_bytes
        return frozen_bytes

    def _rope_bytes(self) -> int:
        """Sine and cosine of every position of a row, float32.

        One pair is for the layers that have a window, if any, and one for those that have none.
        """
        num_pairs = len({window is None for window in self.shape.windows})
        num_positions = self.workload.with_full_rows().tokens_per_microbatch
        return 2 * num_pairs * FLOAT32 * num_positions * self.shape.turned_dim

    # The moments of each phase.

    def step_as_critic(self) -> Iterator[Moment]:
        """All moments of a critic's part of a step: it scores, learns, and takes its own step."""
        yield from self.scoring_pass()
        resident = self.resident_parts(self.passes.accumulated_bytes(self.gradients))
        yield from self.passes.forward(resident)
        yield from self.passes.backward(resident)
        yield from self.optimizer_step()

    def reference_pass(self) -> Iterator[Moment]:
        """Moments of the pass over the start weights, which may have more documents than a step."""
        workload = replace(self.workload, tokens_per_microbatch=self.workload.reference_pass_tokens)
        resident = self.resident_parts(0, is_training=False)
        yield from self.build_passes(workload).forward(resident, keeps=False)

    def scoring_pass(self) -> Iterator[Moment]:
        """Moments of forward passes within a step, before its first update.

        Those of a teacher without head are beside the update.
        """
        for scoring in self.workload.scorings:
            passes = self.passes
            if scoring.stands_as:
                passes = Passes(scoring.shape, self.layout, self.workload)
            runs_head = scoring.num_values > 0
            gradients = 0
            if not runs_head:
                gradients = self.passes.accumulated_bytes(self.gradients)
            resident = self.resident_parts(gradients)
            yield from passes.forward(resident, keeps=False, runs_head=runs_head)

    def optimizer_step(self) -> Iterable[Moment]:
        """The moments of the optimizer step."""
        resident = self.resident_parts(self.reduced_gradients)
        yield resident | {TEMPORARIES: self.step_temporaries()}

    def step_temporaries(self) -> int:
        """Bytes of the optimizer's temporaries."""
        optimizer = self.workload.optimizer
        if self.workload.has_weights_on_host:
            return 0
        if optimizer == "skip_step_adamw":
            return 3 * self.num_trained_values * state.MASTER_BYTES
        adamw_bytes = 2 * max(shard.weight_bytes for shard in self.trained_shards)
        if optimizer == "adamw_8bit" or self.workload.has_moments_on_host:
            return min(3 * adamw_bytes, state.CHUNK_BYTES)
        if optimizer == "muon":
            muon_bytes = state.muon_temporaries(self.shape, self.workload)
            return max(adamw_bytes, muon_bytes)
        return 0

    def _merging(self) -> dict[str, int]:
        """Temporaries of merging adapters, see the head of this file."""
        if self.shape.adapters is None:
            return {}
        return {TEMPORARIES: FLOAT32 * self.count_merged_values()}

    def count_merged_values(self) -> int:
        """Values that merging adapters needs.

        They are the first matrices, whole, and twice a rank's part of a matrix.
        """
        num_whole = sum(half.num_params for half in self.shape.first_halves)
        most_values = 0
        for parameter in self.shape.in_blocks:
            local = state.local_size(parameter, self.layout)
            most_values = max(most_values, local.shard)
        return num_whole + 2 * most_values

    def weight_sync(self) -> Moment:
        """Memory of two buckets: one is filled while another travels.

        A rank has its own part of each, or all beside an engine (ipc); through the host's memory
        nothing more is on a GPU. Adapters that travel alone are scaled first.
        """
        parts = self.resident_parts(self.reduced_gradients)
        if self.workload.sends_adapter:
            parts[TEMPORARIES] = FLOAT32 * self.num_trained_values
        else:
            parts |= self._merging()
        if self.workload.sync_backend not in ("shm", "files"):
            buckets = sync_buckets(self.shape, self.layout, self.workload)
            holds_all = self.workload.sync_backend == "ipc"
            parts[BUFFERS] += NUM_SYNC_SLOTS * max(sizes[holds_all] for sizes in buckets)
        return parts

    def export(self) -> Moment:
        """`gather_to_owner` gathers a tensor at a time, cast already, on its owner's CPU.

        On the GPU are the parts that arrive, and those sent to other owners: together less than the
        tensor twice. A run on CPUs has a tensor that is written besides.
        """
        parts = self.resident_parts(self.reduced_gradients) | self._merging()
        if not self.workload.on_cuda:
            num_tensors = 3
        elif self.workload.has_weights_on_host:
            num_tensors = 0
        else:
            num_tensors = 2
        num_values = num_tensors * self.shape.num_params_of_largest
        parts[BUFFERS] += num_values * self.workload.export_bytes_per_param
        return parts
