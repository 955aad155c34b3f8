"""The traffic of a rank under DeepSpeed's ZeRO, in closed form, stage by stage.

Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), section 7, for what each stage sends.
An exchange is the sum of a step, however DeepSpeed fills buckets.
tests/ranks/test_deepspeed_plan.py compares it with runs.

P values are trained and F are frozen; N ranks share them, and the compute dtype has c bytes. Where
ranks split matrices, P and F count one rank's parts, and N the ranks with the same part.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from open_instruct.models.hf.names import is_adapter_name
from open_instruct.planning.activation_traffic import context_calls, repeat_calls
from open_instruct.planning.exchanges import Calls, Collective, Exchange, build_exchange
from open_instruct.planning.memory.state import GRADIENT_BYTES
from open_instruct.planning.traffic import scoring_pass
from open_instruct.training.deepspeed.planned_memory import (
    MOST_AT_ONCE,
    ZeroMemoryModel,
    count_rank_values,
)
from open_instruct.training.deepspeed.settings import effective_zpg


def plan_exchanges(run: ZeroMemoryModel) -> Iterator[Exchange]:
    """The exchanges of one rank in one step, but for the norm, which is a few bytes."""
    work = run.workload
    stage = run.stage
    num_backward = work.num_updates * work.num_microbatches
    num_forward = 0
    yield from _activation_exchanges(run, num_backward, work.num_values, trains=True)
    for each in work.scorings:
        if each.stands_as:  # models beside the policy are FSDP2's
            yield from scoring_pass(each, run.layout, work)
        else:
            num_passes = each.num_rounds * work.num_microbatches
            num_forward += num_passes
            yield from _activation_exchanges(run, num_passes, each.num_values, trains=False)
    # 2 P a step, section 7.2: stage 2 all-reduces every bucket too, after every microbatch.
    num_reductions = num_backward if stage > 1 else work.num_updates
    num_bytes = GRADIENT_BYTES * run.num_trained * num_reductions
    collective: Collective = "reduce_scatter" if stage == 3 else "all_reduce"
    yield _world_exchange(run, "gradients", collective, num_bytes)
    if stage == 3:
        yield from _weight_gathers(run, num_forward, num_backward)
    elif stage:
        num_bytes = run.item_bytes * run.num_trained * work.num_updates
        yield _world_exchange(run, "weights after the step", "all_gather", num_bytes)
    if stage and run.shape.adapters and work.merges_adapters:
        halves = sum(size for name, size in run.sizes.items() if is_adapter_name(name))
        num_bytes = GRADIENT_BYTES * halves
        yield _world_exchange(run, "adapters, to be added", "all_reduce", num_bytes)


def _weight_gathers(
    run: ZeroMemoryModel, num_forward: int, num_backward: int
) -> Iterator[Exchange]:
    """The gathers of stage 3, 3 P (section 7.2): every pass gathers all weights.

    Backward reuses those that forward kept. Forward keeps none if a run's first passes had no
    backward, since DeepSpeed plans by the order of those passes. Frozen weights are gathered a
    third time for recomputation, since modules with adapters ask for them one by one. With a second
    copy among neighbours, trained weights come from all ranks only the first time in an update.
    """
    work = run.workload
    num_weights = run.num_trained + run.num_frozen
    num_reused = 0
    if not num_forward and not work.reference_pass_tokens:
        num_reused = min(num_weights, MOST_AT_ONCE)
    num_times = 2
    if work.checkpointing != "none" and run.num_frozen > 0:
        num_times = 3
    num_values = num_weights * num_forward + (num_weights * num_times - num_reused) * num_backward
    neighbours = effective_zpg(run.flags)
    if neighbours == 1:
        num_bytes = run.item_bytes * num_values
        yield _world_exchange(run, "weights, before they are needed", "all_gather", num_bytes)
        return
    num_from_all = work.num_updates * run.num_trained
    num_bytes = run.item_bytes * num_from_all
    yield _world_exchange(run, "weights, before they are needed", "all_gather", num_bytes)
    num_bytes = run.item_bytes * (num_values - num_from_all)
    yield _world_exchange(run, "weights, from second copies", "all_gather", num_bytes, neighbours)


def _world_exchange(
    run: ZeroMemoryModel,
    what: str,
    how: Collective,
    num_bytes: int,
    within: int = 0,
) -> Exchange:
    """The sum of a step's exchanges of one kind among all ranks, or `within` so many neighbours."""
    calls = Calls(
        what=what,
        collective=how,
        num_bytes=num_bytes,
        num_calls=1,
    )
    return build_exchange(run.layout, "world", calls, within=within)


def _activation_exchanges(
    run: ZeroMemoryModel,
    num_passes: int,
    num_values: int,
    *,
    trains: bool,
) -> Iterator[Exchange]:
    """AutoTP's exchanges: all-reduces of each pair's output, and of its input's gradient.

    A split head gathers its logits, which are computed again in the backward pass.
    """
    shape = run.shape
    layout = run.layout
    work = run.workload
    head = shape.parameters[-1]
    degree = layout.context_parallel_degree
    token_bytes = run.item_bytes * work.tokens_per_microbatch // degree
    label_bytes = run.item_bytes * work.label_tokens_per_microbatch // degree
    cut = Counter(each.tensor_axis for each in shape.in_blocks if len(each.shape) == 2)
    num_sums = cut[1]
    if trains:
        num_sums += cut[1] * work.recomputes("") + cut[0]
    sums = Calls(
        what="activations of split matrices",
        collective="all_reduce",
        num_bytes=token_bytes * shape.d_model,
        num_calls=num_sums,
    )
    calls = [sums]
    if num_values and count_rank_values(head, layout.tensor_parallel_degree) < head.num_params:
        label_sums = replace(sums, num_bytes=label_bytes * shape.d_model, num_calls=int(trains))
        logit_gathers = Calls(
            what="logits",
            collective="all_gather",
            num_bytes=label_bytes * shape.vocab_size,
            num_calls=1 + trains,
        )
        calls += [label_sums, logit_gathers]
    yield from repeat_calls("tensor", calls, layout, num_passes)
    swaps = context_calls(shape, layout, work, num_values, trains=trains)
    yield from repeat_calls("context", swaps, layout, num_passes)
