"""Traffic on links and arithmetic, by numbers that can be worked out by hand."""

from dataclasses import replace

import pytest

from open_instruct.batching.prefixes import FullRows
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.parallel.layout import resolve_layout
from open_instruct.planning.exchanges import Calls, build_exchange, group_span, ring_bytes
from open_instruct.planning.step_time import StepTime, attended_pairs, flops_per_step, gb_per_second
from open_instruct.planning.step_time import step_time as step_time_of
from open_instruct.planning.subject.devices import DEVICES, Device, find_device, find_gpu
from open_instruct.planning.subject.model import Adapters, LayerShape, ModelShape
from open_instruct.planning.subject.workload import Scoring, Workload
from open_instruct.planning.traffic import traffic_per_step, weight_sync_traffic
from tests.refusals import refused

# 2 layers of width 4: 3 x 4 x 8 numbers in the feed-forward, 4 x 4 x 4 in attention, 160 in all;
# vocabulary of 10.
SHAPE = ModelShape(
    name="hand",
    family="llama",
    d_model=4,
    layers=(LayerShape(d_ff=8), LayerShape(d_ff=8, window=2)),
    num_heads=2,
    num_kv_heads=2,
    head_dim=2,
    turned_dim=2,
    vocab_size=10,
    is_tied=False,
)
# Two documents of 3 tokens, 4 labels.
WORK = Workload(
    algorithm="dpo",
    tokens_per_microbatch=6,
    rows=FullRows(length=3),
    label_tokens_per_microbatch=4,
    num_microbatches=1,
)
# Of 2 products, 4 features: 6 pairs for each document without a window, 5 with one of 2 tokens.
ATTENTION = (2 * 4 * 2 * (2 * 6), 2 * 4 * 2 * (2 * 5))
MATRICES = 2 * 160 * 6
HEAD = 2 * 4 * 10 * 4
FORWARD = 2 * MATRICES + sum(ATTENTION) + HEAD
ALONE = resolve_layout([1], single_device=True)
SLOW = Device(name="slow", memory_gib=1, peak_tflops_bf16=1, in_node_gb_s=100, cross_node_gb_s=10)


def step_time(
    shape: ModelShape, layout: ShardLayout, workload: Workload, device: Device, *, mfu: float
) -> StepTime:
    exchanges = traffic_per_step(shape, layout, workload)
    return step_time_of(shape, layout, workload, device, exchanges=exchanges, mfu=mfu)


def test_frozen_matrix_has_no_gradient_of_its_own() -> None:
    """Adapters of rank 3 beside w_q of both layers: 3 x (4 + 4) numbers each."""
    frozen = replace(SHAPE, adapters=Adapters(rank=3, modules=("attention.w_q",)))
    of_adapters = 2 * 2 * 24 * 6
    assert flops_per_step(frozen, ALONE, WORK) == 3 * (FORWARD + of_adapters) - 2 * MATRICES - HEAD
    with_head = replace(frozen, scores=True)
    one_row = HEAD // 10
    assert (
        flops_per_step(with_head, ALONE, WORK)
        == 3 * (FORWARD - HEAD + one_row + of_adapters) - 2 * MATRICES
    )


def test_ring() -> None:
    assert ring_bytes("all_gather", 800, 8) == 700
    assert ring_bytes("reduce_scatter", 800, 8) == 700
    assert ring_bytes("all_to_all", 800, 8) == 700
    assert ring_bytes("all_reduce", 800, 8) == 1400
    assert ring_bytes("all_reduce", 800, 1) == 0


def test_groups_on_nodes() -> None:
    """Two nodes of 8, tensor degree 2: (size, whether they cross nodes, fewest ranks on a node)."""
    within = resolve_layout([8, 8], tensor_parallel_degree=2)
    assert group_span(within, "tensor") == (2, False, 1)
    assert group_span(within, "shard") == (4, False, 1)
    assert group_span(within, "replica") == (2, True, 1)
    assert group_span(within, "world") == (8, True, 4)
    across = resolve_layout([8, 8], tensor_parallel_degree=2, fsdp_shard_degree=8)
    assert group_span(across, "shard") == (8, True, 4)
    # A group of 6 over nodes of 2 and 4.
    assert group_span(resolve_layout([2, 4], fsdp_shard_degree=6), "shard") == (6, True, 2)


def test_group_on_two_nodes_uses_the_port_of_each_of_its_gpus() -> None:
    def speed(layout_flags: dict[str, int], axis: str) -> float:
        layout = resolve_layout([16, 16], **layout_flags)
        calls = Calls(what="", collective="all_gather", num_bytes=32, num_calls=1)
        return gb_per_second(build_exchange(layout, axis, calls), SLOW)  # type: ignore[arg-type]

    assert speed({}, "shard") == 100
    assert speed({}, "replica") == 10
    assert speed({"tensor_parallel_degree": 4, "fsdp_shard_degree": 8}, "shard") == 40
    # 16 ports are faster than the link to them.
    assert speed({"fsdp_shard_degree": 32}, "shard") == 100


def test_pairs_of_causal_attention() -> None:
    assert attended_pairs(3, None) == attended_pairs(3, 3) == attended_pairs(3, 5) == 6
    assert attended_pairs(3, 2) == 5
    assert attended_pairs(3, 1) == 3
    assert attended_pairs(0, None) == attended_pairs(0, 2) == 0


def test_arithmetic_of_training() -> None:
    assert flops_per_step(SHAPE, ALONE, WORK) == 3 * FORWARD
    assert flops_per_step(SHAPE, ALONE, replace(WORK, num_microbatches=4)) == 12 * FORWARD
    in_float8 = replace(WORK, multiplies_in_float8=True)
    assert flops_per_step(SHAPE, ALONE, in_float8) == 3 * (FORWARD - MATRICES)
    by_policy, by_reference = (
        Scoring(shape=SHAPE, stands_as=stands_as) for stands_as in ("", "reference policy")
    )
    scored = replace(in_float8, scorings=(by_policy, by_reference))
    assert flops_per_step(SHAPE, ALONE, scored) == 4 * (FORWARD - MATRICES) + FORWARD


def test_arithmetic_of_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    full = replace(WORK, checkpointing="full")
    assert flops_per_step(SHAPE, ALONE, full) == 4 * FORWARD - HEAD
    of_one = replace(
        WORK, checkpointing="selected_modules", checkpointing_modules=("blocks.*.attention",)
    )
    assert flops_per_step(SHAPE, ALONE, of_one) == 3 * FORWARD + 2 * (2 * 64 * 6) + sum(ATTENTION)
    # Two labels a chunk, of which a GPU keeps the product for none, one, or both.
    monkeypatch.setattr("open_instruct.planning.memory.head.MAX_LOGITS_BYTES", 2 * 4 * 10)
    for num_kept_bytes, again in ((0, HEAD), (2 * 10 * 2, HEAD // 2), (1 << 30, 0)):
        monkeypatch.setattr("open_instruct.planning.memory.head.MAX_KEPT_BYTES", num_kept_bytes)
        assert flops_per_step(SHAPE, ALONE, WORK) == 3 * FORWARD + again
        assert flops_per_step(SHAPE, ALONE, replace(WORK, on_cuda=False)) == 3 * FORWARD + HEAD


def test_arithmetic_of_a_shared_prompt() -> None:
    """Two documents of 3 tokens that share the first lie in 5; that one attends to itself once."""
    shared = replace(WORK, tokens_per_microbatch=5, rows=FullRows(length=3, prefix=1, per_group=2))
    attention = sum(2 * 4 * 2 * (pairs - 1) for pairs in (12, 10))
    assert flops_per_step(SHAPE, ALONE, shared) == 3 * (2 * 2 * 160 * 5 + attention + HEAD)
    assert shared.row_tokens_per_microbatch == 6


def test_arithmetic_under_tensor_parallelism() -> None:
    """Half of everything; the head runs at all six positions."""
    layout = resolve_layout([2], tensor_parallel_degree=2)
    assert flops_per_step(SHAPE, layout, WORK) == 3 * (FORWARD - HEAD + 2 * 4 * 10 * 6) // 2


def test_arithmetic_of_log_probs_that_are_fixed() -> None:
    """Six updates of two mini-batches, each of which the policy and a teacher of other width see
    once.
    """
    wide = replace(SHAPE, layers=(LayerShape(d_ff=16), LayerShape(d_ff=16, window=2)))
    scorings = (
        Scoring(shape=SHAPE, num_rounds=2),
        Scoring(shape=wide, stands_as="teacher", num_rounds=2),
    )
    of_wide = FORWARD + 2 * 2 * (3 * 4 * 8) * 6
    grpo = replace(WORK, num_updates=6, scorings=scorings)
    assert flops_per_step(SHAPE, ALONE, grpo) == (6 * 3 + 2) * FORWARD + 2 * of_wide
    # A head that is run in the forward and in the backward pass of the policy's.
    distill = replace(WORK, scorings=(Scoring(shape=wide, stands_as="teacher", num_values=0),))
    assert flops_per_step(SHAPE, ALONE, distill) == 3 * FORWARD + of_wide + HEAD
    # The pass of a reference over the data is made before the first step.
    assert flops_per_step(SHAPE, ALONE, replace(WORK, reference_pass_tokens=6)) == 3 * FORWARD


def test_time_of_a_step_by_hand() -> None:
    """Blocks have 160 matrix numbers and two norms of 4; shards are float32 when reduced, bfloat16
    when gathered.
    """
    layout = resolve_layout([2, 2])
    block, embeddings, root = 168, 40, 44
    gathered = 2 * (2 * 2 * block + 2 * root + embeddings)
    reduced = 4 * (2 * block + root + embeddings)
    num_tensors = 2 * 9 + 3
    in_node = gathered / 2 + reduced / 2 + 2 * (4 * num_tensors) / 2
    # Of the replicas' ranks one stands on each node.
    bound = step_time(SHAPE, layout, WORK, SLOW, mfu=0.5)
    assert bound.compute_s == pytest.approx(3 * FORWARD / 0.5e12)
    assert bound.in_node_s == pytest.approx(in_node / 100e9)
    assert bound.cross_node_s == pytest.approx(reduced / 2 / 10e9)
    assert bound.waiting_s == 0
    assert bound.step_s == bound.cross_node_s and bound.bound_by == "traffic across nodes"


def test_tensor_exchanges_are_waited_for() -> None:
    """Of 6 tokens, 4 features: forward and back 2 exchanges for each of 4 sublayers, the embeddings
    and the head.
    """
    layout = resolve_layout([2], tensor_parallel_degree=2)
    hidden, logits, norms = 6 * 4 * 2, 6 * 10 * 2 // 2, 5 * 4 * 2
    sent = hidden / 2 * (4 * 4 + 2 + 2) + logits / 2 * 2 + norms + 6 * 4 / 2
    bound = step_time(SHAPE, layout, WORK, SLOW, mfu=1.0)
    num_tensors = 2 * 9 + 3
    assert bound.waiting_s == pytest.approx((sent + 4 * num_tensors) / 100e9)
    assert bound.step_s == bound.compute_s + bound.waiting_s


def test_step_time_names_what_bounds_it() -> None:
    def of(compute_s: float, in_node_s: float, cross_node_s: float) -> StepTime:
        return StepTime(
            compute_s=compute_s, in_node_s=in_node_s, cross_node_s=cross_node_s, waiting_s=0.0
        )

    assert of(3, 2, 1).bound_by == "arithmetic"
    assert of(1, 3, 2).bound_by == "traffic within nodes"
    assert of(1, 2, 3).bound_by == "traffic across nodes"
    waiting = StepTime(compute_s=2, in_node_s=3, cross_node_s=0, waiting_s=2)
    assert (waiting.bound_by, waiting.step_s) == ("arithmetic", 4)


def test_single_device_exchanges_nothing() -> None:
    assert traffic_per_step(SHAPE, ALONE, WORK) == ()


def test_weights_in_memory_that_engines_share_are_not_sent() -> None:
    assert weight_sync_traffic([(80, 160)], replace(WORK, num_engines=2, sync_backend="shm")) == ()


def test_devices() -> None:
    assert find_device("H100") == DEVICES["h100"]
    own = find_device("memory_gib=40")
    assert own.memory_gib == 40 and own.peak_tflops_bf16 == DEVICES["h100"].peak_tflops_bf16
    assert all(device.in_node_gb_s > device.cross_node_gb_s for device in DEVICES.values())


@pytest.mark.parametrize(
    ("driver", "name", "memory_gib", "tflops"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090", 24, 165),
        ("NVIDIA GeForce RTX 5090", "rtx5090", 32, 210),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada", 48, 364),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx6000-blackwell", 96, 504),
        ("NVIDIA L40S", "l40s", 48, 362),
        ("NVIDIA A10G", "a10g", 24, 70),
        ("Tesla V100-SXM2-32GB", "v100", 32, 16),
        ("AMD Instinct MI300X", "mi300x", 192, 1307),
        ("NVIDIA H100 80GB HBM3", "h100", 80, 989),
    ],
)
def test_gpu_is_found_by_what_its_driver_calls_it(
    driver: str, name: str, memory_gib: float, tflops: float
) -> None:
    """Programs get a little less memory than the data sheet says."""
    device = find_gpu(driver)
    assert device is not None and device == find_device(name) == DEVICES[name]
    assert 0.89 * memory_gib < device.memory_gib < memory_gib
    assert device.peak_tflops_bf16 == pytest.approx(tflops, rel=0.03)
    assert device.has_bf16 == (name != "v100")


@pytest.mark.parametrize(
    "driver", ["NVIDIA RTX A6000", "Quadro RTX 6000", "NVIDIA A10", "Tesla T4"]
)
def test_gpu_that_is_none_of_ours_is_not_taken_for_one(driver: str) -> None:
    assert find_gpu(driver) is None


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("RTX 4090", "rtx4090"),
        ("5090", "rtx5090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("rtx pro 6000 blackwell", "rtx6000-blackwell"),
    ],
)
def test_gpu_is_named_in_its_makers_spelling_too(spelling: str, name: str) -> None:
    assert find_device(spelling) == DEVICES[name]


def test_processes_share_a_cpu() -> None:
    alone, shared = find_device("cpu"), find_device("CPU", num_sharing=4)
    assert alone.is_cpu and not DEVICES["h100"].is_cpu
    assert shared.memory_gib == alone.memory_gib / 4
    assert shared.peak_tflops_bf16 == alone.peak_tflops_bf16 / 4 > 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h10", "GiB: memory_gib=40; did you mean h100?"),
        ("tpu", "--gpu tpu: known are a100, h100, h200, b200, mi300x, rtx4090"),
        ("RTX 6000", "rtx6000-ada, rtx6000-blackwell"),
        ("memory_gib=many", "--gpu memory_gib=many: known are a100"),
        ("memory_gib=inf", "give its memory, above 0"),
        ("memory_gib=1e308", "above 0 and at most 1,000,000 GiB: memory_gib=40"),
    ],
)
def test_devices_that_cannot_be(name: str, says: str) -> None:
    with refused("bad_value", "gpu") as error:
        find_device(name)
    assert says in str(error.value)
