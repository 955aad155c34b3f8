"""The traffic of a rank under DeepSpeed's ZeRO, in closed form, stage by stage.

Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), section 7, for what each stage sends.
An exchange is the sum of a step, however DeepSpeed fills buckets.
tests/ranks/test_deepspeed_plan.py compares it with runs.

P values are trained and F are frozen; N ranks share them, and the compute dtype has c bytes. Where
ranks split matrices, P and F count one rank's parts, and N the ranks with the same part.
"""

from collections import Counter
from collections.abc import Iterator

from open_instruct.models.hf.names import is_of_adapter
from open_instruct.planning.activation_traffic import Calls, context_calls, repeat_calls
from open_instruct.planning.exchanges import Collective, Exchange, build_exchange
from open_instruct.planning.memory.state import GRADIENT_BYTES
from open_instruct.planning.traffic import scoring_pass
from open_instruct.training.deepspeed.planned_memory import MOST_AT_ONCE, ZeroMemoryModel, values_of
from open_instruct.training.deepspeed.settings import zpg_of


def exchanges_of(run: ZeroMemoryModel) -> Iterator[Exchange]:
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


def _gathers(run: ZeroMemoryModel, num_forward: int, num_backward: int) -> Iterator[Exchange]:
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


def _sum(
    run: ZeroMemoryModel, what: str, how: Collective, num_bytes: int, within: int = 0
) -> Exchange:
    return build_exchange(run.layout, "world", what, how, num_bytes, 1, within)


def _of_activations(
    run: ZeroMemoryModel, num_passes: int, num_values: int, *, trains: bool
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
    yield from repeat_calls("tensor", calls, layout, num_passes)
    yield from repeat_calls(
        "context", context_calls(shape, layout, work, num_values, trains=trains), layout, num_passes
    )
