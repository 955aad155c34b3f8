"""Responses that share one copy of their prompt compute what they compute with a copy of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from open_instruct.models.attention import blocks
from open_instruct.models.attention.attention import attend_over_segments
from open_instruct.models.attention.segments import QKV, Segments, documents_of, segments_of
from open_instruct.models.attention.shared_attention import attend_in_tiles, attend_plainly, tile_batches

CPU = torch.device("cpu")
LEFTS = (-1, 0, 1, 3, 6, 40)

rows = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 9), st.just(())),
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)),
    ),
    min_size=1,
    max_size=4,
)


def segments(families: list[tuple[int, tuple[int, ...]]]) -> Segments:
    """Of roots and the lengths of their branches."""
    lengths, prefixes = [], []
    for root, branches in families:
        lengths += [root, *branches]
        prefixes += [0, *(root for _ in branches)]
    return Segments.of(tuple(lengths), tuple(prefixes), device=CPU)


def tensors(num_tokens: int, *, heads: int = 4, groups: int = 2, dim: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    return [
        torch.randn(num_tokens, n, dim, dtype=torch.float64, generator=generator, requires_grad=True)
        for n in (heads, groups, groups)
    ]


def defined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: Segments, left: int) -> torch.Tensor:
    """Softmax over what each token may see, written out token by token."""
    outputs = []
    for start, length, prefix_start, prefix_length in segments_of(of.lengths, of.prefix_lengths):
        seen = [*range(prefix_start, prefix_start + prefix_length)]
        for token in range(start, start + length):
            seen.append(token)
            visible = seen if left < 0 else seen[-(left + 1) :]
            keys, values = (x[visible].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            scores = torch.einsum("hd,khd->hk", q[token], keys) / math.sqrt(q.shape[-1])
            outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
    return torch.stack(outputs)


def attend_in_small_blocks(qkv_T: QKV, of: Segments, *, left: int) -> torch.Tensor:
    """Of three tokens each, or two."""
    return blocks.attend_in_blocks(qkv_T, documents_of(of.lengths, of.prefix_lengths), left=left)


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    with patch.multiple(blocks, MOST_QUERIES=6, FEWEST_TOKENS=2):
        yield


@settings(max_examples=30)
@given(rows, st.sampled_from(LEFTS), st.sampled_from([(4, 2), (4, 1), (2, 2)]))
def test_tiles_blocks_and_the_plain_version_are_the_definition(
    families: list[Any], left: int, heads: tuple[int, int]
) -> None:
    of = segments(families)
    q, k, v = tensors(sum(of.lengths), heads=heads[0], groups=heads[1])
    grad_out = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(0))
    results = []
    for attend in (defined, attend_plainly, attend_in_tiles, attend_in_small_blocks):
        out = attend(q, k, v, of, left) if attend is defined else attend(QKV(q, k, v), of, left=left)
        results.append((out, *torch.autograd.grad(out, (q, k, v), grad_out)))
    for result in results[1:]:
        for ours, theirs in zip(result, results[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(sum),
    st.sampled_from(LEFTS),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
)
def test_so_are_documents_that_share_nothing(lengths: list[int], left: int, heads: tuple[int, int]) -> None:
    of = Segments.of(tuple(lengths), (0,) * len(lengths), device=CPU)
    q, k, v = tensors(sum(lengths), heads=heads[0], groups=heads[1])
    torch.testing.assert_close(
        attend_over_segments(QKV(q, k, v), of, left=left), defined(q, k, v, of, left), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("attend", [attend_in_tiles, attend_in_small_blocks])
def test_gradients_are_those_of_finite_differences(attend: Any) -> None:
    of = segments([(3, (2, 1)), (2, ())])
    inputs = tensors(8)
    assert torch.autograd.gradcheck(lambda q, k, v: attend(QKV(q, k, v), of, left=2), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_good_as_the_plain_version(dtype: torch.dtype) -> None:
    of = segments([(40, (30, 20, 30)), (10, (5,))])
    exact = QKV(*(t.detach() for t in tensors(sum(of.lengths), dim=16)))
    reference = attend_plainly(exact, of)
    low = exact.each(lambda t: t.to(dtype))
    error = (attend_in_tiles(low, of).double() - reference).abs().max()
    assert error <= 2 * (attend_plainly(low, of).double() - reference).abs().max()


def test_branches_of_one_root_are_one_tile() -> None:
    """However many responses there are, a prompt is one call, and so is each length of response."""
    of = segments([(50, (7, 9) * 8)])
    prefix = [batch for batch in tile_batches(of.lengths, of.prefix_lengths, -1) if not batch.is_first]
    assert [(batch.num_tiles, len(batch.query_index), len(batch.key_index)) for batch in prefix] == [(1, 121, 50)]
    assert len(tile_batches(of.lengths, of.prefix_lengths, -1)) == 4


def test_no_key_beyond_the_window_is_computed() -> None:
    of = segments([(1000, (3,))])
    num_pairs = sum(
        len(batch.query_index) * len(batch.key_index) // batch.num_tiles
        for batch in tile_batches(of.lengths, of.prefix_lengths, 9)
    )
    assert num_pairs <= 1003 * 2 * 10


def test_positions_and_keys_of_the_example() -> None:
    of = Segments.of((4, 2, 3, 3), (0, 4, 4, 0), device=CPU)
    assert of.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6, 0, 1, 2]
    # The root and its first branch are one document.
    assert of.cu_queries.tolist() == [0, 6, 9, 12]
    assert of.cu_keys.tolist() == [0, 6, 13, 16]
    assert of.key_index_K is not None
    assert of.key_index_K.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 7, 8, 9, 10, 11]
    assert (of.max_queries, of.max_keys) == (6, 7)
    # A row of one branch a root gathers no key.
    assert Segments.of((4, 2, 3), (0, 4, 0), device=CPU).key_index_K is None


def test_a_prefix_is_the_whole_root() -> None:
    with pytest.raises(AssertionError, match="a prefix of 3 tokens after a root of 4"):
        Segments.of((4, 2), (0, 3), device=CPU)
