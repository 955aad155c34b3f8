"""Attention of packed rows on a CPU in parts: every visible pair once, and the definition's
values.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from open_instruct.models.attention import cpu_flash
from open_instruct.models.attention.cpu_flash import (
    attend_in_parts,
    attend_in_parts_compiled,
    can_attend_in_parts,
    find_parts,
)
from open_instruct.models.attention.segments import QKV, Segments
from tests.tiers import num_examples
from tests.unit.models.test_shared_attention import CPU, defined, tensors


@contextmanager
def small_squares() -> Iterator[None]:
    """Squares so small that short documents are cut."""
    with patch.object(cpu_flash, "SQUARE", 2), patch.object(cpu_flash, "LONGEST_SQUARE", 3):
        find_parts.cache_clear()
        yield
    find_parts.cache_clear()


@st.composite
def trees(draw: Any) -> Segments:
    """Each segment goes on from a part of what the one before it sees."""
    lengths: list[int] = []
    prefixes: list[int] = []
    num_seen = 0
    for _ in range(draw(st.integers(1, 8))):
        prefixes.append(draw(st.integers(0, num_seen)))
        lengths.append(draw(st.integers(0 if prefixes[-1] else 1, 20)))
        num_seen = prefixes[-1] + lengths[-1]
    return Segments.from_lengths(tuple(lengths), tuple(prefixes), device=CPU)


def visible_pairs(segments: Segments) -> Counter[tuple[int, int]]:
    """(query, key) of every token that sees another or itself."""
    pairs: Counter[tuple[int, int]] = Counter()
    seen: list[int] = []
    stops = accumulate(segments.lengths)
    for stop, length, prefix in zip(stops, segments.lengths, segments.prefix_lengths, strict=True):
        seen = seen[:prefix]
        for token in range(stop - length, stop):
            seen.append(token)
            pairs.update((token, key) for key in seen)
    return pairs


def computed_pairs(segments: Segments) -> Counter[tuple[int, int]]:
    pairs: Counter[tuple[int, int]] = Counter()
    for part in find_parts(segments.lengths, segments.prefix_lengths):
        for offset in range(0, part.num_parts * part.step or 1, part.step or 1):
            for query in range(part.num_queries):
                num_keys = query + 1 if part.is_square else part.num_keys
                first = part.query + offset + query, part.key + offset
                pairs.update((first[0], first[1] + key) for key in range(num_keys))
    return pairs


@settings(max_examples=num_examples(50))
@given(trees())
def test_parts_compute_every_visible_pair_once(segments: Segments) -> None:
    with small_squares():
        assert computed_pairs(segments) == visible_pairs(segments)
        parts = find_parts(segments.lengths, segments.prefix_lengths)
        # Views of one call that overlapped would lose a sum.
        assert all(
            part.step >= max(part.num_queries, part.num_keys)
            for part in parts
            if part.num_parts > 1
        )


@settings(max_examples=num_examples(25))
@given(trees(), st.sampled_from([(4, 2), (3, 1), (2, 2)]))
def test_parts_give_the_values_and_gradients_of_the_definition(
    segments: Segments, heads: tuple[int, int]
) -> None:
    query, key, value = tensors(sum(segments.lengths), heads=heads[0], groups=heads[1])
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(query.shape, dtype=query.dtype, generator=generator)
    with small_squares():
        ours = attend_in_parts(QKV(query, key, value), segments)
        our_grads = torch.autograd.grad(ours, (query, key, value), grad)
    theirs = defined(query, key, value, segments, -1)
    their_grads = torch.autograd.grad(theirs, (query, key, value), grad)
    for one, other in zip((ours, *our_grads), (theirs, *their_grads), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operator_of_compiled_blocks_gives_the_same_bits(dtype: torch.dtype) -> None:
    segments = Segments.from_lengths((300, 20, 200), (0, 250, 0), device=CPU)
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(520, heads, 8, generator=generator).to(dtype) for heads in (4, 2, 2, 4))
    *qkv, grad = (tensor.requires_grad_() for tensor in drawn)
    ours = attend_in_parts(QKV(*qkv), segments)
    operands = (*qkv, segments.cu_queries, segments.cu_keys, None)
    theirs, _ = attend_in_parts_compiled(*operands)
    grads = (torch.autograd.grad(each, qkv, grad) for each in (ours, theirs))
    for one, other in zip((ours, *next(grads)), (theirs, *next(grads)), strict=True):
        assert torch.equal(one, other)
    # What the compiler is told of shapes and dtypes is so.
    torch.library.opcheck(
        attend_in_parts_compiled, operands, test_utils=("test_schema", "test_faketensor")
    )


def test_equal_documents_and_replies_take_one_call_for_all_squares_of_a_size() -> None:
    padded = find_parts((512,) * 3, (0,) * 3)
    assert [(part.num_queries, part.num_parts) for part in padded] == [
        (128, 12),
        (128, 6),
        (256, 3),
    ]
    replies = find_parts((140, *(40,) * 7), (0, *(100,) * 7))
    assert [(part.num_queries, part.num_parts) for part in replies] == [(140, 1), (40, 7), (280, 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors_are_of_the_size_of_one_call_for_all(dtype: torch.dtype) -> None:
    """The kernel's own error, measured against float64, bounds that of long documents in parts."""
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(700, 4, 16, dtype=torch.float64, generator=generator) for _ in range(4)]
    segments = Segments.from_lengths((700,), (0,), device=CPU)

    def compute(in_parts: bool, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        *qkv, grad = (tensor.to(dtype) for tensor in exact)
        qkv = [tensor.requires_grad_() for tensor in qkv]
        if in_parts:
            output = attend_in_parts(QKV(*qkv), segments)
        else:
            query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in qkv)
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            output = output.squeeze(0).transpose(0, 1)
        return output, *torch.autograd.grad(output, qkv, grad)

    expected = compute(False, torch.float64)
    for part, whole, right in zip(
        compute(True, dtype), compute(False, dtype), expected, strict=True
    ):
        error = (part.double() - right).norm() / right.norm()
        assert error <= 1.5 * (whole.double() - right).norm() / right.norm()


def test_windows_that_hide_keys_and_other_devices_go_another_way() -> None:
    segments = Segments.from_lengths((30, 20), (0, 10), device=CPU)
    query = torch.zeros(50, 2, 4)
    assert can_attend_in_parts(query, segments, left=-1)
    assert can_attend_in_parts(query, segments, left=29)
    assert not can_attend_in_parts(query, segments, left=28)
    assert not can_attend_in_parts(query.to("meta"), segments, left=-1)
