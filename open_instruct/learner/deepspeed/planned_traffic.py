"""Every collective of a step under ZeRO, as a plan counts them: those that DeepSpeed issues, call for call.

Without torch, and without DeepSpeed. tests/ranks/test_deepspeed_plan.py runs it and compares. Not exact is how a
parameter is cut that is larger than a bucket, and what is gathered where chosen modules are recomputed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from open_instruct.learner.deepspeed.gathering import HEAD, Modules
from open_instruct.learner.deepspeed.planned_memory import UNSHARED_BUCKET, ZeroMoments
from open_instruct.learner.deepspeed.planned_state import Shares, SplitShape
from open_instruct.models.names import is_of_adapter
from open_instruct.planning.memory.activations import logit_chunks
from open_instruct.planning.subject.workload import Workload
from open_instruct.planning.traffic.collectives import Axis, Collective, Exchange, exchange_in
from open_instruct.planning.traffic.model_parallel import Calls, along, context_calls, is_recomputed
from open_instruct.planning.traffic.per_step import forward_passes, metrics_exchanges
from open_instruct.records import ShardLayout

FLOAT32, FLOAT64 = 4, 8


def exchanges_of(moments: ZeroMoments) -> Iterator[Exchange]:
    """Those of one rank in one step."""
    layout, workload, num_updates = moments.layout, moments.workload, moments.workload.num_updates

    def of_passes(num_passes: int, num_values: int, *, trains: bool) -> Iterator[Exchange]:
        told = moments.shares.shape, layout, workload, num_values
        yield from along("tensor", _sums(*told, trains=trains), layout, num_passes)
        yield from along("context", context_calls(*told, trains=trains), layout, num_passes)

    for each in workload.scorings:  # models beside the policy are FSDP2's
        own = of_passes(each.num_rounds * workload.num_microbatches, each.num_values, trains=False)
        yield from forward_passes(each, layout, workload) if each.stands_as else own
    yield from of_passes(num_updates * workload.num_microbatches, workload.num_values, trains=True)
    means, sums, maxima = workload.num_metrics
    # The norm of the gradient is no metric that ranks bring together: DeepSpeed tells each.
    yield from metrics_exchanges(layout, replace(workload, num_metrics=(means, sums, maxima - 1)))
    if moments.zero.stage == 3:
        yield from _gathers(moments)
    for axes, what, collective, sizes, times in _of_update(moments):
        for axis, (num_bytes, count) in product(axes, Counter(sizes).items()):
            yield exchange_in(layout, axis, what, collective, num_bytes, num_updates * times * count)


def _of_update(moments: ZeroMoments) -> Iterator[tuple[Sequence[Axis], str, Collective, Iterable[int], int]]:
    """In which groups, of what, bytes of each call, and how often in an update."""
    shares, zero, c = moments.shares, moments.zero, moments.workload.compute_bytes
    own: tuple[Axis, ...] = ("world",)
    split: tuple[Axis, ...] = ("tensor",) if moments.layout.tensor_parallel_degree > 1 else ()
    keeps_all, num_parts = zero.stage == 0 or zero.adds_up_flat(c), shares.num_ranks if zero.stage == 3 else 1
    orders = {
        0: [each.num_params for each in shares.shape.parameters if each.is_trained],
        1: shares.flat if keeps_all else [size for group in shares.groups for _, size in group],
    }
    order = orders.get(zero.stage) or _backward_order(shares, heads_together=zero.stage == 3)
    in_turn = [(size, FLOAT32 * num_parts * -(-size // num_parts)) for size in order]
    sent = _buckets(in_turn, UNSHARED_BUCKET if keeps_all else zero.reduce_bucket_size, overfills=keeps_all)
    times = moments.workload.num_microbatches if zero.stage > 1 else 1
    yield own, "gradients", "reduce_scatter" if zero.stage == 3 else "all_reduce", sent, times
    if c < FLOAT32 and zero.stage < 3 and not keeps_all:
        yield own + split, "whether gradients are finite", "all_reduce", [1], 1
    # At stage 3 a norm is a float64, unless the host adds it up.
    of_group = FLOAT64 if zero.stage == 3 and not zero.optimizer_on_host else FLOAT32
    norms = [FLOAT32] if keeps_all else [of_group] * len(shares.groups)
    yield split if keeps_all else own + split, "norm of the gradient", "all_reduce", norms, 1
    if zero.stage and shares.num_ranks > 1:
        whole = [num_parts * shares.part(size) for size in shares.persistent] if zero.stage == 3 else shares.flat
        yield own, "weights after the step", "all_gather", [c * size for size in whole], 1


def exchanges_of_merging(moments: ZeroMoments) -> Iterator[Exchange]:
    """Both halves of each adapter come together on every rank, to be added to what that has of the matrix."""
    halves = [each.num_params for each in moments.shape.parameters if is_of_adapter(each.name)]
    for size, count in Counter(halves if moments.zero.stage else []).items():
        yield exchange_in(moments.layout, "world", "adapters, to be added", "all_reduce", FLOAT32 * size, count)


def _gathers(moments: ZeroMoments) -> Iterator[Exchange]:
    shares, c = moments.shares, moments.workload.compute_bytes
    parts = {each.name: shares.part(each.num_params) for each in shares.shape.parameters}
    for (names, is_nearby), count in moments.gathered.calls.items():
        what = "weights, from second copies" if is_nearby else "weights, before they are needed"
        num_bytes, nearby = c * shares.num_ranks * sum(parts[name] for name in names), moments.zero.nearby * is_nearby
        num_calls = count * moments.workload.num_updates
        yield exchange_in(moments.layout, "world", what, "all_gather", num_bytes, num_calls, nearby)


def _sums(shape: SplitShape, layout: ShardLayout, work: Workload, num_values: int, *, trains: bool) -> Iterator[Calls]:
    """AutoTP's: ranks add up what a pair of matrices puts out, and backwards what each first one makes of its input."""
    number, backward, num_norms = work.compute_bytes, int(trains), 2 * shape.num_layers
    num_tokens = work.tokens_per_microbatch // layout.context_parallel_degree
    attention_again, block_again = (backward * is_recomputed(work, module) for module in ("attention", ""))
    cut = Counter(each.tensor_axis for each in shape.parameters if each.layer == 0 and len(each.shape) == 2)
    # Recomputation stops before the last sum of a block, unless a norm comes after it.
    num_sums = cut[1] + block_again * (cut[1] if shape.is_olmo else 1)
    hidden = num_tokens * shape.d_model * number
    yield "outputs of pairs of matrices", "all_reduce", hidden, shape.num_layers * num_sums
    yield "inputs of pairs, backward", "all_reduce", hidden, shape.num_layers * cut[0] * backward
    if shape.qk_norm == "full":
        times = num_norms * (1 + backward + attention_again)
        yield "squares of queries and keys", "all_reduce", FLOAT32 * num_tokens, times
    elif shape.qk_norm == "head":
        yield "gradients of norms", "all_reduce", number * shape.head_dim, num_norms * backward
    runs_head = num_values and shape.parameters[-1].tensor_axis is not None  # that of a tied one is no parameter
    num_labels = work.label_tokens_per_microbatch // layout.context_parallel_degree
    chunks = logit_chunks(shape, num_labels) if runs_head else ()
    for positions in chunks:
        again = backward * (len(chunks) > 1)
        yield "logits", "all_gather", positions * shape.vocab_size * number, 1 + again
        yield "head, backward", "all_reduce", positions * shape.d_model * number, backward


def _backward_order(shares: Shares, *, heads_together: bool = False) -> list[int]:
    """Sizes of parameters as their gradients come; those of the head may come together, in the optimizer's order."""
    modules, of_optimizer = Modules(shape=shares.shape), [name for group in shares.groups for name, _ in group]
    entered = dict.fromkeys(visit.module for visit in modules.backward() if visit.is_entered)
    of_head = [name for name in reversed(modules.own[HEAD]) if name.startswith(HEAD) and name in of_optimizer]
    if heads_together:
        of_head.sort(key=of_optimizer.index)
    others = [name for module in entered if module != HEAD for name in reversed(modules.own.get(module, ()))]
    return [modules.sizes[name] for name in (*of_head, *others) if name in of_optimizer]


def _buckets(sizes: Sequence[tuple[int, int]], bucket: int, *, overfills: bool = False) -> Iterator[int]:
    """Sums of the second ones, a bucket each: it is sent when the next of the first ones does not fit into it.

    One that `overfills` is sent when there is more in it than fits.
    """
    filled, total = 0, 0
    for size, counted in sizes:
        if filled and filled + (0 if overfills else size) > bucket:
            yield total
            filled, total = 0, 0
        filled, total = filled + size, total + counted
    if filled:
        yield total
