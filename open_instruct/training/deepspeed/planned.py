"""The DeepSpeed backend's answers to the planner, without torch and without DeepSpeed.

Memory and traffic of a rank under ZeRO are written down stage by stage, in closed form.

Sources: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), figure 1 and section 7, for what each
stage shares and sends; DeepSpeed 0.19 (`stage_1_and_2.py`, `bf16_optimizer.py`, `stage3.py`) for
the buffers of its engine.

P values are trained and F are frozen; N ranks share them, and the compute dtype has c bytes. Where
ranks split matrices, P and F count one rank's parts, and N the ranks with the same part. What comes
and goes in a backward pass is followed from stage 2 on, gradient by gradient; an exchange is the
sum of a step, however DeepSpeed fills buckets. tests/ranks/test_deepspeed_plan.py compares both
with runs.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, cast

from open_instruct.config.sections import ParallelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.models.hf.names import is_of_adapter
from open_instruct.parallel.layout import divisors
from open_instruct.planning.memory.forward_backward import (
    GATHERED,
    GRADIENTS,
    REDUCED,
    TEMPORARIES,
    Moment,
    Passes,
)
from open_instruct.planning.memory.phases import BUFFERS, OPTIMIZER, PARAMETERS, Moments
from open_instruct.planning.memory.state import (
    ADAMW_MOMENTS,
    GRADIENT_BYTES,
    MASTER_BYTES,
    MOMENT_BYTES,
)
from open_instruct.planning.plan import Backend, Setting, Way
from open_instruct.planning.subject.model import ModelShape, ParameterShape, Unit
from open_instruct.planning.subject.workload import Workload
from open_instruct.planning.traffic import (
    Calls,
    Collective,
    Exchange,
    along,
    context_calls,
    exchange_in,
    scoring_pass,
)
from open_instruct.training.deepspeed.settings import zpg_of

# DeepSpeed's own sizes, in values; a test holds them equal.
BUCKET = 500_000_000  # `reduce_bucket_size`, and stage 0's `MEMORY_OPT_ALLREDUCE_SIZE`
# Whole at stage 3 (`stage3_max_live_parameters`), and stepped (`sub_group_size`).
MOST_AT_ONCE = 1_000_000_000
SMALL = 100_000  # what stays whole at stage 3 (`stage3_param_persistence_threshold`)


class ZeroMoments(Moments):
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
        self.own = [-(-size // self.num_ranks) for size in trained]
        self.touched = min(self.num_trained, sum(self.own) + self.largest)
        # `BF16_Optimizer` is stage 1 in bfloat16, without host memory.
        self.is_flat = self.stage == 1 and self.c < MASTER_BYTES and not flags.adam_offload
        self.device, self.host = self._state(on_cuda=workload.on_cuda)
        self.buffer_bytes = self.device[BUFFERS]
        # Stage 3 and `BF16_Optimizer` have buffers for them in float32; all others are freed in the
        # step.
        in_buffer = self.device[GRADIENTS] if self.stage == 3 else 0
        self.kept_gradients = GRADIENT_BYTES * self.num_trained if self.is_flat else in_buffer
        super().__init__(shape, layout, workload)

    def _state(self, *, on_cuda: bool) -> tuple[Counter[str], Counter[str]]:
        """Bytes that stay from step to step on the device and on its host, with gradients (ZeRO,
        figure 1).

        Without CUDA the device is the host.
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
        # Compute weights are shared at stage 3, but for small ones; at stage 0 they are the float32
        # weights.
        weights[PARAMETERS] += c * (F, P + F, P + F, own - (-F // self.num_ranks))[stage]
        if stage == 3 and self.num_ranks > 1:
            device[PARAMETERS] += c * sum(size for size in self.sizes.values() if size <= SMALL)
        # Gradients are shared from stage 2 on, in float32 by whole parameters. BF16_Optimizer has
        # them in both dtypes.
        gradients = optimizer if stage == 3 or (stage == 2 and is_exact) else device
        gradients[GRADIENTS] += (
            GRADIENT_BYTES * (P, P, self.touched if is_exact else own, own)[stage]
        )
        if self.is_flat:
            device[GRADIENTS] += c * P
        if stage == 3:
            device[BUFFERS] += GRADIENT_BYTES * BUCKET
        if self.flags.adam_offload:
            host[GRADIENTS] += GRADIENT_BYTES * own  # those that it steps with
        if self.flags.adam_offload and stage < 3:
            device[BUFFERS] += c * self.largest  # on the way to the host
            # The part that it stepped, and one on its way back.
            host[PARAMETERS] += c * (own + self.largest)
        return (device, host) if on_cuda else (device + host, Counter())

    def step(self) -> Iterator[Moment]:
        """The moment of the step: below stage 2 gradients are reduced first; the optimizer copies
        its part of them.

        Stage 2 has that part in one piece, if not in float32; there the norm of each parameter, in
        float64, needs most.
        """
        own = sum(self.own)
        copies = self.stage > 0 and not self.flags.adam_offload and not self.is_flat
        reduced = (
            min(self.num_trained, BUCKET),
            0 if self.is_flat else max(BUCKET, self.touched),
            0,
            0,
        )[self.stage]
        copied = MASTER_BYTES * min(own, MOST_AT_ONCE) if copies else 0
        if copied and self.stage == 2 and self.c < MASTER_BYTES:
            copied = 2 * MASTER_BYTES * min(own, self.largest)  # `get_norm_dtype`
        made = 0 if self.workload.on_cuda else 2 * (own if self.stage else self.largest)
        yield self.held(self.gradients) | {
            REDUCED: GRADIENT_BYTES * reduced,
            TEMPORARIES: copied + MASTER_BYTES * made,
        }

    def state_bytes(self) -> tuple[int, int, int]:
        return self.device[PARAMETERS], self.device[GRADIENTS], self.device[OPTIMIZER]

    def beside(self, shape: ModelShape, workload: Workload) -> Moments:
        return ZeroMoments(self.flags, shape, self.layout, workload)

    def state_on_host(self) -> dict[str, int]:
        return self.host

    def merged_values(self) -> int:
        return self.num_trained + 2 * max(self.sizes[each.name] for each in self.shape.in_blocks)

    def passes_over(self, workload: Workload) -> Passes:
        return ZeroPasses(self, workload)


class ZeroPasses(Passes):
    """Passes with the usual activations, in which no unit is gathered or reduced by itself."""

    splits_rows = False

    def __init__(self, run: ZeroMoments, workload: Workload) -> None:
        self.run = run
        super().__init__(run.shape, run.layout, workload)
        self.is_sharded = False
        # Below stage 2 the gradients of the first microbatch are allocated one by one.
        self.accumulates |= run.stage > 1 or run.is_flat
        # At stage 1 a bucket stays until the step, at stage 2 until the end of the pass; stage 3
        # has one in any case. In float32, stage 2 has the gradients of a microbatch beside those of
        # earlier microbatches.
        apart = (
            GRADIENT_BYTES * run.touched
            if self.c == MASTER_BYTES and workload.num_microbatches > 1
            else 0
        )
        self.bucket_bytes = (
            0,
            0 if run.is_flat else GRADIENT_BYTES * BUCKET,
            self.c * BUCKET + apart,
            0,
        )[run.stage]

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
        nearby = sum(run.sizes.values()) // zpg_of(run.flags) if zpg_of(run.flags) > 1 else 0
        return self.c * (num_values + nearby) if run.stage == 3 and run.num_ranks > 1 else 0

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


def exchanges_of(run: ZeroMoments) -> Iterator[Exchange]:
    """The exchanges of one rank in one step, but for the norm, which is a few bytes."""
    work, stage = run.workload, run.stage
    num_backward = work.num_updates * work.num_microbatches
    num_forward = 0
    yield from _of_activations(run, num_backward, work.num_values, trains=True)
    for each in work.scorings:
        if each.stands_as:  # models beside the policy are FSDP2's
            yield from scoring_pass(each, run.layout, work)
        else:
            num_forward += each.num_rounds * work.num_microbatches
            yield from _of_activations(
                run, each.num_rounds * work.num_microbatches, each.num_values, trains=False
            )
    # 2 P a step, section 7.2: stage 2 all-reduces every bucket too, after every microbatch.
    num_bytes = GRADIENT_BYTES * run.num_trained * (num_backward if stage > 1 else work.num_updates)
    yield _sum(run, "gradients", "reduce_scatter" if stage == 3 else "all_reduce", num_bytes)
    if stage == 3:
        yield from _gathers(run, num_forward, num_backward)
    elif stage:
        yield _sum(
            run, "weights after the step", "all_gather", run.c * run.num_trained * work.num_updates
        )
    if stage and run.shape.adapters and work.merges_adapters:
        halves = sum(size for name, size in run.sizes.items() if is_of_adapter(name))
        yield _sum(run, "adapters, to be added", "all_reduce", GRADIENT_BYTES * halves)


def _gathers(run: ZeroMoments, num_forward: int, num_backward: int) -> Iterator[Exchange]:
    """Stage 3's gathers, 3 P (section 7.2): every pass gathers all weights; backward reuses those
    that forward kept.

    Forward keeps none if a run's first passes had no backward, since DeepSpeed plans by the order
    of those passes. Frozen weights are gathered a third time for recomputation, since modules with
    adapters ask for them one by one. With a second copy among neighbours, trained weights come from
    all ranks only the first time in an update.
    """
    work, nearby, everything = run.workload, zpg_of(run.flags), run.num_trained + run.num_frozen
    is_left = 0 if num_forward or work.reference_pass_tokens else min(everything, MOST_AT_ONCE)
    num_times = 2 + (work.checkpointing != "none" and run.num_frozen > 0)
    num_values = everything * num_forward + (everything * num_times - is_left) * num_backward
    from_all = work.num_updates * run.num_trained if nearby > 1 else num_values
    yield _sum(run, "weights, before they are needed", "all_gather", run.c * from_all)
    if nearby > 1:
        yield _sum(
            run,
            "weights, from second copies",
            "all_gather",
            run.c * (num_values - from_all),
            nearby,
        )


def _sum(run: ZeroMoments, what: str, how: Collective, num_bytes: int, within: int = 0) -> Exchange:
    return exchange_in(run.layout, "world", what, how, num_bytes, 1, within)


def _of_activations(
    run: ZeroMoments, num_passes: int, num_values: int, *, trains: bool
) -> Iterator[Exchange]:
    """AutoTP's exchanges: all-reduces of each pair's output and, backwards, of its input's
    gradient.

    A split head gathers its logits, which are computed again in the backward pass.
    """
    shape, layout, work, head = run.shape, run.layout, run.workload, run.shape.parameters[-1]
    num_rows = (work.tokens_per_microbatch, work.label_tokens_per_microbatch)
    num_tokens, num_labels = (run.c * num // layout.context_parallel_degree for num in num_rows)
    cut = Counter(each.tensor_axis for each in shape.in_blocks if len(each.shape) == 2)
    num_sums = cut[1] * (1 + trains * work.recomputes("")) + cut[0] * trains
    calls: list[Calls] = [
        ("activations of split matrices", "all_reduce", num_tokens * shape.d_model, num_sums)
    ]
    if num_values and values_of(head, layout.tensor_parallel_degree) < head.num_params:
        calls.append(
            ("activations of split matrices", "all_reduce", num_labels * shape.d_model, int(trains))
        )
        calls.append(("logits", "all_gather", num_labels * shape.vocab_size, 1 + trains))
    yield from along("tensor", calls, layout, num_passes)
    yield from along(
        "context", context_calls(shape, layout, work, num_values, trains=trains), layout, num_passes
    )


class DeepSpeed(Backend):
    """A run on ZeRO as the planner sees it."""

    def __init__(self, config: LearnerConfig) -> None:
        self.parallel = config.parallel
        self.sharing = _in_a_sentence(config.parallel)

    def moments(self, shape: ModelShape, layout: ShardLayout, workload: Workload) -> ZeroMoments:
        return ZeroMoments(self.parallel, shape, layout, workload)

    def exchanges(self, run: Moments) -> Iterator[Exchange]:
        return exchanges_of(cast(ZeroMoments, run))

    def cells(self, layout: ShardLayout) -> dict[str, object]:
        on_host = "all" if self.parallel.offload else "adam" if self.parallel.adam_offload else "-"
        return {
            "stage": self.parallel.deepspeed_stage,
            "zpg": zpg_of(self.parallel),
            "host": on_host,
        }

    def others(self, setting: Setting) -> Iterator[dict[str, Any]]:
        """Settings of every stage, with and without second copies within a node; other flags stay
        where they can.
        """
        flags, sizes = self.parallel, set(setting.layout.gpus_per_node)
        in_nodes = sizes if len(setting.layout.nodes) > 1 and len(sizes) == 1 else set()
        for stage in range(4):
            for zpg in sorted({1, flags.deepspeed_zpg} | in_nodes if stage == 3 else {1}):
                offload = {
                    "adam_offload": flags.adam_offload and stage > 0,
                    "offload": flags.offload and stage == 3,
                }
                yield {"deepspeed_stage": stage, "deepspeed_zpg": zpg} | offload

    def ways_to_need_less(self, setting: Setting) -> Iterator[Way]:
        """Later stages (kind 0), the optimizer in host memory (4), the weights too (5), then a
        tensor degree (6).
        """
        now = self.parallel
        on_host = {"adam_offload": True}
        remedies: list[tuple[int, int, dict[str, Any]]] = []
        if setting.layout.world_size > 1:
            remedies += [(0, stage, {}) for stage in range(now.deepspeed_stage + 1, 4)]
        if setting.on_cuda and not now.adam_offload:
            remedies += [(4, stage, on_host) for stage in range(max(1, now.deepspeed_stage), 4)]
        if setting.on_cuda and not now.offload:
            remedies += [(5, 3, on_host | {"offload": True})]
        degrees = divisors(setting.layout.world_size)
        remedies += [
            (6, 3, {"tensor_parallel_degree": n}) for n in degrees if n > now.tensor_parallel_degree
        ]
        for kind, stage, flags in remedies:
            yield Way(kind=kind, strength=stage, values={"deepspeed_stage": stage} | flags)


def _in_a_sentence(flags: ParallelSection) -> str:
    on_host = {"optimizer": flags.adam_offload, "weights": flags.offload}
    kept = " and ".join(name for name, is_there in on_host.items() if is_there) or "nothing"
    stage, degree = flags.deepspeed_stage, flags.tensor_parallel_degree
    shared = ("nothing", "optimizer states", "optimizer states and gradients", "everything")[stage]
    nearby = (
        f", and {zpg_of(flags)} neighbours a second copy of the weights"
        if zpg_of(flags) > 1
        else ""
    )
    who = (
        "all ranks"
        if degree == 1
        else f"{degree} neighbours split matrices, and all with the same part"
    )
    return f"DeepSpeed ZeRO-{stage}: {who} share {shared}{nearby}; in host memory: {kept}"
