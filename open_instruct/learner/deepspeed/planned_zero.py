"""What a rank holds and exchanges under ZeRO, stage by stage in closed form. Without torch, and without DeepSpeed.

Sources: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), figure 1 and section 7, for what each stage shares and
sends; DeepSpeed 0.19 (`stage_1_and_2.py`, `bf16_optimizer.py`, `stage3.py`) for what its engine holds besides.

P values are trained and F are frozen; N ranks share them, and c bytes a value are computed in. Where ranks split
matrices, P and F are what one of them has, and N those that have the same part. What comes and goes in a pass counts as
the most that it can be, at every moment; an exchange is the sum of a step, however DeepSpeed fills buckets.
tests/ranks/test_deepspeed_plan.py compares both with runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from open_instruct.config.sections import ParallelSection
from open_instruct.learner.deepspeed.settings import zpg_of
from open_instruct.models.hf.names import is_of_adapter
from open_instruct.parallel.training_state import ADAMW_MOMENTS, GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES
from open_instruct.planning.memory.forward_backward import GATHERED, GRADIENTS, REDUCED, TEMPORARIES, Moment, Passes
from open_instruct.planning.memory.phases import BUFFERS, OPTIMIZER, PARAMETERS, Moments
from open_instruct.planning.subject.model import ModelShape, ParameterShape, Unit
from open_instruct.planning.subject.workload import Workload
from open_instruct.planning.traffic.collectives import Collective, Exchange, exchange_in
from open_instruct.planning.traffic.model_parallel import Calls, along, context_calls, is_recomputed
from open_instruct.planning.traffic.per_step import forward_passes
from open_instruct.records import ShardLayout

# DeepSpeed's own sizes, in values; a test holds them equal.
BUCKET = 500_000_000  # `reduce_bucket_size`, and stage 0's `MEMORY_OPT_ALLREDUCE_SIZE`
MOST_AT_ONCE = 1_000_000_000  # whole at stage 3 (`stage3_max_live_parameters`), and stepped (`sub_group_size`)
SMALL = 100_000  # what stays whole at stage 3 (`stage3_param_persistence_threshold`)


class ZeroMoments(Moments):
    """Of a policy that DeepSpeed shares."""

    def __init__(self, flags: ParallelSection, shape: ModelShape, layout: ShardLayout, workload: Workload) -> None:
        self.flags, self.stage, self.c = flags, flags.deepspeed_stage, workload.compute_bytes
        self.num_ranks = layout.shard_group_size if self.stage else 1
        self.sizes = {each.name: values_of(each, layout.tensor_parallel_degree) for each in shape.parameters}
        trained = [self.sizes[each.name] for each in shape.parameters if each.is_trained]
        self.num_trained = sum(trained)
        self.largest = max(trained)
        self.num_frozen = sum(self.sizes.values()) - self.num_trained
        # What this rank's optimizer has: all at stage 0, else P / N. Parameters that reach into that have more.
        self.own = [-(-size // self.num_ranks) for size in trained]
        self.touched = min(self.num_trained, sum(self.own) + self.largest)
        # `BF16_Optimizer` is stage 1 in bfloat16, without host memory.
        self.is_flat = self.stage == 1 and self.c < MASTER_BYTES and not flags.adam_offload
        self.device, self.host = self._state(on_cuda=workload.on_cuda)
        super().__init__(shape, layout, workload)

    def _state(self, *, on_cuda: bool) -> tuple[Counter[str], Counter[str]]:
        """Bytes that stay from step to step on the device and on its host, with gradients (ZeRO, figure 1).

        Without CUDA both are one.
        """
        stage, c, own = self.stage, self.c, sum(self.own)
        P, F = self.num_trained, self.num_frozen
        is_exact = c == MASTER_BYTES
        device, host = Counter[str](), Counter[str]()
        optimizer = host if self.flags.adam_offload else device
        weights = host if self.flags.offload else device
        # The optimizer's K = 12 bytes are shared from stage 1 on.
        optimizer[PARAMETERS] += MASTER_BYTES * own
        optimizer[OPTIMIZER] += ADAMW_MOMENTS * MOMENT_BYTES * own
        # Weights to compute with are shared at stage 3, but for small ones; at stage 0 they are the float32 ones.
        weights[PARAMETERS] += c * (F, P + F, P + F, own - (-F // self.num_ranks))[stage]
        if stage == 3 and self.num_ranks > 1:
            device[PARAMETERS] += c * sum(size for size in self.sizes.values() if size <= SMALL)
        # Gradients are shared from stage 2 on, in float32 as whole ones. BF16_Optimizer has them in both dtypes.
        gradients = optimizer if stage == 3 or (stage == 2 and is_exact) else device
        gradients[GRADIENTS] += GRADIENT_BYTES * (P, P, self.touched if is_exact else own, own)[stage]
        if self.is_flat:
            device[GRADIENTS] += c * P
        if stage == 3:
            device[BUFFERS] += GRADIENT_BYTES * BUCKET
        if self.flags.adam_offload:
            host[GRADIENTS] += GRADIENT_BYTES * own  # those that it steps with
        if self.flags.adam_offload and stage < 3:
            device[BUFFERS] += c * self.largest  # on the way to the host
            host[PARAMETERS] += c * (own + self.largest)  # the part that it stepped, and one on its way back
        return (device, host) if on_cuda else (device + host, Counter())

    @property
    def most_gathered(self) -> int:
        """Values at stage 3: up to a limit and a parameter more, and what that is gathered in.

        Source: `PartitionedParameterCoordinator`. Neighbours' second copy is hpZ of ZeRO++ (Wang et al. 2023,
        arXiv:2306.10209, section 3.2).
        """
        if self.stage < 3 or self.num_ranks == 1:
            return 0
        everything, largest = sum(self.sizes.values()), max(self.sizes.values())
        copy = everything // zpg_of(self.flags) if zpg_of(self.flags) > 1 else 0
        return min(everything, MOST_AT_ONCE + largest) + largest + copy

    @property
    def most_reduced(self) -> int:
        """Bytes in a backward pass: the bucket, from stage 2 on a copy of it and the gradient that was just made.

        In float32 stage 2 makes the gradients of a microbatch beside those of others.
        """
        made = GRADIENT_BYTES * min(self.num_trained, BUCKET) + self.c * self.largest
        apart = self.c == MASTER_BYTES and self.workload.num_microbatches > 1
        bucket = GRADIENT_BYTES * BUCKET
        more = GRADIENT_BYTES * self.touched if apart else 0
        return (0, 0 if self.is_flat else bucket, bucket + made + more, made)[self.stage]

    def step(self) -> Iterator[Moment]:
        """Below stage 2 gradients are reduced first. The optimizer steps with a copy of its part of them."""
        own = sum(self.own)
        copies = self.stage > 0 and not self.flags.adam_offload and not self.is_flat
        reduced = (min(self.num_trained, BUCKET), 0 if self.is_flat else max(BUCKET, self.touched), 0, 0)[self.stage]
        copied = min(own, MOST_AT_ONCE) if copies else 0
        made = 0 if self.workload.on_cuda else 2 * (own if self.stage else self.largest)
        temporaries = MASTER_BYTES * (copied + made)
        yield self.held(self.gradients) | {REDUCED: GRADIENT_BYTES * reduced, TEMPORARIES: temporaries}

    def state_bytes(self) -> tuple[int, int, int]:
        return self.device[PARAMETERS], self.device[GRADIENTS], self.device[OPTIMIZER]

    def held(self, gradients: int, *, is_training: bool = True) -> dict[str, int]:
        held = super().held(gradients, is_training=is_training)
        return held | {BUFFERS: held[BUFFERS] + self.device[BUFFERS]}

    def on_host(self) -> dict[str, int]:
        return super().on_host() | self.host

    def merged_values(self) -> int:
        return self.num_trained + 2 * max(self.sizes[each.name] for each in self.passes.one_block.parameters)

    def passes_over(self, workload: Workload) -> Passes:
        return ZeroPasses(self, workload)


class ZeroPasses(Passes):
    """Activations as ever; no unit is gathered or reduced by itself."""

    splits_rows = False

    def __init__(self, run: ZeroMoments, workload: Workload) -> None:
        super().__init__(run.shape, run.layout, workload)
        self.run, self.is_sharded = run, False
        # Below stage 2 gradients of a first microbatch come one by one.
        self.accumulates |= run.stage > 1 or run.is_flat

    def forward(self, held: Moment, **kwargs: Any) -> Iterator[Moment]:
        for moment in super().forward(held, **kwargs):
            yield {**moment, GATHERED: self.c * self.run.most_gathered}

    def backward(self, held: Moment) -> Iterator[Moment]:
        for moment in super().backward(held):
            yield {**moment, GATHERED: self.c * self.run.most_gathered, REDUCED: self.run.most_reduced}

    def _shard(self, unit: Unit) -> int:
        return GRADIENT_BYTES * sum(self.run.sizes[each.name] for each in unit.trained)


def values_of(parameter: ParameterShape, degree: int) -> int:
    """What each of `degree` ranks has of it, as `tensor_parallel.py` splits; embeddings and norms stay whole."""
    axis = parameter.tensor_axis
    is_whole = axis is None or parameter.name.startswith("embeddings") or parameter.shape[axis] % degree > 0
    return parameter.num_params // (1 if is_whole else degree)


def exchanges_of(run: ZeroMoments) -> Iterator[Exchange]:
    """Those of one rank in one step. Not the norm, which is a few bytes."""
    work, stage = run.workload, run.stage
    num_backward, num_forward = work.num_updates * work.num_microbatches, 0
    yield from _of_activations(run, num_backward, work.num_values, trains=True)
    for each in work.scorings:
        if each.stands_as:  # models beside the policy are FSDP2's
            yield from forward_passes(each, run.layout, work)
        else:
            num_forward += each.num_rounds * work.num_microbatches
            yield from _of_activations(run, each.num_rounds * work.num_microbatches, each.num_values, trains=False)
    # 2 P a step, section 7.2: stage 2 all-reduces every bucket too, after every microbatch.
    num_bytes = GRADIENT_BYTES * run.num_trained * (num_backward if stage > 1 else work.num_updates)
    yield _sum(run, "gradients", "reduce_scatter" if stage == 3 else "all_reduce", num_bytes)
    if stage == 3:
        yield from _gathers(run, num_forward, num_backward)
    elif stage:
        yield _sum(run, "weights after the step", "all_gather", run.c * run.num_trained * work.num_updates)
    if stage and run.shape.adapters and work.merges_adapters:
        halves = sum(size for name, size in run.sizes.items() if is_of_adapter(name))
        yield _sum(run, "adapters, to be added", "all_reduce", GRADIENT_BYTES * halves)


def _gathers(run: ZeroMoments, num_forward: int, num_backward: int) -> Iterator[Exchange]:
    """3 P, section 7.2: each pass gathers all weights, and backward once more, but for what is left of the forward.

    Nothing is left where a run's first passes went forward alone: what may be let go of was worked out by their order.
    Frozen weights come a third time to be recomputed, since modules with adapters ask for them one by one. Where
    neighbours have a second copy, what is trained comes from all ranks the first time in an update only.
    """
    work, nearby, everything = run.workload, zpg_of(run.flags), run.num_trained + run.num_frozen
    is_left = 0 if num_forward or work.reference_pass_tokens else min(everything, MOST_AT_ONCE)
    num_times = 2 + (work.checkpointing != "none" and run.num_frozen > 0)
    num_values = everything * num_forward + (everything * num_times - is_left) * num_backward
    from_all = work.num_updates * run.num_trained if nearby > 1 else num_values
    yield _sum(run, "weights, before they are needed", "all_gather", run.c * from_all)
    if nearby > 1:
        yield _sum(run, "weights, from second copies", "all_gather", run.c * (num_values - from_all), nearby)


def _sum(run: ZeroMoments, what: str, how: Collective, num_bytes: int, within: int = 0) -> Exchange:
    return exchange_in(run.layout, "world", what, how, num_bytes, 1, within)


def _of_activations(run: ZeroMoments, num_passes: int, num_values: int, *, trains: bool) -> Iterator[Exchange]:
    """AutoTP's: ranks add up what a pair of matrices puts out, and backwards what each first one makes of its input.

    A split head brings its logits together, which are computed again backwards.
    """
    shape, layout, work, head = run.shape, run.layout, run.workload, run.shape.parameters[-1]
    num_rows = (work.tokens_per_microbatch, work.label_tokens_per_microbatch)
    num_tokens, num_labels = (run.c * num // layout.context_parallel_degree for num in num_rows)
    cut = Counter(each.tensor_axis for each in shape.parameters if each.layer == 0 and len(each.shape) == 2)
    num_sums = shape.num_layers * (cut[1] * (1 + trains * is_recomputed(work, "")) + cut[0] * trains)
    calls: list[Calls] = [("activations of split matrices", "all_reduce", num_tokens * shape.d_model, num_sums)]
    if num_values and values_of(head, layout.tensor_parallel_degree) < head.num_params:
        calls.append(("activations of split matrices", "all_reduce", num_labels * shape.d_model, int(trains)))
        calls.append(("logits", "all_gather", num_labels * shape.vocab_size, 1 + trains))
    yield from along("tensor", calls, layout, num_passes)
    yield from along("context", context_calls(shape, layout, work, num_values, trains=trains), layout, num_passes)
