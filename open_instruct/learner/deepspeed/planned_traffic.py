"""Every collective of a step under ZeRO, as a plan counts them: those that DeepSpeed issues, call for call.

Without torch, and without DeepSpeed. tests/ranks/test_deepspeed_plan.py runs it and compares. Not exact is how a
parameter is cut that is larger than a bucket, and what is gathered where chosen modules are recomputed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from open_instruct.learner.deepspeed.gathering import HEAD, Modules
from open_instruct.learner.deepspeed.planned_memory import UNSHARED_BUCKET, ZeroMoments
from open_instruct.learner.deepspeed.planned_state import Shares
from open_instruct.planning.traffic.collectives import Collective, Exchange, exchange_in
from open_instruct.planning.traffic.model_parallel import activation_exchanges
from open_instruct.planning.traffic.per_step import forward_passes, metrics_exchanges

FLOAT32, FLOAT64 = 4, 8


def exchanges_of(moments: ZeroMoments) -> Iterator[Exchange]:
    """Those of one rank in one step."""
    shape, layout, workload, zero = moments.shape, moments.layout, moments.workload, moments.zero
    num_updates, num_microbatches = workload.num_updates, workload.num_microbatches
    num_passes = num_updates * num_microbatches
    for scoring in workload.scorings:
        if scoring.stands_as:  # beside the policy, and FSDP2's
            yield from forward_passes(scoring, layout, workload)
        else:
            passes = scoring.num_rounds * num_microbatches
            yield from activation_exchanges(shape, layout, workload, passes, scoring.num_values, trains=False)
    yield from activation_exchanges(shape, layout, workload, num_passes, workload.num_values, trains=True)
    means, sums, maxima = workload.num_metrics
    # The norm of the gradient is no metric that ranks bring together: DeepSpeed tells each.
    yield from metrics_exchanges(layout, replace(workload, num_metrics=(means, sums, maxima - 1)))

    def in_world(what: str, collective: Collective, sizes: Iterable[int], times: int) -> Iterator[Exchange]:
        for num_bytes, count in Counter(sizes).items():
            yield exchange_in(layout, "world", what, collective, num_bytes, times * count)

    c, shares = workload.compute_bytes, moments.shares
    # At stage 3 a norm is a float64, unless the host adds it up.
    norms = [FLOAT64 if zero.stage == 3 and not zero.optimizer_on_host else FLOAT32] * len(shares.groups)
    if zero.stage == 3:
        yield from _gathers(moments)
        order = _backward_order(shares, heads_together=True)
        cut = _buckets([(size, shares.part(size)) for size in order], zero.reduce_bucket_size)
        whole = [FLOAT32 * shares.world_size * part for part in cut]
        yield from in_world("gradients", "reduce_scatter", whole, num_passes)
        yield from in_world("norm of the gradient", "all_reduce", norms, num_updates)
        sizes = [c * shares.world_size * shares.part(size) for size in shares.persistent]
        yield from in_world("weights that stay whole", "all_gather", sizes, num_updates)
        return
    if zero.stage == 0 or zero.adds_up_flat(c):
        order = [each.num_params for each in shape.parameters] if zero.stage == 0 else list(shares.flat)
        yield from in_world("gradients", "all_reduce", _filled(order, UNSHARED_BUCKET), num_updates)
    else:
        order = [size for group in shares.groups for _, size in group]
        order, times = (_backward_order(shares), num_passes) if zero.stage == 2 else (order, num_updates)
        sizes = [FLOAT32 * size for size in _buckets([(size, size) for size in order], zero.reduce_bucket_size)]
        yield from in_world("gradients", "all_reduce", sizes, times)
        if c < FLOAT32:
            yield from in_world("whether gradients are finite", "all_reduce", [1], num_updates)
        yield from in_world("norm of the gradient", "all_reduce", norms, num_updates)
    if zero.stage and layout.world_size > 1:
        yield from in_world("weights after the step", "all_gather", [c * size for size in shares.flat], num_updates)


def _gathers(moments: ZeroMoments) -> Iterator[Exchange]:
    shares, c = moments.shares, moments.workload.compute_bytes
    sizes = {parameter.name: parameter.num_params for parameter in moments.shape.parameters}
    calls = Counter(
        (c * shares.world_size * sum(shares.part(sizes[name]) for name in call.parameters), call.is_nearby)
        for call in moments.gathered.calls
    )
    for (num_bytes, is_nearby), count in calls.items():
        what = "weights, from second copies" if is_nearby else "weights, before they are needed"
        num_calls, nearby = count * moments.workload.num_updates, moments.zero.nearby if is_nearby else 0
        yield exchange_in(moments.layout, "world", what, "all_gather", num_bytes, num_calls, nearby)


def _backward_order(shares: Shares, *, heads_together: bool = False) -> list[int]:
    """Sizes of parameters as their gradients come; those of the head may come together, in the optimizer's order."""
    modules, of_optimizer = Modules(shape=shares.shape), [name for group in shares.groups for name, _ in group]
    entered = dict.fromkeys(visit.module for visit in modules.backward() if visit.is_entered)
    of_head = [name for name in reversed(modules.own[HEAD]) if name.startswith(HEAD)]
    if heads_together:
        of_head.sort(key=of_optimizer.index)
    others = [name for module in entered if module != HEAD for name in modules.own.get(module, ())]
    return [modules.sizes[name] for name in (*of_head, *others)]


def _buckets(sizes: Sequence[tuple[int, int]], bucket: int) -> Iterator[int]:
    """Sums of the second ones, a bucket each: it is sent when the next of the first ones does not fit into it."""
    filled, total = 0, 0
    for size, counted in sizes:
        if filled and filled + size > bucket:
            yield total
            filled, total = 0, 0
        filled, total = filled + size, total + counted
    if filled:
        yield total


def _filled(sizes: Sequence[int], bucket: int) -> Iterator[int]:
    """Bytes of what is collected until it is more than a bucket."""
    total = 0
    for at, size in enumerate(sizes, start=1):
        total += size
        if total > bucket or at == len(sizes):
            yield FLOAT32 * total
            total = 0
