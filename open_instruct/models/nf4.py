"""Matrices stored in 4 bits a value: NF4, for QLoRA.

The format is that of Dettmers et al. 2023 (arXiv:2305.14314, section 3 and appendix E). Of every 64
values of a row the largest in size is their scale; a value is the nearest of 16 levels, times that.
Codes and scales are two plain tensors, sharded by rows as any other: blocks lie within a row, so
quantising shard by shard is quantising the whole. Levels are chosen by the scale in float32, as
bitsandbytes does, so the bytes are its bytes; then the scale is rounded to the dtype that is
computed in.

Legend of the shape suffixes: O output features of a layer, I input features, P pairs of them (I /
2), K blocks of them, B features of a block.
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from open_instruct.config.lora import BLOCK

# Each stands for as large a share of normally distributed values.
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
PAIR_DTYPES = {torch.bfloat16: torch.int32, torch.float32: torch.int64}


def quantize(values_OI: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix: codes (O, P), and scales (O, K) of `dtype`.

    Two codes are in a byte, the first in its high half.
    """
    blocks_OKB = values_OI.float().unflatten(1, (-1, BLOCK))
    scales_OK = blocks_OKB.abs().amax(-1)
    levels = torch.tensor(LEVELS, device=values_OI.device)
    # A block of zeros divides to NaN, for which any level will do: its scale is 0.
    shares = (blocks_OKB / scales_OK.unsqueeze(-1)).flatten(1)
    borders = (levels[1:] + levels[:-1]) / 2
    codes_OI = torch.bucketize(shares, borders, out_int32=True).to(torch.uint8)
    codes_OP = codes_OI[:, ::2] << 4 | codes_OI[:, 1::2]
    return codes_OP, scales_OK.to(dtype)


def dequantize(
    codes_OP: torch.Tensor, scales_OK: torch.Tensor, pairs: torch.Tensor | None = None
) -> torch.Tensor:
    """The values (O, I), in the dtype of the scales.

    :param pairs: those of `make_level_pairs`, where they have been made already.
    """
    if pairs is None:
        pairs = make_level_pairs(scales_OK.dtype).to(codes_OP.device)
    values = pairs.index_select(0, codes_OP.flatten().int()).view(scales_OK.dtype)
    return values.view(*scales_OK.shape, BLOCK).mul_(scales_OK.unsqueeze(-1)).flatten(1)


def make_level_pairs(dtype: torch.dtype) -> torch.Tensor:
    """The two levels of each byte as one number of their width, so that half as many are read."""
    levels = torch.tensor(LEVELS, dtype=dtype)
    return torch.cartesian_prod(levels, levels).view(PAIR_DTYPES[dtype]).flatten()


class RoundingMeter:
    """Measures how far matrices are moved by rounding, while they are read.

    The relative change of a matrix W that is rounded to R is |R - W| / |W|, of norms over all
    values. A matrix may be measured in parts, and on ranks that each hold some: see `squares`.

    Attributes:
        squares: by name, the sums of squares of R - W and of W, float64, where they were measured.
    """

    def __init__(self) -> None:
        self.squares: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, name: str, values: torch.Tensor, rounded: torch.Tensor) -> None:
        """Measure some values of a matrix and what they were rounded to, of any float dtypes."""
        values = values.to(rounded.device, torch.float32)
        sums = (rounded - values).square().sum(), values.square().sum()
        self.squares[name] = self.squares.get(name, 0) + torch.stack(sums).double()

    def sums(self) -> dict[str, tuple[float, float]]:
        """`squares` as numbers, which ranks can send."""
        sums = {}
        for name, pair in self.squares.items():
            change, size = pair.tolist()
            sums[name] = (change, size)
        return sums


def find_rounding(parts: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """The relative change of each matrix, from the `squares` of all ranks.

    Copies of a matrix on several ranks count alike above and below, and change nothing.
    """
    totals: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (change, size) in part.items():
            total_change, total_size = totals.get(name, (0.0, 0.0))
            totals[name] = (total_change + change, total_size + size)
    return {
        name: math.sqrt(change / size) if size else 0.0 for name, (change, size) in totals.items()
    }


def describe_rounding(changes: Mapping[str, float]) -> str:
    """A sentence about the relative changes of matrices, by name, of which there are some."""
    largest = max(changes, key=lambda name: changes[name])
    mean = sum(changes.values()) / len(changes)
    return (
        f"rounding to 4 bits changed the {len(changes):,} matrices of its base by {mean:.2%} on "
        f"average, and by {changes[largest]:.2%} at most ({largest}): see docs/lora.md, A base in "
        "4 bits"
    )


class QuantizedProduct(torch.autograd.Function):
    """x W^T + bias of a frozen W in 4 bits and a frozen bias.

    The values of W are made in each pass, and dropped.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x,
        bias_O,
        *quantized,
    ):
        ctx.save_for_backward(*quantized)
        return F.linear(x, dequantize(*quantized), bias_O)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient @ dequantize(*ctx.saved_tensors), None, None, None, None


class FrozenLinear(nn.Linear):
    """A linear layer that takes over the parameters of another.

    With `in_4_bits` its matrix is two new parameters, codes and scales, without values yet.
    """

    # There for good, so that a GPU need not wait for it, and compiled code is given it.
    pairs: torch.Tensor

    def __init__(self, stands_for: nn.Linear, *, in_4_bits: bool, dtype: torch.dtype) -> None:
        super().__init__(stands_for.in_features, stands_for.out_features, bias=False, device="meta")
        self.weight = stands_for.weight
        self.bias = stands_for.bias
        self.in_4_bits = in_4_bits
        if in_4_bits:
            empty = partial(torch.empty, self.out_features, device=self.weight.device)
            self.register_parameter("weight", None)
            codes_OP = empty(self.in_features // 2, dtype=torch.uint8)
            scales_OK = empty(self.in_features // BLOCK, dtype=dtype)
            self.codes = nn.Parameter(codes_OP, requires_grad=False)
            self.scales = nn.Parameter(scales_OK, requires_grad=False)
            self.register_buffer(
                "pairs", make_level_pairs(dtype).to(self.codes.device), persistent=False
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.in_4_bits:
            return super().forward(x)
        y: torch.Tensor = QuantizedProduct.apply(x, self.bias, self.codes, self.scales, self.pairs)
        return y


def fill_pairs(module: nn.Module, device: torch.device) -> None:
    """Make the `pairs` of a layer in 4 bits on `device`, where it computes.

    Its matrix may be in host memory.
    """
    if isinstance(module, FrozenLinear) and module.in_4_bits:
        module.pairs = make_level_pairs(module.scales.dtype).to(device)
