"""The least time of a step, and of a weight sync: arithmetic, and traffic over the links.

Arithmetic runs at a share of the device's peak. A weight sync is of all weights, or of those that a
step has changed.

L layers, T tokens of a microbatch, V vocabulary.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.weight_buckets import PLACE_BYTES, ROW_BYTES
from open_instruct.models.hf.names import is_expert_stack
from open_instruct.planning.activation_traffic import num_head_positions
from open_instruct.planning.exchanges import Exchange
from open_instruct.planning.memory.head import logit_chunks, num_kept_chunks
from open_instruct.planning.memory.sync_buckets import sync_buckets
from open_instruct.planning.subject.devices import Device
from open_instruct.planning.subject.model import ModelShape, ParameterShape
from open_instruct.planning.subject.workload import Scoring, Workload

GIGA = 10**9
TERA = 10**12

# Axes whose exchanges arithmetic waits for, with their names; FSDP's exchanges overlap with it.
ON_THE_PATH = {
    "tensor": "tensor groups",
    "context": "context groups",
    "sync": "weights to the engines",
}

# Changed values of a step: in bfloat16 some hundredths of all, at a learning rate of 1e-6
# (docs/weights.md).
SHARES = (0.01, 0.04, 0.1)
# Weights in bfloat16 that one thread casts and compares (benchmarks/weight_sync.py --changes). A
# GPU compares what was sent as fast as that comes to it.
COMPARED_GB_S = 1.5
# From a host to its GPU, over 16 lanes of PCIe 5.0.
LOADED_GB_S = 64.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one GPU's arithmetic and of its traffic, within nodes and across them.

    `waiting_s` is the part of the traffic that nothing can hide: tensor and context exchanges,
    whose results the next product needs, and the weights' way to the engines, for which learners
    hold still. For GRPO all of this is the learners' part of a step; engines generate meanwhile.
    """

    compute_s: float
    in_node_s: float
    cross_node_s: float
    waiting_s: float

    @property
    def step_s(self) -> float:
        """A lower bound of the step's time: everything that can overlap does so in full."""
        return max(self._parts.values())

    @property
    def bound_by(self) -> str:
        """The name of the longest part; traffic that arithmetic waits for counts as arithmetic."""
        return max(self._parts, key=lambda name: self._parts[name])

    @property
    def _parts(self) -> dict[str, float]:
        return {
            "arithmetic": self.compute_s + self.waiting_s,
            "traffic within nodes": self.in_node_s,
            "traffic across nodes": self.cross_node_s,
        }


def step_time(
    shape: ModelShape,
    layout: ShardLayout,
    work: Workload,
    device: Device,
    exchanges: Sequence[Exchange],
    mfu: float,
) -> StepTime:
    """The bound of one step.

    Args:
        exchanges: of the step.
        mfu: share of the peak that arithmetic reaches, above 0 and at most 1. Recomputed work
            counts as work.
    """
    flops_per_second = device.peak_tflops_bf16 * TERA * mfu
    in_node = [exchange for exchange in exchanges if not exchange.crosses_nodes]
    cross_node = [exchange for exchange in exchanges if exchange.crosses_nodes]
    waiting = [exchange for exchange in exchanges if exchange.axis in ON_THE_PATH]
    return StepTime(
        compute_s=flops_per_step(shape, layout, work) / flops_per_second,
        in_node_s=transfer_seconds(in_node, device),
        cross_node_s=transfer_seconds(cross_node, device),
        waiting_s=transfer_seconds(waiting, device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCost:
    """The bytes that each receiver takes of a weight sync, and its seconds at least.

    `changed` is the share of values that travel: 1 of all, which then need not be compared.

    Example: 4% of 7.3B weights in bfloat16, `SyncCost(changed=0.04, num_bytes=1_752_000_000,
    seconds=1.44)`.
    """

    changed: float
    num_bytes: int
    seconds: float


def sync_costs(
    shape: ModelShape,
    layout: ShardLayout,
    work: Workload,
    device: Device,
    exchanges: Iterable[Exchange],
) -> Iterator[SyncCost]:
    """The costs of all weights, and of `SHARES` of them, which lie at random.

    Learners send changes while they look for more. Engines put them into a copy of all weights on
    their hosts, from which a GPU then loads all of it.

    Args:
        exchanges: of a step, with all weights.
    """
    own_bytes = 0
    all_bytes = 0
    for own_bucket_bytes, bucket_bytes in sync_buckets(shape, layout, work):
        own_bytes += own_bucket_bytes
        all_bytes += bucket_bytes
    sends = [exchange for exchange in exchanges if exchange.axis == "sync"]
    travel_s = transfer_seconds(sends, device)
    yield SyncCost(changed=1.0, num_bytes=all_bytes, seconds=travel_s)
    if work.on_cuda:
        compare_s = own_bytes / (LOADED_GB_S * GIGA)
        load_s = all_bytes / work.engine_tensor_degree / (LOADED_GB_S * GIGA)
    else:
        compare_s = own_bytes / (COMPARED_GB_S * GIGA)
        load_s = 0.0
    num_parts = len(shape.parameters) * layout.shard_group_size * layout.tensor_parallel_degree
    for share in SHARES:
        bytes_with_places = all_bytes * share * (1 + PLACE_BYTES / work.sync_bytes_per_param)
        num_bytes = num_parts * ROW_BYTES + round(bytes_with_places)
        seconds = max(compare_s, travel_s * num_bytes / all_bytes) + load_s
        yield SyncCost(changed=share, num_bytes=num_bytes, seconds=seconds)


def gb_per_second(exchange: Exchange, device: Device) -> float:
    """The bandwidth of the slowest link that the exchange uses.

    A group that crosses nodes has a ring through each of its GPUs of a node, and what goes from
    node to node takes as many ports; no GPU sends faster than its own link within the node.
    """
    if not exchange.crosses_nodes:
        return device.in_node_gb_s
    return min(device.in_node_gb_s, exchange.ranks_on_a_node * device.cross_node_gb_s)


def transfer_seconds(exchanges: Iterable[Exchange], device: Device) -> float:
    """Seconds of exchanges one after the other."""
    return sum(
        exchange.wire_bytes / (gb_per_second(exchange, device) * GIGA) for exchange in exchanges
    )


def flops_per_step(shape: ModelShape, layout: ShardLayout, workload: Workload) -> int:
    """Floating-point operations of one GPU in one step: a multiplication and an addition are two.

    Forward: 2 for each number of a matrix and token (Kaplan et al. 2020, arXiv:2001.08361, section
    2.1), and attention over the pairs that causality, documents and windows leave. Backward: twice
    that, and once for a matrix that is frozen, whose own gradient is not made. Recomputation: once
    more. Embeddings are looked up; the head runs where there are labels (under tensor parallelism
    everywhere). One in float8 counts half, as it takes half the time.
    """
    blocks = _block_flops(shape, workload)
    head = _head_flops(shape, layout, workload)
    recomputed_flops = _repeated_head_flops(shape, layout, workload, head)
    for module, flops in blocks.items():
        if workload.recomputes(module):
            recomputed_flops += flops
    # The gradients of frozen matrices, which are not made.
    num_frozen = 0
    for count, matrix in _block_matrices(shape):
        if not matrix.is_trained:
            num_frozen += count * shape.active_params(matrix)
    left_out = 2 * workload.tokens_per_microbatch * num_frozen
    if num_frozen and not shape.scores:
        left_out += head
    forward = sum(blocks.values()) + head
    num_passes = workload.num_updates * workload.num_microbatches
    total = num_passes * (3 * forward - left_out + recomputed_flops)
    for scoring in workload.scorings:
        num_passes = scoring.num_rounds * workload.num_microbatches
        total += num_passes * _scoring_flops(scoring, layout, workload)
    total //= layout.model_parallel_degree
    if workload.critic is not None:
        total += flops_per_step(workload.critic.shape, layout, workload.critic_workload)
    return total


def _repeated_head_flops(
    shape: ModelShape,
    layout: ShardLayout,
    workload: Workload,
    head_flops: int,
) -> int:
    """Operations of the head in backward, which computes logits of chunks again unless kept."""
    chunks = logit_chunks(shape, num_head_positions(layout, workload))
    if len(chunks) < 2:
        return 0
    num_kept = 0
    if workload.on_cuda and layout.tensor_parallel_degree == 1:
        num_kept = num_kept_chunks(shape, chunks, workload.compute_bytes)
    return head_flops * sum(chunks[num_kept:]) // sum(chunks)


def _scoring_flops(scoring: Scoring, layout: ShardLayout, workload: Workload) -> int:
    """Operations of a pass without gradients over a whole microbatch."""
    # A frozen model does not multiply in float8; the policy that scores does.
    in_float8 = workload.multiplies_in_float8 and not scoring.stands_as
    blocks = _block_flops(scoring.shape, replace(workload, multiplies_in_float8=in_float8))
    # A head that the policy's multiplies with runs again in the backward pass.
    num_heads = 1 if scoring.num_values else 2
    head = _head_flops(scoring.shape, layout, workload)
    return sum(blocks.values()) + num_heads * head


def attended_pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, in one causal document.

    A window counts the query itself.
    """
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _block_flops(shape: ModelShape, workload: Workload) -> dict[str, int]:
    """Operations of a forward pass of all blocks over a whole microbatch, by module."""
    num_tokens = workload.tokens_per_microbatch
    attention = 0
    feed_forward = 0
    for count, matrix in _block_matrices(shape):
        num_values = count * shape.active_params(matrix)
        if ".attention." in matrix.name:
            attention += num_values
        if ".feed_forward." in matrix.name:
            feed_forward += num_values
    num_pairs = 0
    for window, num_layers in Counter(shape.windows).items():
        num_pairs += num_layers * _count_pairs(workload, window)
    per_number = 1 if workload.multiplies_in_float8 else 2
    # Attention is two products: queries with keys, and attention weights with values.
    products = per_number * num_tokens * attention + 2 * 2 * shape.q_width * num_pairs
    for layer in shape.layers:
        if layer.delta is not None:
            products += num_tokens * layer.delta.rule_flops
    return {"attention": products, "feed_forward": per_number * num_tokens * feed_forward}


def _block_matrices(shape: ModelShape) -> Iterator[tuple[int, ParameterShape]]:
    """Matrices, and stacks of them, of the blocks: of blocks alike once, with their number."""
    for unit in shape.units:
        for parameter in unit.parameters:
            is_matrix = len(parameter.shape) == 2 or is_expert_stack(parameter.name)
            if parameter.layer is not None and is_matrix:
                yield unit.count, parameter


def _count_pairs(workload: Workload, window: int | None) -> int:
    """Pairs of queries and keys in a row: of whole groups, and of a group or document cut short."""
    groups, rest = workload.rows.fill_groups(workload.tokens_per_microbatch)
    # A shared prefix attends to itself once for its group.
    prefix_pairs = attended_pairs(workload.rows.prefix, window)
    own_pairs = attended_pairs(workload.rows.length, window) - prefix_pairs
    group_pairs = len(groups) * prefix_pairs + sum(groups) * own_pairs
    return group_pairs + attended_pairs(rest, window)


def _head_flops(shape: ModelShape, layout: ShardLayout, workload: Workload) -> int:
    """Operations of a forward pass of the head over a whole microbatch."""
    num_positions = workload.label_tokens_per_microbatch
    if layout.tensor_parallel_degree > 1:
        num_positions = workload.tokens_per_microbatch
    return 2 * shape.d_model * shape.num_outputs * num_positions
