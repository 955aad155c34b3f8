"""How a row of segments is walked by what remembers: in chunks, each of which goes on from one that came before.

A segment with a prefix goes on from the middle of what the segment before it sees. So a chunk ends at every token that
another segment goes on from, and what it leaves is taken up as often as it is needed::

    segment    a                b        c      d          (lengths 6, 3, 2, 3; prefixes 0, 4, 6, 0)
    tokens     0 1 2 3 | 4 5    6 7 | 8  9 10   11 12 13
    chunk      0         1      2     3  4      5
    goes on    -         0      0     2  2      -          (b from 4 tokens of a, c from those and 2 of b)
"""

from bisect import bisect_left, bisect_right
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

CHUNK = 64
"""Tokens of the longest chunk: what a chunk computes at once grows with its square."""


class Walk(NamedTuple):
    """A row, walked.

    Attributes:
        starts, stops: the first token of each chunk, and the one after its last.
        goes_on_from: the chunk that each goes on from; None: it begins a document.
        places: of each token, its place where all chunks are filled up to `CHUNK` tokens.
        history: the tokens of the row with those before every segment's first, as many as asked for; where a
            document has none, the number of tokens of the row.
        after_history: of each token, the window of the history that ends with it.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    goes_on_from: tuple[int | None, ...]
    places: tuple[int, ...]
    history: tuple[int, ...]
    after_history: tuple[int, ...]


def walked(lengths: tuple[int, ...], prefix_lengths: tuple[int, ...], *, num_before: int) -> Walk:
    """The walk of a row, with the `num_before` tokens before every segment's first."""
    num_tokens = sum(lengths)
    stops = list(accumulate(lengths))
    starts = [stop - length for stop, length in zip(stops, lengths, strict=True)]
    seen: list[int] = []  # by the last token of the segment before
    history: list[int] = []
    after_history: list[int] = []
    left_at: list[int | None] = []  # the token after which each segment goes on
    for start, stop, prefix in zip(starts, stops, prefix_lengths, strict=True):
        del seen[prefix:]
        before = seen[max(prefix - num_before, 0) :]
        after_history += range(len(history), len(history) + stop - start)
        history += [num_tokens] * (num_before - len(before)) + before
        history += range(start, stop)
        left_at.append(seen[-1] if seen else None)
        seen += range(start, stop)

    cuts = sorted({token + 1 for token in left_at if token is not None} | set(stops))
    chunks: list[tuple[int, int, int | None]] = []
    that_ends: dict[int, int] = {}
    for start, stop, left in zip(starts, stops, left_at, strict=True):
        goes_on_from = None if left is None else that_ends[left + 1]
        inner = cuts[bisect_right(cuts, start) : bisect_left(cuts, stop) + 1]
        for first, end in pairwise([start, *inner]):
            for at in range(first, end, CHUNK):
                chunks.append((at, min(at + CHUNK, end), goes_on_from))
                goes_on_from = len(chunks) - 1
            that_ends[end] = len(chunks) - 1
    first_tokens, ends, before_them = zip(*chunks, strict=True)
    in_chunks = (range(index * CHUNK, index * CHUNK + stop - at) for index, (at, stop, _) in enumerate(chunks))
    places = tuple(chain.from_iterable(in_chunks))
    return Walk(first_tokens, ends, before_them, places, tuple(history), tuple(after_history))
