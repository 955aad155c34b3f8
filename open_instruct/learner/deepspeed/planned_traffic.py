"""What ranks exchange in a step under ZeRO, as a plan counts it. Without torch, and without DeepSpeed.

tests/ranks/test_deepspeed_plan.py compares the sums with those of a run. How gradients and weights are spread over
calls is not followed: buckets are counted as full ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from open_instruct.learner.deepspeed.planned_memory import UNSHARED_BUCKET, SplitShape, ZeroMoments
from open_instruct.models.hf.names import is_of_adapter
from open_instruct.planning.memory.activations import logit_chunks
from open_instruct.planning.subject.workload import Workload
from open_instruct.planning.traffic.collectives import Collective, Exchange, exchange_in
from open_instruct.planning.traffic.model_parallel import Calls, along, context_calls, is_recomputed
from open_instruct.planning.traffic.per_step import forward_passes
from open_instruct.records import ShardLayout

FLOAT32 = 4


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
    if moments.zero.stage == 3:
        yield from _gathers(moments)
    yield from _of_update(moments)


def _of_update(moments: ZeroMoments) -> Iterator[Exchange]:
    """Gradients, and the weights that ranks have a part of each. Not the norm, which is a few bytes."""
    shares, zero, work = moments.shares, moments.zero, moments.workload
    keeps_all = zero.stage == 0 or zero.adds_up_flat(work.compute_bytes)
    bucket = FLOAT32 * (UNSHARED_BUCKET if keeps_all else zero.reduce_bucket_size)
    num_values = shares.own * shares.num_ranks if zero.stage == 3 else shares.shape.num_trained
    how: Collective = "reduce_scatter" if zero.stage == 3 else "all_reduce"
    num_times = work.num_updates * (work.num_microbatches if zero.stage > 1 else 1)
    for num_bytes, count in in_buckets(FLOAT32 * num_values, bucket).items():
        yield exchange_in(moments.layout, "world", "gradients", how, num_bytes, num_times * count)
    whole = shares.persistent if zero.stage == 3 else [shares.shape.num_trained] * (zero.stage > 0)
    for size, count in Counter(whole if shares.num_ranks > 1 else ()).items():
        num_bytes, num_calls = work.compute_bytes * size, work.num_updates * count
        yield exchange_in(moments.layout, "world", "weights after the step", "all_gather", num_bytes, num_calls)


def in_buckets(num_bytes: int, bucket: int) -> Counter[int]:
    """How many calls of how many bytes: full buckets, and one with what is left."""
    full, rest = divmod(num_bytes, bucket)
    return +Counter({bucket: full, rest: int(rest > 0)})


def exchanges_of_merging(moments: ZeroMoments) -> Iterator[Exchange]:
    """Both halves of each adapter come together on every rank, to be added to what that has of the matrix."""
    halves = [each.num_params for each in moments.shape.parameters if is_of_adapter(each.name)]
    for size, count in Counter(halves if moments.zero.stage else []).items():
        yield exchange_in(moments.layout, "world", "adapters, to be added", "all_reduce", FLOAT32 * size, count)


def _gathers(moments: ZeroMoments) -> Iterator[Exchange]:
    """Every pass gathers all weights, and each pass backward once more, but for what is left of the pass forward.

    Nothing is left where a run's first passes went forward alone: what may be let go of was worked out by their order.
    Frozen weights are gathered a third time to be recomputed, since modules with adapters ask for them one by one.
    What neighbours have a second copy of comes from there, of what is trained after the first time in an update.
    """
    shares, work, nearby = moments.shares, moments.workload, moments.zero.nearby
    trained, frozen = shares.gathered(trained=True), shares.gathered(trained=False)
    num_forward = sum(each.num_rounds for each in work.scorings if not each.stands_as)
    goes_back_first = not work.reference_pass_tokens and not num_forward
    is_left = min(trained + frozen, moments.zero.max_live_parameters) if goes_back_first else 0
    num_passes = num_forward + 2 + (work.checkpointing != "none" and frozen > 0)
    gathered = work.num_microbatches * (num_passes * (trained + frozen) - is_left)
    from_copies = gathered - trained if nearby > 1 else 0
    sources = (
        ("weights, before they are needed", gathered - from_copies, 0),
        ("weights, from second copies", from_copies, nearby),
    )
    bucket = work.compute_bytes * moments.zero.prefetch_bucket_size
    for what, num_values, within in sources:
        for num_bytes, count in in_buckets(work.compute_bytes * num_values, bucket).items():
            yield exchange_in(moments.layout, "world", what, "all_gather", num_bytes, count * work.num_updates, within)


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
