"""What learners send in a weight sync and plans count: the tensors of each bucket, and the bytes of
a message about changed weights.

A learner's message about its parts of some tensors has a row for each part; behind the rows are, of
each part, all values, or a place and a value for each that has changed, or a place, a length and
the values of each run of them.
"""

from collections.abc import Iterator, Mapping

PLACE_BYTES = 4  # also a length's
ROW_BYTES = 4 * 8


def plan_buckets(
    tensors: Mapping[str, tuple[int, int]], bucket_bytes: int
) -> Iterator[tuple[list[str], int, int]]:
    """The tensors that go into each bucket: their names, the index of its piece, and the number of
    pieces.

    Args:
        tensors: of each, in their order, the bytes, and the most rows that a rank has: a piece is a
            share of those.
    """
    run: list[str] = []
    num_bytes = 0
    for name, (more, most_rows) in tensors.items():
        if run and num_bytes + more > bucket_bytes:
            yield run, 0, 1
            run = []
            num_bytes = 0
        num_pieces = min(-(-more // bucket_bytes), most_rows)
        if num_pieces > 1:
            yield from (([name], piece, num_pieces) for piece in range(num_pieces))
        else:
            run.append(name)
            num_bytes += more
    if run:
        yield run, 0, 1
