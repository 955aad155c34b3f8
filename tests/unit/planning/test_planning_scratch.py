"""Memory beside tensors: formulas against figures worked out by hand, and where a plan counts
them.
"""

from dataclasses import replace

import pytest

from open_instruct.commands.plan import parse_request
from open_instruct.parallel.layout import resolve_layout
from open_instruct.planning.memory import activations, block
from open_instruct.planning.memory.autograd_sizes import Gradient, Tape, Tensor
from open_instruct.planning.memory.parts import CUDA, INTERPRETER, SCRATCH
from open_instruct.planning.memory.scratch import (
    MIB,
    PROCESS_BYTES,
    attention_scratch,
    communicator_bytes,
    library_bytes,
)
from open_instruct.planning.plan import make_plan

HALF_A_GIB = 2**29
RING, SHARP = 24 * 12 * MIB, 16 * 2 * MIB


@pytest.mark.parametrize(
    ("heads", "dim", "num_documents", "num_bytes"),
    [
        # A row of 16,384 tokens and 128 more: 258 MiB of dQ in float32, and a number a head and
        # row.
        ((32, 32), 128, 1, 16512 * 32 * 129 * 4),
        # Behind each document.
        ((32, 32), 128, 8, 17408 * 32 * 129 * 4),
        # Eight heads of keys: gradients of keys and values for each of 32 heads, 128 MiB each.
        ((32, 8), 128, 1, 16512 * 32 * 129 * 4 + 2 * 128 * MIB),
        # Dims are rounded to multiples of 32, and of 64 above 128.
        ((32, 32), 80, 1, 16512 * 32 * 97 * 4),
        ((32, 32), 160, 1, 16512 * 32 * 193 * 4),
    ],
)
def test_attention_backwards(
    heads: tuple[int, int], dim: int, num_documents: int, num_bytes: int
) -> None:
    tokens = {"num_queries": 16384, "num_keys": 16384}
    assert (
        attention_scratch(**tokens, num_documents=num_documents, heads=heads, dim=dim) == num_bytes
    )


@pytest.mark.parametrize(
    ("num_members", "num_in_node", "num_bytes"),
    [(1, 1, 0), (2, 2, RING), (8, 8, RING + 8 * SHARP), (16, 8, RING + 8 * SHARP), (16, 1, RING)],
)
def test_communicator(num_members: int, num_in_node: int, num_bytes: int) -> None:
    assert communicator_bytes(num_members, num_in_node) == num_bytes


@pytest.mark.parametrize(
    ("nodes", "degrees", "num_bytes"),
    [
        ([1], {}, 0),
        # The world, and its shard group.
        ([8], {}, 2 * (RING + 8 * SHARP)),
        # The replica group has one member a node.
        ([8, 8], {}, 2 * (RING + 8 * SHARP) + RING),
        # Shard groups of four, in which tensor groups of two are not.
        ([8], {"tensor_parallel_degree": 2}, RING + 8 * SHARP + RING + 4 * SHARP + RING),
    ],
)
def test_libraries(nodes: list[int], degrees: dict[str, int], num_bytes: int) -> None:
    layout = resolve_layout(nodes, **degrees)
    assert library_bytes(layout, sends_weights=False) == HALF_A_GIB + num_bytes
    assert library_bytes(layout, sends_weights=True) == HALF_A_GIB + num_bytes + RING


def test_kernel_needs_its_memory_while_it_makes_a_gradient() -> None:
    tape = Tape(Tensor(10, kind="source"))
    output = tape.run(
        10, tape.source, gradients=[Gradient(tensor=tape.source, num_bytes=10, kernel_bytes=1000)]
    )
    profile = tape.profile(output)
    assert (profile.backward_peak.kernels, profile.backward_peak.temporaries) == (1000, 20)
    assert profile.forward_peak.kernels == 0


def parts_of(*, on_cuda: bool) -> dict[str, dict[str, int]]:
    words = (
        "dpo --model_name_or_path allenai/OLMo-2-1124-7B --gpus_per_node 8 "
        "--activation_checkpointing full"
    )
    activations.clear_profiles()
    plan = make_plan(replace(parse_request(words.split()).setting, on_cuda=on_cuda))
    return {phase.name: dict(phase.parts) for phase in plan.phases}


def test_plan_counts_it_on_cuda_alone() -> None:
    on_cuda, on_cpu = parts_of(on_cuda=True), parts_of(on_cuda=False)
    assert all(
        parts[SCRATCH] >= 64 * MIB and parts[CUDA] > HALF_A_GIB for parts in on_cuda.values()
    )
    assert not any({SCRATCH, CUDA} & parts.keys() for parts in on_cpu.values())
    # There a process's own memory counts, which a GPU's does not have.
    assert {parts[INTERPRETER] for parts in on_cpu.values()} == {PROCESS_BYTES}
    assert not any(INTERPRETER in parts for parts in on_cuda.values())


def test_attentions_own_makes_a_peak_where_it_is_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there in the backward pass of blocks alone, and beside cuBLAS's."""
    huge = 2**40
    monkeypatch.setattr(block, "attention_scratch", lambda **_: huge)
    with_it = parts_of(on_cuda=True)
    monkeypatch.setattr(block, "attention_scratch", lambda **_: 0)
    without = parts_of(on_cuda=True)
    activations.clear_profiles()
    assert with_it["backward"][SCRATCH] == huge + without["backward"][SCRATCH]
    del with_it["backward"], without["backward"]
    assert with_it == without
