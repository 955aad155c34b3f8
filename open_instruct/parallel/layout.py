"""The sharding decision: from nodes and flags to the groups that every rank belongs to.

No torch and no process group: the launcher, the planner and every rank call the same function with
the same numbers and agree. docs/sharding.md explains the vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from math import gcd, prod

from open_instruct.config.sharding_sections import DegreesSection, ParallelSection
from open_instruct.config.training import BackendRecord
from open_instruct.core.errors import InputError
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.text import join_choices, spell_count
from open_instruct.parallel.layout_warnings import find_warnings
from open_instruct.parallel.wording import CONTEXT, TENSOR

MAX_LEARNERS = 100_000


def resolve_layout(
    gpus_per_node: Sequence[int],
    *,
    fsdp_shard_degree: int | None = None,
    fsdp_num_replicas: int | None = None,
    tensor_parallel_degree: int = 1,
    context_parallel_degree: int = 1,
    expert_parallel_degree: int = 1,
    single_device: bool = False,
) -> ShardLayout:
    """Decide which ranks share a copy of the model, from degrees within their limits.

    Neither FSDP flag: the largest shard degree whose groups never straddle a node. For nodes of
    equal size that is the GPUs of a node divided by the model-parallel degree, and one replica for
    each node; for nodes of unequal size, the greatest common divisor divided by that. One flag: the
    other is inferred. Both: they make the data-parallel world.

    Args:
        gpus_per_node: processes that train on each node, in rank order.
        fsdp_shard_degree: data-parallel ranks that share one copy of the model.
        fsdp_num_replicas: copies of the model.
        tensor_parallel_degree: ranks that split every matrix.
        context_parallel_degree: ranks that split every row of tokens.
        expert_parallel_degree: ranks that split the experts of each layer; 1, or the shard degree.
        single_device: one GPU without FSDP; `parallel_problems` checks which flags may go with it.

    Returns:
        The layout; its `warnings` name what is allowed but costly.

    Raises:
        InputError: names the flag and lists the values that would work.
    """
    nodes = tuple(gpus_per_node)
    _check_nodes(nodes, single_device=single_device)
    if single_device:
        return ShardLayout(gpus_per_node=nodes, shard_degree=1, num_replicas=1, single_device=True)

    _check_model_parallel(nodes, tensor_parallel_degree, context_parallel_degree)
    shard_degree, num_replicas = _resolve_degrees(
        nodes, fsdp_shard_degree, fsdp_num_replicas, tensor_parallel_degree, context_parallel_degree
    )
    _check_experts_axis(
        expert_parallel_degree, shard_degree, tensor_parallel_degree, context_parallel_degree
    )
    layout = ShardLayout(
        gpus_per_node=nodes,
        shard_degree=shard_degree,
        num_replicas=num_replicas,
        tensor_parallel_degree=tensor_parallel_degree,
        context_parallel_degree=context_parallel_degree,
        expert_parallel_degree=expert_parallel_degree,
    )
    warnings = find_warnings(
        layout, fsdp_shard_degree=fsdp_shard_degree, fsdp_num_replicas=fsdp_num_replicas
    )
    return replace(layout, warnings=tuple(warnings))


def _check_nodes(nodes: tuple[int, ...], *, single_device: bool) -> None:
    if not nodes:
        raise InputError(
            "--gpus_per_node is empty: give the GPUs of each node, such as 8 8", kind="layout"
        )
    if sum(nodes) > MAX_LEARNERS:
        raise InputError(
            f"{sum(nodes):,} GPUs that train; at most {MAX_LEARNERS:,} can be laid out",
            kind="layout",
        )
    if single_device and sum(nodes) != 1:
        raise InputError(
            f"--single_gpu_mode trains on one GPU, not on {sum(nodes)}; start one process, or "
            "leave --single_gpu_mode out to shard the model over all of them",
            kind="layout",
        )


def find_layout(
    parallel: ParallelSection, gpus_per_node: Sequence[int], backend: BackendRecord
) -> ShardLayout:
    """The layout of a run under its backend.

    Raises:
        InputError: the flags cannot work on these nodes.
    """
    _refuse_one_rank_for_many(parallel, gpus_per_node)
    return backend.layout(parallel, gpus_per_node)


def build_layout(
    parallel: ParallelSection, gpus_per_node: Sequence[int], **backend_degrees: int | None
) -> ShardLayout:
    """The layout of the degrees of the flags, in place of which `backend_degrees` stand.

    Raises:
        InputError: see `resolve_layout`.
    """
    degrees = {each.name: getattr(parallel, each.name) for each in fields(DegreesSection)}
    degrees |= backend_degrees
    return resolve_layout(gpus_per_node, **degrees, single_device=parallel.single_gpu_mode)


def _refuse_one_rank_for_many(parallel: ParallelSection, gpus_per_node: Sequence[int]) -> None:
    """Refuse degrees above 1 for a single process with the hint that a launcher was left out."""
    degrees = parallel.splitting
    is_alone = sum(gpus_per_node) == 1 and not parallel.single_gpu_mode
    if not degrees or not is_alone or not parallel.more_ranks:
        return
    flag_words = " and ".join(f"--{name} {degree}" for name, degree in degrees.items())
    num_needed = prod(degrees.values())
    if parallel.fsdp_shard_degree:
        # Ranks that share a copy of the model are those that split its experts.
        num_needed //= parallel.expert_parallel_degree
    remedy = parallel.more_ranks.format(num_needed)
    raise InputError(
        f"{flag_words}: that takes {num_needed} processes, and there is one; {remedy}",
        kind="layout",
    )


def check_heads(
    layout: ShardLayout,
    *,
    num_heads: int,
    num_kv_heads: int,
    num_delta_heads: int,
    is_fused: bool,
    model: str,
) -> None:
    """Check that every tensor and context rank gets whole heads.

    Args:
        num_delta_heads: key heads of the layers of the gated delta rule, whose value heads are a
            multiple; 0: none.
        is_fused: whether these have one matrix for queries, keys and values.

    Raises:
        InputError: names the flags and lists the degrees that would work for `model`.
    """
    heads = f"the {num_heads} query heads and {num_kv_heads} key-value heads of {model}"
    if num_delta_heads:
        heads += f", and the {num_delta_heads} key heads of its layers of the gated delta rule"
    tensor = layout.tensor_parallel_degree
    context = layout.context_parallel_degree
    if is_fused and tensor > 1:
        raise InputError(
            f"{TENSOR} {tensor}: each head is in three places of in_proj_qkv of {model}; use 1, "
            f"or {CONTEXT} {tensor}",
            kind="layout",
        )
    num_shareable = gcd(num_heads, num_kv_heads, num_delta_heads)
    _check_product(tensor, context, what=heads, number=num_shareable)


def check_feed_forward(layout: ShardLayout, *, sizes: Collection[int], model: str) -> None:
    """Check that tensor ranks can share the hidden features of each feed-forward layer equally.

    Raises:
        InputError: names the flag and lists the degrees that would work.
    """
    degree = layout.tensor_parallel_degree
    smaller = [each for each in divisors(gcd(*sizes)) if each < degree]
    for size in sizes:
        if size % degree:
            raise InputError(
                f"{TENSOR} {degree} does not divide the {size} hidden features of a feed-forward "
                f"layer of {model}; use {join_choices(smaller)}",
                kind="layout",
            )


def check_experts(layout: ShardLayout, *, num_experts: int, model: str) -> None:
    """Check that ranks can share the experts equally, and that no matrix of theirs is split.

    Raises:
        InputError: names the flag and lists the degrees that would work.
    """
    if num_experts and layout.tensor_parallel_degree > 1:
        raise InputError(
            "--tensor_parallel_degree: experts are not split over tensor parallel ranks; use 1",
            kind="layout",
        )
    degree = layout.expert_parallel_degree
    flag_words = f"--expert_parallel_degree {degree}"
    if degree > 1 and not num_experts:
        raise InputError(
            f"{flag_words}: {model} has no experts to split; leave it out", kind="layout"
        )
    if num_experts % degree:
        raise InputError(
            f"{flag_words} does not divide the {num_experts} experts of a layer of {model}; leave "
            "it out, or give --fsdp_shard_degree the same degree, "
            f"{join_choices(divisors(num_experts))}",
            kind="layout",
        )


def _check_experts_axis(degree: int, shard_degree: int, tensor: int, context: int) -> None:
    flag_words = f"--expert_parallel_degree {degree}"
    if degree > 1 and tensor * context > 1:
        raise InputError(
            f"{flag_words} goes neither with a tensor nor with a context degree above 1: leave one "
            "of them out; GPUs that share a copy of the model split its experts",
            kind="layout",
        )
    if degree not in (1, shard_degree):
        raise InputError(
            f"{flag_words}: experts are split over the GPUs that share a copy of the model, which "
            f"are {shard_degree}; use {join_choices(sorted({1, shard_degree}))}, or "
            f"--fsdp_shard_degree {degree} with it",
            kind="layout",
        )


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending: of 12, `(1, 2, 3, 4, 6, 12)`."""
    return tuple(candidate for candidate in range(1, number + 1) if number % candidate == 0)


def _check_model_parallel(nodes: tuple[int, ...], tensor: int, context: int) -> None:
    world_size = sum(nodes)
    for name, degree in (("tensor", tensor), ("context", context)):
        check_divides(f"--{name}_parallel_degree", degree, nodes)
    _check_product(tensor, context, what=_learners(world_size), number=world_size)


def _check_product(tensor: int, context: int, *, what: str, number: int) -> None:
    """:raises InputError: the degrees do not divide the `number` of `what`; lists those that do."""
    if number % (tensor * context):
        raise InputError(
            f"{TENSOR} {tensor} x {CONTEXT} {context} = {tensor * context} does not divide "
            f"{what}; their product can be {join_choices(divisors(number))}",
            kind="layout",
        )


def check_divides(flag: str, degree: int, nodes: tuple[int, ...]) -> None:
    """:raises InputError: `degree` does not divide the number of learners; lists those that do."""
    world_size = sum(nodes)
    if world_size % degree:
        ways = _within_and_across(divisors(world_size), nodes)
        raise InputError(
            f"{flag} {degree} does not divide {_learners(world_size)}; use {ways}", kind="layout"
        )


def _resolve_degrees(
    nodes: tuple[int, ...],
    shard_degree: int | None,
    num_replicas: int | None,
    tensor: int,
    context: int,
) -> tuple[int, int]:
    """(shard degree, replicas), validated."""
    model_parallel = tensor * context
    dp_world = sum(nodes) // model_parallel
    if shard_degree is None and num_replicas is None:
        # Groups tile the ranks from 0 on, so none straddles exactly when the ranks of one
        # replica divide every node.
        common = gcd(*nodes)
        shard_degree = 1
        if common % model_parallel == 0:
            shard_degree = common // model_parallel
        return shard_degree, dp_world // shard_degree

    whole = _dp_world_text(sum(nodes), tensor, context)
    if shard_degree is not None and num_replicas is not None:
        if shard_degree * num_replicas != dp_world:
            pairs = join_choices(
                f"{degree} x {dp_world // degree}" for degree in divisors(dp_world)
            )
            raise InputError(
                f"--fsdp_shard_degree {shard_degree} x --fsdp_num_replicas {num_replicas} = "
                f"{shard_degree * num_replicas}, not the {whole}; use {pairs}, or give only one "
                "of the two",
                kind="layout",
            )
        return shard_degree, num_replicas
    if shard_degree is not None:
        _check_divides_dp_world("--fsdp_shard_degree", shard_degree, dp_world, whole)
        return shard_degree, dp_world // shard_degree
    assert num_replicas is not None
    _check_divides_dp_world("--fsdp_num_replicas", num_replicas, dp_world, whole)
    return dp_world // num_replicas, num_replicas


def _check_divides_dp_world(flag: str, degree: int, dp_world: int, whole: str) -> None:
    if dp_world % degree:
        raise InputError(
            f"{flag} {degree} does not divide {whole}; use {join_choices(divisors(dp_world))}",
            kind="layout",
        )


def _learners(world_size: int) -> str:
    return spell_count(world_size, "learner GPU")


def _dp_world_text(world_size: int, tensor: int, context: int) -> str:
    if tensor * context == 1:
        return _learners(world_size)
    factors = [_learners(world_size)]
    if tensor > 1:
        factors.append(f"tensor degree {tensor}")
    if context > 1:
        factors.append(f"context degree {context}")
    dp_world = spell_count(world_size // (tensor * context), "data-parallel rank")
    return f"{dp_world} ({' / '.join(factors)})"


def _within_and_across(degrees: Sequence[int], nodes: tuple[int, ...]) -> str:
    """The degrees that work, in words; those that keep groups within a node come first."""
    within = [degree for degree in degrees if gcd(*nodes) % degree == 0]
    across = [degree for degree in degrees if degree not in within]
    if not across:
        return join_choices(within)
    return f"{join_choices(within)} (within a node), or {join_choices(across)} (across nodes)"
