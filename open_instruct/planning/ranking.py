"""Every layout that the GPUs allow, the fastest of those that fit first."""

from __future__ import annotations

from collections.abc import Iterator

from open_instruct.parallel.layout import divisors
from open_instruct.planning.plan import Plan, Setting, plan_of, tensor_degrees


def ranked_layouts(setting: Setting) -> tuple[Plan, ...]:
    """A plan for each (shard degree, replicas, tensor degree): by tokens per second, then those that do not fit.

    The other flags stay as they are, so a tensor degree makes the global batch of DPO and SFT smaller: what is
    compared is the tokens that all GPUs together learn from in a second. Empty in single_gpu_mode.
    """
    if setting.config.parallel.single_gpu_mode:
        return ()
    plans = [plan_of(candidate) for candidate in _candidates(setting)]
    return tuple(sorted(plans, key=_order))


def _order(plan: Plan) -> tuple[bool, float, bool, float]:
    if not plan.fits:
        return True, plan.peak.total_bytes, False, 0.0
    # Where arithmetic bounds them all, the one that stays in its nodes and exchanges least has most to spare.
    time = plan.time
    exchanged_s = (time.in_node_s + time.cross_node_s) / plan.tokens_per_step
    return False, -float(f"{plan.tokens_per_second:.3g}"), plan.layout.straddles_nodes, exchanged_s


def _candidates(setting: Setting) -> Iterator[Setting]:
    world_size = sum(setting.gpus_per_node)
    context = setting.config.parallel.context_parallel_degree
    for tensor in tensor_degrees(setting.shape, context):
        if world_size % (tensor * context):
            continue
        data_parallel = world_size // (tensor * context)
        for shard in divisors(data_parallel):
            yield setting.with_flags(
                {
                    "fsdp_shard_degree": shard,
                    "fsdp_num_replicas": data_parallel // shard,
                    "tensor_parallel_degree": tensor,
                }
            )
