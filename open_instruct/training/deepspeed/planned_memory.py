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
from itertools import accumulate, pairwise

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
from open_instruct.training.deepspeed.settings import zpg_of

# DeepSpeed's own sizes, in values; a test holds them equal.
BUCKET = 500_000_000  # `reduce_bucket_size`, and stage 0's `MEMORY_OPT_ALLREDUCE_SIZE`
# Whole at stage 3 (`stage3_max_live_parameters`), and stepped (`sub_group_size`).
MOST_AT_ONCE = 1_000_000_000
SMALL = 100_000  # what stays whole at stage 3 (`stage3_param_persistence_threshold`)


class ZeroMemoryModel(MemoryModel):
    """The memory of a policy that DeepSpeed partitions, moment by moment."""

    def __init__(
        self, flags: ParallelSection, shape: ModelShape, layout: ShardLayout, workload: Workload
    ) -> None:
        self.flags, self.stage, self.c = flags, flags.deepspeed_stage, workload.compute_bytes
        self.num_ranks = layout.shard_group_size if self.stage else 1
        self.sizes = {
            each.name: values_of(each, layout.tensor_parallel_degree) for each in shape.parameters
        }
        trained = [self.sizes[each.name] for each in shape.parameters if each.is_trained]
        self.num_trained = sum(trained)
        self.largest = max(trained)
        self.num_frozen = sum(self.sizes.values()) - self.num_trained
        # Values of this rank's optimizer: all at stage 0, else P / N. `touched` counts whole
        # parameters in that range.
        self.num_own = sum(-(-size // self.num_ranks) for size in trained)
        self.touched = min(self.num_trained, self.num_own + self.largest)
        # `BF16_Optimizer` is stage 1 in bfloat16, without host memory.
        self.is_flat = self.stage == 1 and self.c < MASTER_BYTES and not flags.adam_offload
        self.device, self.host = self._state(on_cuda=workload.on_cuda)
        self.buffer_bytes = self.device[BUFFERS]
        # Stage 3 and `BF16_Optimizer` have buffers for them in float32; all others are freed in the
        # step.
        in_buffer = self.device[GRADIENTS] if self.stage == 3 else 0
        self.idle_gradient_bytes = GRADIENT_BYTES * self.num_trained if self.is_flat else in_buffer
        super().__init__(shape, layout, workload)

    def _state(self, *, on_cuda: bool) -> tuple[Counter[str], Counter[str]]:
        """Bytes that stay from step to step on the device and on its host, with gradients (ZeRO,
        figure 1).

        Without CUDA the device is the host.
        """
        stage, c, own = self.stage, self.c, self.num_own
        is_exact = c == MASTER_BYTES
        device, host = Counter[str](), Counter[str]()
        optimizer = host if self.flags.adam_offload else device
        weights = host if self.flags.offload else device
        # The optimizer's K = 12 bytes are shared from stage 1 on.
        optimizer[PARAMETERS] += MASTER_BYTES * own
        optimizer[OPTIMIZER] += ADAMW_MOMENTS * MOMENT_BYTES * own
        weights[PARAMETERS] += c * self._count_compute_weights()
        if stage == 3 and self.num_ranks > 1:
            device[PARAMETERS] += c * sum(size for size in self.sizes.values() if size <= SMALL)
        # `BF16_Optimizer` has gradients in both dtypes.
        gradients = optimizer if stage == 3 or (stage == 2 and is_exact) else device
        gradients[GRADIENTS] += GRADIENT_BYTES * self._count_gradients()
        if self.is_flat:
            device[GRADIENTS] += c * self.num_trained
        if stage == 3:
            device[BUFFERS] += GRADIENT_BYTES * BUCKET
        if self.flags.adam_offload:
            host[GRADIENTS] += GRADIENT_BYTES * own  # those that it steps with
        if self.flags.adam_offload and stage < 3:
            device[BUFFERS] += c * self.largest  # on the way to the host
            # The part that it stepped, and one on its way back.
            host[PARAMETERS] += c * (own + self.largest)
        return (device, host) if on_cuda else (device + host, Counter())

    def _count_compute_weights(self) -> int:
        """Weights in the compute dtype: stage 0 trains in float32 alone, stage 3 shares them."""
        if self.stage == 0:
            return self.num_frozen
        if self.stage < 3:
            return self.num_trained + self.num_frozen
        return self.num_own + -(-self.num_frozen // self.num_ranks)

    def _count_gradients(self) -> int:
        """Gradients in float32: shared from stage 2 on, there by whole parameters in float32."""
        if self.stage < 2:
            return self.num_trained
        if self.stage == 2 and self.c == MASTER_BYTES:
            return self.touched
        return self.num_own

    def _count_reduced(self) -> int:
        """Gradients that are reduced before the step, in values: from stage 2 on none is left."""
        if self.stage == 0:
            return min(self.num_trained, BUCKET)
        if self.stage == 1 and not self.is_flat:
            return max(BUCKET, self.touched)
        return 0

    def optimizer_step(self) -> Iterator[Moment]:
        """The moment of the step: below stage 2 gradients are reduced first, then copied in part.

        Stage 2 has that part in one piece, if not in float32; there the norm of each parameter, in
        float64, needs most.
        """
        own = self.num_own
        copies = self.stage > 0 and not self.flags.adam_offload and not self.is_flat
        copied = MASTER_BYTES * min(own, MOST_AT_ONCE) if copies else 0
        if copied and self.stage == 2 and self.c < MASTER_BYTES:
            copied = 2 * MASTER_BYTES * min(own, self.largest)  # `get_norm_dtype`
        made = 0
        if not self.workload.on_cuda:
            made = 2 * (own if self.stage else self.largest)
        yield self.resident_parts(self.gradients) | {
            REDUCED: GRADIENT_BYTES * self._count_reduced(),
            TEMPORARIES: copied + MASTER_BYTES * made,
        }

    def state_bytes(self) -> tuple[int, int, int]:
        return self.device[PARAMETERS], self.device[GRADIENTS], self.device[OPTIMIZER]

    def shard_size(self, parameter: ParameterShape) -> int:
        return -(-self.sizes[parameter.name] // self.num_ranks)

    def build_other(self, shape: ModelShape, workload: Workload) -> MemoryModel:
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
        adds_up = self.c == MASTER_BYTES and self.workload.num_microbatches > 1
        apart = GRADIENT_BYTES * run.touched if adds_up else 0
        return self.c * BUCKET + apart

    def _ahead(self, *units: Unit, keeps: bool = True) -> int:
        """Bytes that stage 3 has gathered where `units`, and then the embeddings, are used next.

        Parameters are gathered one by one until there are as many as it wants, and released where
        the next use is far (`PartitionedParameterCoordinator`). Those of blocks that are not
        recomputed stay: autograd has views of them. Neighbours' second copy is hpZ of ZeRO++ (Wang
        et al. 2023, arXiv:2306.10209, section 3.2).
        """
        run = self.run
        sizes = [run.sizes[each.name] for unit in units for each in unit.parameters]
        wanted = max(MOST_AT_ONCE, sum(sizes) if keeps and not self.workload.recomputes("") else 0)
        # Else its order is that of a forward pass alone.
        if all(each.stands_as for each in self.workload.scorings):
            sizes += [run.sizes[each.name] for each in self.embeddings.parameters]
        num_values = next(
            (together for together in accumulate(sizes) if together >= wanted), sum(sizes)
        )
        if run.stage < 3 or run.num_ranks == 1:
            return 0
        neighbours = zpg_of(run.flags)
        if neighbours > 1:
            num_values += sum(run.sizes.values()) // neighbours
        return self.c * num_values

    def forward(
        self, held: Moment, *, keeps: bool = True, runs_head: bool = True
    ) -> Iterator[Moment]:
        gathered = self._ahead(self.root, *self.blocks, keeps=keeps)
        moments = super().forward(held, keeps=keeps, runs_head=runs_head)
        yield from ({**moment, GATHERED: gathered} for moment in moments)

    def backward(self, held: Moment) -> Iterator[Moment]:
        """The moments of a backward pass, from stage 2 on with those at which a full bucket is
        reduced.

        Source: `reduce_independent_p_g_buckets_and_remove_grads` of both stages. A bucket is made
        with the first gradient at stage 2, and emptied when the next gradient has no room in it, or
        at the end. What is larger than a bucket waits beside it; at stage 2 only for the last
        norm's gradient, which stage 3 hands over first.
        """
        run, c, of_head = self.run, self.c, self.head_gradient
        if run.stage < 2:
            yield from ({**moment, REDUCED: self.bucket_bytes} for moment in super().backward(held))
            return
        yield from (
            {**moment, GATHERED: self._ahead(self.root, *self.blocks)}
            for moment in self._through_head(held)
        )
        # The gradient of a matrix that is also that of the embeddings waits for theirs.
        waiting = self.bucket_bytes + (of_head if self.shape.is_tied else 0)
        filled = 0 if self.shape.is_tied else of_head // c
        # Each value is copied to be reduced, at stage 2 once more if that is in another dtype.
        copied = GRADIENT_BYTES + (c if run.stage == 2 and c < GRADIENT_BYTES else 0)
        for layer in reversed(range(self.shape.num_layers)):
            gathered = self._ahead(*self.blocks[: layer + 1])
            moments = self.profiles[layer].backward
            for before, usage in pairwise((moments[0], *moments)):
                newest = usage.weight_gradients - before.weight_gradients
                reduced = waiting + newest + (c * filled if filled > BUCKET else 0)
                if filled + newest // c > BUCKET and (newest or run.stage == 2):
                    reduced += copied * filled
                    filled = 0
                filled += newest // c
                yield {**self._in_block(held, layer, usage), GATHERED: gathered, REDUCED: reduced}
        looked_up = self._whole(self.looked_up)
        reduced = self.bucket_bytes + looked_up + copied * max(filled, looked_up // c)
        yield {**held, GATHERED: self._ahead(), REDUCED: reduced, TEMPORARIES: self.stream_bytes}

    def _shard(self, unit: Unit) -> int:
        return GRADIENT_BYTES * sum(self.run.sizes[each.name] for each in unit.trained)


def values_of(parameter: ParameterShape, degree: int) -> int:
    """Values of `parameter` on each of `degree` ranks, split as by `split_matrices`: embeddings and
    norms whole.
    """
    axis = parameter.tensor_axis
    is_whole = (
        axis is None
        or parameter.name.startswith("embeddings")
        or parameter.shape[axis] % degree > 0
    )
    return parameter.num_params // (1 if is_whole else degree)
