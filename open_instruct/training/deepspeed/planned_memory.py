"""The memory of a rank under DeepSpeed's ZeRO, stage by stage and moment by moment.

Sources: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), figure 1, for what each stage shares;
DeepSpeed 0.19 (`stage_1_and_2.py`, `bf16_optimizer.py`, `stage3.py`) for the buffers of its engine.
tests/ranks/test_deepspeed_plan.py compares it with runs.

P values are trained and F are frozen; N ranks share them, and the compute dtype has c bytes. Where
ranks split matrices, P and F count one rank's parts, and N the ranks with the same part. A backward
pass is followed from stage 2 on, gradient by gradient.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from open_instruct.config.sharding_sections import ParallelSection
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.planning.memory.forward_backward import Passes
from open_instruct.planning.memory.memory_model import MemoryModel
from open_instruct.planning.memory.parts import (
    BUFFERS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    REDUCED,
    TEMPORARIES,
    Moment,
)
from open_instruct.planning.memory.state import (
    ADAMW_MOMENTS,
    GRADIENT_BYTES,
    MASTER_BYTES,
    MOMENT_BYTES,
)
from open_instruct.planning.subject.model import ModelShape, ParameterShape, Unit
from open_instruct.planning.subject.workload import Workload
from open_instruct.training.deepspeed.settings import effective_zpg

# DeepSpeed's own sizes, in values; a test holds them equal.
BUCKET = 500_000_000  # `reduce_bucket_size`, and stage 0's `MEMORY_OPT_ALLREDUCE_SIZE`
# Whole at stage 3 (`stage3_max_live_parameters`), and stepped (`sub_group_size`).
MOST_AT_ONCE = 1_000_000_000
SMALL = 100_000  # what stays whole at stage 3 (`stage3_param_persistence_threshold`)


class ZeroMemoryModel(MemoryModel):
    """The memory of a policy that DeepSpeed partitions, moment by moment."""

    def __init__(
        self,
        flags: ParallelSection,
        shape: ModelShape,
        layout: ShardLayout,
        workload: Workload,
    ) -> None:
        self.flags = flags
        self.stage = flags.deepspeed_stage
        self.item_bytes = workload.compute_bytes
        self.num_ranks = layout.shard_group_size if self.stage else 1
        self.sizes = {
            each.name: count_rank_values(each, layout.tensor_parallel_degree)
            for each in shape.parameters
        }
        trained = [self.sizes[each.name] for each in shape.parameters if each.is_trained]
        self.num_trained = sum(trained)
        self.largest = max(trained)
        self.num_frozen = sum(self.sizes.values()) - self.num_trained
        # Values of this rank's optimizer: all at stage 0, else P / N. `num_touched` counts whole
        # parameters in that range.
        self.num_stepped = sum(-(-size // self.num_ranks) for size in trained)
        self.num_touched = min(self.num_trained, self.num_stepped + self.largest)
        # `BF16_Optimizer` is stage 1 in bfloat16, without host memory.
        self.is_flat = self.stage == 1 and self.item_bytes < MASTER_BYTES and not flags.adam_offload
        self.device, self.host = self._count_state(on_cuda=workload.on_cuda)
        self.buffer_bytes = self.device[BUFFERS]
        # Stage 3 and `BF16_Optimizer` have buffers for them in float32; all others are freed in the
        # step.
        if self.is_flat:
            self.idle_gradient_bytes = GRADIENT_BYTES * self.num_trained
        elif self.stage == 3:
            self.idle_gradient_bytes = self.device[GRADIENTS]
        super().__init__(shape, layout, workload)

    def _count_state(self, *, on_cuda: bool) -> tuple[Counter[str], Counter[str]]:
        """Bytes that stay from step to step, on the device and on its host (ZeRO, figure 1).

        Gradients are among them. Without CUDA the device is the host.
        """
        stage = self.stage
        c = self.item_bytes
        num_stepped = self.num_stepped
        is_exact = c == MASTER_BYTES
        device = Counter[str]()
        host = Counter[str]()
        optimizer = host if self.flags.adam_offload else device
        weights = host if self.flags.offload else device
        # The optimizer's K = 12 bytes are shared from stage 1 on.
        optimizer[PARAMETERS] += MASTER_BYTES * num_stepped
        optimizer[OPTIMIZER] += ADAMW_MOMENTS * MOMENT_BYTES * num_stepped
        weights[PARAMETERS] += c * self._count_compute_weights()
        if stage == 3 and self.num_ranks > 1:
            device[PARAMETERS] += c * sum(size for size in self.sizes.values() if size <= SMALL)
        # `BF16_Optimizer` has gradients in both dtypes.
        gradients = device
        if stage == 3 or (stage == 2 and is_exact):
            gradients = optimizer
        gradients[GRADIENTS] += GRADIENT_BYTES * self._count_gradients()
        if self.is_flat:
            device[GRADIENTS] += c * self.num_trained
        if stage == 3:
            device[BUFFERS] += GRADIENT_BYTES * BUCKET
        if self.flags.adam_offload:
            host[GRADIENTS] += GRADIENT_BYTES * num_stepped  # for the step
        if self.flags.adam_offload and stage < 3:
            device[BUFFERS] += c * self.largest  # on the way to the host
            # The part that it stepped, and one on its way back.
            host[PARAMETERS] += c * (num_stepped + self.largest)
        if on_cuda:
            return device, host
        return device + host, Counter()

    def _count_compute_weights(self) -> int:
        """Weights in the compute dtype: stage 0 trains in float32 alone, stage 3 shares them."""
        if self.stage == 0:
            return self.num_frozen
        if self.stage < 3:
            return self.num_trained + self.num_frozen
        return self.num_stepped + -(-self.num_frozen // self.num_ranks)

    def _count_gradients(self) -> int:
        """Gradients in float32: shared from stage 2 on, there by whole parameters in float32."""
        if self.stage < 2:
            return self.num_trained
        if self.stage == 2 and self.item_bytes == MASTER_BYTES:
            return self.num_touched
        return self.num_stepped

    def _count_reduced(self) -> int:
        """Gradients that are reduced before the step, in values: from stage 2 on none is left."""
        if self.stage == 0:
            return min(self.num_trained, BUCKET)
        if self.stage == 1 and not self.is_flat:
            return max(BUCKET, self.num_touched)
        return 0

    def optimizer_step(self) -> Iterator[Moment]:
        """The moment of the step: below stage 2 gradients are reduced first, then copied in part.

        Stage 2 has that part in one piece, if not in float32; there the norm of each parameter, in
        float64, needs most.
        """
        num_stepped = self.num_stepped
        copied_bytes = 0
        if self.stage > 0 and not self.flags.adam_offload and not self.is_flat:
            copied_bytes = MASTER_BYTES * min(num_stepped, MOST_AT_ONCE)
            if self.stage == 2 and self.item_bytes < MASTER_BYTES:
                copied_bytes = 2 * MASTER_BYTES * min(num_stepped, self.largest)  # `get_norm_dtype`
        num_temporary = 0
        if not self.workload.on_cuda:
            num_temporary = 2 * (num_stepped if self.stage else self.largest)
        yield self.resident_parts(self.gradients) | {
            REDUCED: GRADIENT_BYTES * self._count_reduced(),
            TEMPORARIES: copied_bytes + MASTER_BYTES * num_temporary,
        }

    def state_bytes(self) -> tuple[int, int, int]:
        return self.device[PARAMETERS], self.device[GRADIENTS], self.device[OPTIMIZER]

    def shard_size(self, parameter: ParameterShape) -> int:
        return -(-self.sizes[parameter.name] // self.num_ranks)

    def build_sibling(self, shape: ModelShape, workload: Workload) -> MemoryModel:
        return ZeroMemoryModel(self.flags, shape, self.layout, workload)

    def host_state(self) -> dict[str, int]:
        return self.host

    def count_merged_values(self) -> int:
        return self.num_trained + 2 * max(self.sizes[each.name] for each in self.shape.in_blocks)

    def build_passes(self, workload: Workload) -> Passes:
        return ZeroPasses(self, workload)


class ZeroPasses(Passes):
    """Passes with the usual activations, in which no unit is gathered or reduced by itself."""

    splits_rows = False

    def __init__(self, run: ZeroMemoryModel, workload: Workload) -> None:
        self.run = run
        super().__init__(run.shape, run.layout, workload)
        self.is_sharded = False
        # Below stage 2 the gradients of the first microbatch are allocated one by one.
        self.accumulates |= run.stage > 1 or run.is_flat
        self.bucket_bytes = self._find_bucket_bytes()

    def _find_bucket_bytes(self) -> int:
        """Bytes that wait to be reduced: at stage 1 until the step, at 2 until the pass ends.

        Stage 3 has a bucket in any case. In float32, stage 2 has the gradients of a microbatch
        beside those of earlier microbatches.
        """
        run = self.run
        if run.stage == 1 and not run.is_flat:
            return GRADIENT_BYTES * BUCKET
        if run.stage != 2:
            return 0
        num_bytes = self.item_bytes * BUCKET
        if self.item_bytes == MASTER_BYTES and self.workload.num_microbatches > 1:
            num_bytes += GRADIENT_BYTES * run.num_touched
        return num_bytes

    def _count_gathered_bytes(self, *units: Unit, keeps: bool = True) -> int:
        """Bytes that stage 3 has gathered where `units`, and then the embeddings, are used next.

        Parameters are gathered one by one until there are as many as it wants, and released where
        the next use is far (`PartitionedParameterCoordinator`). Those of blocks that are not
        recomputed stay: autograd has views of them. Neighbours' second copy is hpZ of ZeRO++ (Wang
        et al. 2023, arXiv:2306.10209, section 3.2).
        """
        run = self.run
        if run.stage < 3 or run.num_ranks == 1:
            return 0
        sizes: list[int] = []
        for unit in units:
            sizes += [run.sizes[each.name] for each in unit.parameters]
        num_wanted = MOST_AT_ONCE
        if keeps and not self.workload.recomputes(""):
            num_wanted = max(MOST_AT_ONCE, sum(sizes))
        # Else its order is that of a forward pass alone.
        if all(each.stands_as for each in self.workload.scorings):
            sizes += [run.sizes[each.name] for each in self.embeddings.parameters]
        num_values = 0
        for size in sizes:
            num_values += size
            if num_values >= num_wanted:
                break
        neighbours = effective_zpg(run.flags)
        if neighbours > 1:
            num_values += sum(run.sizes.values()) // neighbours
        return self.item_bytes * num_values

    def forward(
        self, resident: Moment, *, keeps: bool = True, runs_head: bool = True
    ) -> Iterator[Moment]:
        gathered_bytes = self._count_gathered_bytes(self.root, *self.blocks, keeps=keeps)
        moments = super().forward(resident, keeps=keeps, runs_head=runs_head)
        yield from ({**moment, GATHERED: gathered_bytes} for moment in moments)

    def backward(self, resident: Moment) -> Iterator[Moment]:
        """The moments of a backward pass, and from stage 2 on those when a full bucket is reduced.

        Source: `reduce_independent_p_g_buckets_and_remove_grads` of both stages. A bucket is made
        with the first gradient at stage 2, and emptied when the next gradient has no room in it, or
        at the end. What is larger than a bucket waits beside it; at stage 2 only for the last
        norm's gradient, which stage 3 hands over first.
        """
        run = self.run
        c = self.item_bytes
        if run.stage < 2:
            yield from (
                {**moment, REDUCED: self.bucket_bytes} for moment in super().backward(resident)
            )
            return
        gathered_bytes = self._count_gathered_bytes(self.root, *self.blocks)
        for moment in self._through_head(resident):
            yield {**moment, GATHERED: gathered_bytes}
        waiting = self.bucket_bytes
        num_filled = 0
        if self.shape.is_tied:
            # The gradient of a matrix that is also that of the embeddings waits for theirs.
            waiting += self.head_gradient
        else:
            num_filled = self.head_gradient // c
        # Each value is copied to be reduced, at stage 2 once more if that is in another dtype.
        copied_bytes = GRADIENT_BYTES
        if run.stage == 2 and c < GRADIENT_BYTES:
            copied_bytes += c
        for layer in reversed(range(self.shape.num_layers)):
            gathered_bytes = self._count_gathered_bytes(*self.blocks[: layer + 1])
            moments = self.profiles[layer].backward
            for before, usage in pairwise((moments[0], *moments)):
                newest = usage.weight_gradients - before.weight_gradients
                reduced_bytes = waiting + newest
                if num_filled > BUCKET:
                    reduced_bytes += c * num_filled
                if num_filled + newest // c > BUCKET and (newest or run.stage == 2):
                    reduced_bytes += copied_bytes * num_filled
                    num_filled = 0
                num_filled += newest // c
                yield {
                    **self._in_block(resident, layer, usage),
                    GATHERED: gathered_bytes,
                    REDUCED: reduced_bytes,
                }
        looked_up = self._gradient_bytes(self.embedding_unit)
        reduced_bytes = (
            self.bucket_bytes + looked_up + copied_bytes * max(num_filled, looked_up // c)
        )
        yield {
            **resident,
            GATHERED: self._count_gathered_bytes(),
            REDUCED: reduced_bytes,
            TEMPORARIES: self.stream_bytes,
        }

    def _shard_bytes(self, unit: Unit) -> int:
        return GRADIENT_BYTES * sum(self.run.sizes[each.name] for each in unit.trained)


def count_rank_values(parameter: ParameterShape, degree: int) -> int:
    """Values of `parameter` on each of `degree` ranks, split as `split_matrices` does it.

    Embeddings and norms are whole.
    """
    axis = parameter.tensor_axis
    if axis is None or parameter.name.startswith("embeddings"):
        return parameter.num_params
    if parameter.shape[axis] % degree > 0:
        return parameter.num_params
    return parameter.num_params // degree
