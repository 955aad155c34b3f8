"""Attention on the GPU gives what float32 on the CPU does: behind shared prompts, with windows and
shared heads.
"""

import pytest
import torch

from open_instruct.models.attention.attention import attend_over_segments
from open_instruct.models.attention.segments import QKV, Segments

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
NUM_HEADS, HEAD_DIM = 8, 64
# bfloat16 keeps eight bits of a number; sums of many of them err by less than each of them does.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_kv_heads", [8, 2])
@pytest.mark.parametrize("left", [-1, 20])
@pytest.mark.parametrize(
    ("lengths", "prefix_lengths"),
    [
        ((70, 3, 1, 129), (0, 0, 0, 0)),
        ((73, 5, 69, 9), (0, 40, 0, 60)),
        ((90, 30, 9, 50, 7, 33), (0, 40, 61, 40, 85, 12)),
    ],
    ids=["alone", "shared", "tree"],
)
def test_values_and_gradients(
    device: torch.device,
    lengths: tuple[int, ...],
    prefix_lengths: tuple[int, ...],
    left: int,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = (NUM_HEADS, num_kv_heads, num_kv_heads)
    # Both sides are given the same rounded numbers.
    given = [
        torch.randn(sum(lengths), count, HEAD_DIM, generator=generator).to(dtype) for count in heads
    ]
    upstream = torch.randn(sum(lengths), NUM_HEADS, HEAD_DIM, generator=generator).to(dtype)

    def attended(where: torch.device, computed_in: torch.dtype) -> list[torch.Tensor]:
        qkv = QKV(*(tensor.to(where, computed_in, copy=True).requires_grad_() for tensor in given))
        output = attend_over_segments(
            qkv, Segments.from_lengths(lengths, prefix_lengths, device=where), left=left
        )
        gradients = torch.autograd.grad(output, list(qkv), upstream.to(where, computed_in))
        return [tensor.detach().float().cpu() for tensor in (output, *gradients)]

    for name, ours, theirs in zip(
        ("output", "query", "key", "value"),
        attended(device, dtype),
        attended(CPU, torch.float32),
        strict=True,
    ):
        furthest = (ours - theirs).abs().max() / theirs.abs().max()
        assert furthest < TOLERANCES[dtype], f"{name}: {furthest:.2g} of its largest value apart"
