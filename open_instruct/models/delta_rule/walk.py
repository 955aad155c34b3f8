"""Plans how the gated delta rule walks a row of segments: in chunks, one after another.

Each chunk goes on from the memory that an earlier one left, or begins a document. A segment with a
prefix goes on from the middle of what the segment before it sees. So a chunk ends at every token
that another segment goes on from, and what it leaves is taken up as often as it is needed::

    segment    a                b        c      d          (lengths 6, 3, 2, 3; prefixes 0, 4, 6, 0)
    tokens     0 1 2 3 | 4 5    6 7 | 8  9 10   11 12 13
    chunk      0         1      2     3  4      5
    goes on    -         0      0     2  2      -     (b from 4 of a, c from those and 2 of b)

Legend of the shape suffixes: T tokens of the row, N chunks, C tokens of the longest chunk.
"""

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from open_instruct.models.delta_rule.shape import CHUNK


class Walk(NamedTuple):
    """The chunks of a row; where there is no token, its index is the number of tokens.

    Attributes:
        goes_on_from: the chunk that each goes on from; None: it begins a document.
        tokens_NC: the tokens of each chunk, and after its last none.
        places_T: of each token, its place among those of all chunks, C for each.
        history: the tokens of the row, with as many as asked for before each that does not follow
            its neighbour; none before a document.
        after_history_T: of each token, the window of the history that ends with it.
        borders: where tokens do not follow their neighbour, then the number of all tokens.
    """

    goes_on_from: tuple[int | None, ...]
    tokens_NC: torch.Tensor
    places_T: torch.Tensor
    history: torch.Tensor
    after_history_T: torch.Tensor
    borders: torch.Tensor


# Kept for all layers of a model, and for what is recomputed in a backward pass.
@lru_cache(maxsize=4)
def plan_walk(
    lengths: tuple[int, ...],
    prefix_lengths: tuple[int, ...],
    num_before: int,
    device: torch.device,
) -> Walk:
    """The walk of a row, for a convolution that sees `num_before` tokens before its own."""
    before = _find_predecessors(lengths, prefix_lengths)
    none = len(before)
    starts = sorted({*accumulate(lengths, initial=0)} - {none})  # segments may be empty
    begins = [start for start in starts if before[start] != start - 1]
    history: list[int] = []
    after_history: list[int] = []
    for start, stop in pairwise([*begins, none]):
        earlier = [before[start]]
        while len(earlier) < num_before:
            earlier.append(none if earlier[-1] == none else before[earlier[-1]])
        after_history += range(len(history), len(history) + stop - start)
        history += [*reversed(earlier[:num_before]), *range(start, stop)]

    chunks: list[list[int]] = []
    goes_on_from: list[int | None] = []
    places: list[int] = []
    left_later = {before[start] + 1 for start in begins if before[start] != none}
    for start, stop in pairwise([*sorted({*begins, *left_later}), none]):
        for first in range(start, stop, CHUNK):
            chunk = [*range(first, min(first + CHUNK, stop))]
            goes_on_from.append(None if before[first] == none else places[before[first]] // CHUNK)
            places += range(len(chunks) * CHUNK, len(chunks) * CHUNK + len(chunk))
            chunks.append(chunk)
    filled_up = [chunk + [none] * (CHUNK - len(chunk)) for chunk in chunks]
    indices = [
        torch.tensor(each) for each in (filled_up, places, history, after_history, [*begins, none])
    ]
    if device.type == "cuda":  # or the host would wait for the device
        indices = [index.pin_memory().to(device, non_blocking=True) for index in indices]
    return Walk(tuple(goes_on_from), *indices)


def _find_predecessors(lengths: tuple[int, ...], prefix_lengths: tuple[int, ...]) -> list[int]:
    """The token that each token of a row goes on from.

    It is the number of all tokens where a document begins.
    """
    before: list[int] = []
    seen: list[int] = []  # by the last token of the segment before
    stop = 0
    for length, prefix in zip(lengths, prefix_lengths, strict=True):
        start = stop
        stop = start + length
        del seen[prefix:]
        before += [seen[-1] if seen else sum(lengths), *range(start, stop - 1)][:length]
        seen += range(start, stop)
    return before
