"""How fast attention is, with the heads of models of 7B and 8B, beside a product of matrices and
dense attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from gpu_check.devices import device_of, median_seconds, peak_flops
from gpu_check.findings import Findings
from open_instruct.models.attention.attention import attend_over_segments
from open_instruct.models.attention.segments import QKV, Segments

# Of a product forward, its two products backward; of attention backward five products, where
# forward has two.
BACKWARD_OF_PRODUCT, BACKWARD_OF_ATTENTION = 2.0, 2.5
# Of a tree of 16 episodes of 4 turns, in which each turn is followed by two: turns that the one
# before does not have.
OWN_TURNS = (1, 2, 1, 3, 1, 2, 1, 4, 1, 2, 1, 3, 1, 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A packed row: its segments as `Segments.from_lengths` takes them, heads, and the window's tokens to the
    left (-1: all).
    """

    title: str
    lengths: tuple[int, ...]
    prefix_lengths: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 32
    head_dim: int = 128
    left: int = -1

    def num_pairs(self) -> int:
        """Of queries and keys that see each other."""
        furthest = self.left + 1 if self.left >= 0 else 10**12
        return sum(
            min(prefix_length + index + 1, furthest)
            for prefix_length, length in zip(self.prefix_lengths, self.lengths, strict=True)
            for index in range(length)
        )

    def forward_flops(self) -> float:
        return 4.0 * self.num_heads * self.head_dim * self.num_pairs()


def rows(scale: int) -> list[Row]:
    """`scale` 1 is the size that is measured; documents are so many times shorter."""
    document, prompt, reply, window = 2048 // scale, 1024 // scale, 512 // scale, 4096 // scale
    alone = partial(Row, lengths=(document,) * 8, prefix_lengths=(0,) * 8)
    return [
        alone(title="8 documents (OLMo 2 7B)"),
        alone(title="8 documents, 8 key-value heads (Llama 3 8B)", num_kv_heads=8),
        Row(title="one long document", lengths=(8 * document,), prefix_lengths=(0,)),
        Row(
            title="one long document, window (OLMo 3 7B)",
            lengths=(8 * document,),
            prefix_lengths=(0,),
            left=window - 1,
        ),
        Row(
            title="8 pairs that share prompts (DPO)",
            lengths=(prompt + reply, reply) * 8,
            prefix_lengths=(0, prompt) * 8,
        ),
        Row(
            title="a group of 16 behind one prompt (GRPO), 8 key-value heads",
            lengths=(prompt + reply, *(reply,) * 15),
            prefix_lengths=(0, *(prompt,) * 15),
            num_kv_heads=8,
        ),
        Row(
            title="16 episodes that branch after each of 4 turns (GRPO), 8 key-value heads",
            lengths=(prompt + 4 * reply, *(turns * reply for turns in OWN_TURNS)),
            prefix_lengths=(0, *(prompt + (4 - turns) * reply for turns in OWN_TURNS)),
            num_kv_heads=8,
        ),
    ]


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    del work
    device, peak = device_of(rehearse), peak_flops()
    num_rounds = 1 if rehearse else 10
    figures: list[dict[str, object]] = []

    def measured(
        title: str,
        compute: Callable[[], torch.Tensor],
        inputs: list[torch.Tensor],
        forward_flops: float,
        backward: float,
        **more: object,
    ) -> None:
        gradient = torch.randn_like(compute())

        def both() -> None:
            torch.autograd.grad(compute(), inputs, gradient)

        with torch.no_grad():
            forward_s = median_seconds(compute, device, num_rounds=num_rounds)
        both_s = median_seconds(both, device, num_rounds=num_rounds)
        rate = forward_flops * (1 + backward) / both_s
        figures.append(
            {
                "what": title,
                **more,
                "forward, ms": forward_s * 1e3,
                "forward and backward, ms": both_s * 1e3,
                "TFLOP/s": rate / 1e12,
                "of the peak": "" if peak is None else f"{rate / peak:.0%}",
            }
        )

    width = 256 if rehearse else 8192
    left, right = (leaf(width, width, device=device) for _ in range(2))
    measured(
        f"product of {width} x {width} matrices",
        lambda: left @ right,
        [left, right],
        2.0 * width**3,
        BACKWARD_OF_PRODUCT,
    )
    length = 64 if rehearse else 4096
    dense = QKV(*(leaf(1, 32, length, 128, device=device) for _ in range(3)))
    pairs = length * (length + 1) / 2
    measured(
        f"dense causal attention over {length:,} tokens",
        lambda: F.scaled_dot_product_attention(*dense, is_causal=True),
        list(dense),
        4.0 * 32 * 128 * pairs,
        BACKWARD_OF_ATTENTION,
    )
    for row in rows(64 if rehearse else 1):
        segments = Segments.from_lengths(row.lengths, row.prefix_lengths, device=device)
        num_tokens = sum(row.lengths)
        heads = (row.num_heads, row.num_kv_heads, row.num_kv_heads)
        qkv = QKV(*(leaf(num_tokens, count, row.head_dim, device=device) for count in heads))

        def attend(qkv: QKV = qkv, segments: Segments = segments, row: Row = row) -> torch.Tensor:
            return attend_over_segments(qkv, segments, left=row.left)

        findings.require(
            bool(attend().isfinite().all()), f"{row.title}: what comes out is not finite"
        )
        measured(
            row.title,
            attend,
            list(qkv),
            row.forward_flops(),
            BACKWARD_OF_ATTENTION,
            tokens=num_tokens,
        )
    findings.table(
        "bfloat16, medians; of attention only the pairs that see each other count", figures
    )
    shared = next(each for each in figures if "share prompts" in str(each["what"]))
    findings.headline = (
        f"pairs that share prompts: {shared['TFLOP/s']:.0f} TFLOP/s {shared['of the peak']}".strip()
    )


def leaf(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True)
