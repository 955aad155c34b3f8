"""Attention of packed rows on a CPU: PyTorch's flash attention in few large calls.

Legend of the shape suffixes: T tokens of the row, N equal parts of one call, H query heads,
G key-value heads, D features of a head.

PyTorch's kernel for CPUs computes a causal square of up to 512 keys as a whole, and hides half of
it afterwards. A segment with a prefix needs a mask and a copy of its keys, which cost more. So what
tokens see is cut into *parts*: causal squares on the diagonal, and rectangles in which every query
sees every key. No part needs a mask or a copy. Here a square is s, a rectangle r::

    keys of a document          keys of a prompt p and the replies a, b
                                          p p a b
    queries  s                  queries p s
             r s                        p r s
             r r s                      a r r s
             r r r s                    b r r   s

All replies to a prompt see it as one rectangle. The parts of a query are joined by the logarithms
of their sums, which the kernel returns. Given the joined results, its backward pass returns the
share of each part in the gradients, and these add up (Dao 2023, arXiv:2307.08691, sections 3.1 and
3.2).

Why this is not a call for each segment: that takes 1.2 to 1.4 times as long, forward and backward,
for replies to a shared prompt and for rows of 512 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from open_instruct.models.attention.segments import QKV, Segments

# Tokens of a square. Smaller squares leave less that is computed and hidden, but take more calls.
SQUARE = 128
# Up to here a document is one square, since a cut would save less than its calls cost.
LONGEST_SQUARE = 192
MAX_CACHED_ROWS = 64

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Span(NamedTuple):
    """Tokens of the row from `start` up to `stop`."""

    start: int
    stop: int


class Part(NamedTuple):
    """`num_queries` tokens of the row, from `query` on, see the `num_keys` tokens from `key` on.

    Each sees all of them, or, where both are the same tokens, those up to itself. There are
    `num_parts` such parts, each `step` tokens behind the one before.

    Example: in `Part(128, 128, 0, 128, num_parts=2, step=256)` tokens 128 to 255 see 0 to 127, and
    tokens 384 to 511 see 256 to 383.
    """

    query: int
    num_queries: int
    key: int
    num_keys: int
    num_parts: int = 1
    step: int = 0

    @property
    def is_square(self) -> bool:
        return self.query == self.key


def view_queries(tensor_TH: torch.Tensor, parts: Sequence[Part]) -> list[torch.Tensor]:
    """Views of the values of each part's queries; shapes (N, H, queries, ...)."""
    return _view(tensor_TH, parts, [(part.query, part.num_queries) for part in parts])


def view_keys(tensor_TG: torch.Tensor, parts: Sequence[Part]) -> list[torch.Tensor]:
    """Views of the values of each part's keys; shapes (N, G, keys, ...)."""
    return _view(tensor_TG, parts, [(part.key, part.num_keys) for part in parts])


def _view(
    tensor_T: torch.Tensor, parts: Sequence[Part], spans: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """`spans` have the first token and the number of tokens of the first of the equal parts."""
    heads, *features = tensor_T.shape[1:]
    token_stride, head_stride, *feature_strides = tensor_T.stride()
    first = tensor_T.storage_offset()
    return [
        tensor_T.as_strided(
            (part.num_parts, heads, length, *features),
            (part.step * token_stride, head_stride, token_stride, *feature_strides),
            first + start * token_stride,
        )
        for part, (start, length) in zip(parts, spans, strict=True)
    ]


def can_attend_in_parts(query_THD: torch.Tensor, segments: Segments, *, left: int) -> bool:
    """Whether the row is on a CPU, and its window of `left` tokens hides no key; below 0: none."""
    window_hides_keys = 0 <= left < segments.max_keys - 1
    return query_THD.device.type == "cpu" and not window_hides_keys


def attend_in_parts(qkv_T: QKV, segments: Segments, *, scale: float | None = None) -> torch.Tensor:
    """Every token attends to its segment's prefix and the tokens before it; shape (T, H, D).

    Queries have shape (T, H, D), keys and values of the row (T, G, D).
    """
    attended: torch.Tensor
    if torch.compiler.is_compiling():
        attended, _ = attend_in_parts_compiled(*qkv_T, segments.cu_queries, segments.cu_keys, scale)
        return attended
    parts = find_parts(segments.lengths, segments.prefix_lengths)
    attended = _AttentionInParts.apply(*qkv_T, parts, scale)
    return attended


class _AttentionInParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        parts: tuple[Part, ...],
        scale: float | None,
    ) -> torch.Tensor:
        out_THD, lse_TH = _attend(QKV(query_THD, key_TGD, value_TGD), parts, scale=scale)
        ctx.save_for_backward(query_THD, key_TGD, value_TGD, out_THD, lse_TH)
        ctx.parts = parts
        ctx.scale = scale
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *qkv, out_THD, lse_TH = ctx.saved_tensors
        grads = _find_gradients(
            grad_out_THD, QKV(*qkv), out_THD, lse_TH, ctx.parts, scale=ctx.scale
        )
        return *grads, None, None


def _attend(
    qkv_T: QKV, parts: Sequence[Part], *, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, (T, H, D), and the logarithm of the sum behind each query's weights, (T, H)."""
    query_THD, key_TGD, value_TGD = qkv_T
    out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
    lse_TH = query_THD.new_empty(query_THD.shape[:2], dtype=_sum_dtype(query_THD))
    views = zip(
        parts,
        view_queries(query_THD, parts),
        view_keys(key_TGD, parts),
        view_keys(value_TGD, parts),
        view_queries(out_THD, parts),
        view_queries(lse_TH, parts),
        strict=True,
    )
    for part, query, key, value, out, lse in views:
        part_out, part_lse = _flash(query, key, value, 0.0, part.is_square, scale=scale)
        if part.is_square:
            out.copy_(part_out)
            lse.copy_(part_lse)
        else:
            share = torch.sigmoid(part_lse - lse)
            out.lerp_(part_out, share.unsqueeze(-1).to(out.dtype))
            torch.logaddexp(lse, part_lse, out=lse)
    return out_THD, lse_TH


def _find_gradients(
    grad_out_THD: torch.Tensor,
    qkv_T: QKV,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    parts: Sequence[Part],
    *,
    scale: float | None,
) -> QKV:
    """The gradients of queries, keys and values."""
    # In float32 at least: a sum of many shares in 16 bits would lose the small ones.
    sums = [tensor.new_empty(tensor.shape, dtype=lse_TH.dtype) for tensor in qkv_T]
    operands = zip(
        view_queries(grad_out_THD, parts),
        view_queries(qkv_T.query, parts),
        view_keys(qkv_T.key, parts),
        view_keys(qkv_T.value, parts),
        view_queries(out_THD, parts),
        view_queries(lse_TH, parts),
        strict=True,
    )
    parts_of_sums = zip(
        view_queries(sums[0], parts),
        view_keys(sums[1], parts),
        view_keys(sums[2], parts),
        strict=True,
    )
    for part, tensors, totals in zip(parts, operands, parts_of_sums, strict=True):
        # A function, so that one part's share is freed before the next is computed.
        _add_share(totals, part, tensors, scale=scale)
    return QKV(*(each.to(qkv_T.query.dtype) for each in sums))


# The same for compiled blocks, whose graphs take tensors and numbers, and see no further into these
# two operators.


@torch.library.custom_op("open_instruct::attend_in_parts", mutates_args=())
def attend_in_parts_compiled(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_attend`; `cu_queries` and `cu_keys` are those of `Segments`."""
    parts = _read_parts(cu_queries, cu_keys)
    return _attend(QKV(query_THD, key_TGD, value_TGD), parts, scale=scale)


@torch.library.custom_op("open_instruct::attend_in_parts_backward", mutates_args=())
def attend_in_parts_backward(
    grad_out_THD: torch.Tensor,
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_find_gradients`."""
    qkv_T = QKV(query_THD, key_TGD, value_TGD)
    parts = _read_parts(cu_queries, cu_keys)
    grads = _find_gradients(grad_out_THD, qkv_T, out_THD, lse_TH, parts, scale=scale)
    return grads.query, grads.key, grads.value


@attend_in_parts_compiled.register_fake
def _(query_THD: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lse_TH = query_THD.new_empty(query_THD.shape[:2], dtype=_sum_dtype(query_THD))
    return torch.empty_like(query_THD, memory_format=torch.contiguous_format), lse_TH


@attend_in_parts_backward.register_fake
def _(grad_out_THD: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in others[:3])


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *qkv, cu_queries, cu_keys, ctx.scale = inputs
    ctx.save_for_backward(*qkv, *output, cu_queries, cu_keys)
    ctx.mark_non_differentiable(output[1])


def _go_backward(ctx: Any, grad_out_THD: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    grads = attend_in_parts_backward(grad_out_THD, *ctx.saved_tensors, ctx.scale)
    return *grads, None, None, None


attend_in_parts_compiled.register_autograd(_go_backward, setup_context=_keep_for_backward)


def _read_parts(cu_queries: torch.Tensor, cu_keys: torch.Tensor) -> tuple[Part, ...]:
    lengths = cu_queries.diff()
    prefix_lengths = cu_keys.diff() - lengths
    return find_parts(tuple(lengths.tolist()), tuple(prefix_lengths.tolist()))


def _add_share(
    totals: tuple[torch.Tensor, ...],
    part: Part,
    operands: tuple[torch.Tensor, ...],
    *,
    scale: float | None,
) -> None:
    """Add to the gradients of queries, keys and values what comes through `part`.

    A square is the first part of all its tokens: what stands there before has no meaning.
    """
    shares = _flash_backward(*operands, 0.0, part.is_square, scale=scale)
    for total, share in zip(totals, shares, strict=True):
        if part.is_square:
            total.copy_(share)
        else:
            total.add_(share)


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@lru_cache(maxsize=MAX_CACHED_ROWS)
def find_parts(lengths: tuple[int, ...], prefix_lengths: tuple[int, ...]) -> tuple[Part, ...]:
    """The parts of a row: squares, which cover every token, and then rectangles.

    All layers share them.
    """
    squares: list[Part] = []
    rectangles: list[Part] = []
    seen: list[Span] = []  # by the last token of the segment before
    growing: dict[Span, Part] = {}  # the rectangles of the segment before, by their keys
    stop = 0
    for length, prefix_length in zip(lengths, prefix_lengths, strict=True):
        segment = Span(stop, stop + length)
        stop = segment.stop
        triangle = list(cut_triangle(segment))
        squares += [part for part in triangle if part.is_square]
        rectangles += [part for part in triangle if not part.is_square]
        prefix = list(take_first(seen, prefix_length))
        # A segment that sees the same keys as the one before lengthens its rectangle.
        grown = {keys: lengthen(growing.pop(keys, None), keys, segment) for keys in prefix}
        rectangles.extend(growing.values())
        growing = grown
        seen = [*prefix, segment]
    rectangles.extend(growing.values())
    rectangles = [part for part in rectangles if part.num_queries]
    return (*join_equal(squares), *join_equal(rectangles))


def cut_triangle(segment: Span) -> Iterator[Part]:
    """Cut a segment by itself: squares on the diagonal, and the rectangles between them."""
    length = segment.stop - segment.start
    if length <= LONGEST_SQUARE:
        if length:
            yield Part(segment.start, length, segment.start, length)
        return
    half = SQUARE
    while 2 * half < length:
        half *= 2
    middle = segment.start + half
    yield from cut_triangle(Span(segment.start, middle))
    yield from cut_triangle(Span(middle, segment.stop))
    yield Part(middle, length - half, segment.start, half)


def take_first(spans: Iterable[Span], num_tokens: int) -> Iterator[Span]:
    """The first tokens of `spans`."""
    for start, stop in spans:
        num_taken = min(stop - start, num_tokens)
        num_tokens -= num_taken
        if num_taken:
            yield Span(start, start + num_taken)


def lengthen(rectangle: Part | None, keys: Span, queries: Span) -> Part:
    """The rectangle, or a new one for `keys`, with `queries` behind those it has."""
    first = queries.start if rectangle is None else rectangle.query
    return Part(first, queries.stop - first, keys.start, keys.stop - keys.start)


def join_equal(parts: Iterable[Part]) -> Iterator[Part]:
    """Join parts of one shape at equal distances, if no two of them have a token in common."""
    alike: dict[tuple[int, int, int], list[Part]] = {}
    for part in sorted(parts):
        alike.setdefault((part.num_queries, part.num_keys, part.query - part.key), []).append(part)
    for joined, *others in alike.values():
        for part in others:
            step = part.query - joined.query - joined.step * (joined.num_parts - 1)
            is_next = joined.num_parts == 1 or step == joined.step
            if is_next and step >= max(part.num_queries, part.num_keys):
                joined = joined._replace(num_parts=joined.num_parts + 1, step=step)
            else:
                yield joined
                joined = part
        yield joined
