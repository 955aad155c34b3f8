"""Documents that share one copy of what they begin with compute what they compute with a copy of
their own.
"""

import math
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from open_instruct.models.attention import attention
from open_instruct.models.attention.attention import attend_over_segments
from open_instruct.models.attention.segments import QKV, Segments
from tests.tiers import num_examples

CPU = torch.device("cpu")
LEFTS = (-1, 0, 1, 3, 6, 40)


@st.composite
def rows(draw: Any) -> Segments:
    """Trees of any depth: each segment goes on from a part of what the one before it sees."""
    lengths, prefixes = [], []
    num_seen = 0
    for _ in range(draw(st.integers(1, 8))):
        prefixes.append(draw(st.integers(0, num_seen)))
        lengths.append(draw(st.integers(0, 7)) if prefixes[-1] else draw(st.integers(1, 9)))
        num_seen = prefixes[-1] + lengths[-1]
    return Segments.from_lengths(tuple(lengths), tuple(prefixes), device=CPU)


def segments(families: list[tuple[int, tuple[int, ...]]]) -> Segments:
    """Of roots and the lengths of their branches; a root and its first branch are one segment."""
    lengths, prefixes = [], []
    for root, branches in families:
        first, *others = branches or (0,)
        lengths += [root + first, *others]
        prefixes += [0, *(root for _ in others)]
    return Segments.from_lengths(tuple(lengths), tuple(prefixes), device=CPU)


def tensors(
    num_tokens: int, *, heads: int = 4, groups: int = 2, dim: int = 3
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    return [
        torch.randn(
            num_tokens, n, dim, dtype=torch.float64, generator=generator, requires_grad=True
        )
        for n in (heads, groups, groups)
    ]


def defined(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: Segments, left: int
) -> torch.Tensor:
    """Softmax over what each token may see, written out token by token."""
    outputs = []
    seen: list[int] = []
    for start, length, prefix_length in zip(
        accumulate((0, *of.lengths)), of.lengths, of.prefix_lengths, strict=False
    ):
        seen = seen[:prefix_length]
        for token in range(start, start + length):
            seen.append(token)
            visible = seen if left < 0 else seen[-(left + 1) :]
            keys, values = (
                x[visible].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v)
            )
            scores = torch.einsum("hd,khd->hk", q[token], keys) / math.sqrt(q.shape[-1])
            outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
    return torch.stack(outputs)


@settings(max_examples=num_examples(30))
@given(rows(), st.sampled_from(LEFTS), st.sampled_from([(4, 2), (4, 1), (2, 2)]))
def test_trees_are_the_definition(of: Segments, left: int, heads: tuple[int, int]) -> None:
    q, k, v = tensors(sum(of.lengths), heads=heads[0], groups=heads[1])
    grad_out = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(0))
    results = [
        (out, *torch.autograd.grad(out, (q, k, v), grad_out))
        for out in (attend_over_segments(QKV(q, k, v), of, left=left), defined(q, k, v, of, left))
    ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@settings(max_examples=num_examples(60))
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(sum),
    st.sampled_from(LEFTS),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
)
def test_documents_without_shared_prefix_give_the_same(
    lengths: list[int], left: int, heads: tuple[int, int]
) -> None:
    of = Segments.from_lengths(tuple(lengths), (0,) * len(lengths), device=CPU)
    q, k, v = tensors(sum(lengths), heads=heads[0], groups=heads[1])
    torch.testing.assert_close(
        attend_over_segments(QKV(q, k, v), of, left=left),
        defined(q, k, v, of, left),
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_good_as_a_copy_of_the_prompt(dtype: torch.dtype) -> None:
    of = segments([(40, (30, 20, 30)), (10, (5,))])
    copies = segments([(70, ()), (60, ()), (70, ()), (15, ())])
    exact = QKV(*(t.detach() for t in tensors(sum(of.lengths), dim=16)))
    places = torch.tensor([*range(70), *range(40), *range(70, 90), *range(40), *range(90, 135)])
    reference = attend_over_segments(exact, of)
    low = exact.each(lambda t: t.to(dtype))
    copied = attend_over_segments(low.each(lambda t: t[places]), copies)
    whole = torch.empty_like(low.query)
    whole[places] = copied  # a prompt's rows are the same in each copy
    error = (attend_over_segments(low, of).double() - reference).abs().max()
    assert error <= 2 * (whole.double() - reference).abs().max()


@pytest.mark.parametrize("left", [9, 300])
def test_masks_grow_with_the_window_and_not_with_the_segment(left: int) -> None:
    of = segments([(1003, (7, 9) * 8)])
    q, k, v = tensors(sum(of.lengths))
    with patch.object(attention, "attend", wraps=attention.attend) as attend:
        attended = attend_over_segments(QKV(q, k, v), of, left=left)
    size = max(left + 1, attention.LEAST_PIECE)
    assert all(len(call.args[0].query) <= size for call in attend.call_args_list)
    assert all(
        len(call.args[0].key) <= len(call.args[0].query) + left for call in attend.call_args_list
    )
    torch.testing.assert_close(attended, defined(q, k, v, of, left), rtol=1e-10, atol=1e-12)


def test_positions_and_keys_of_the_example() -> None:
    of = Segments.from_lengths((6, 3, 2, 3), (0, 4, 6, 0), device=CPU)
    assert of.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6, 6, 7, 0, 1, 2]
    assert of.cu_queries.tolist() == [0, 6, 9, 11, 14]
    assert of.cu_keys.tolist() == [0, 6, 13, 21, 24]
    assert of.key_index_K is not None
    own = [*range(6), *range(4), 6, 7, 8, *range(4), 6, 7, 9, 10, 11, 12, 13]
    assert of.key_index_K.tolist() == own
    assert (of.max_queries, of.max_keys) == (6, 8)
    # A row without prefixes gathers no key.
    assert Segments.from_lengths((4, 2, 3), (0, 0, 0), device=CPU).key_index_K is None


def test_prefix_is_of_what_the_segment_before_sees() -> None:
    Segments.from_lengths((4, 2, 3), (0, 3, 5), device=CPU)
    with pytest.raises(AssertionError, match="a prefix of 6 tokens of a segment that sees 5"):
        Segments.from_lengths((4, 2, 3), (0, 3, 6), device=CPU)
