"""Boxes of a tensor: one range for every dim of it."""

from collections.abc import Sequence

Box = tuple[slice, ...]
"""One range for every dim of a tensor."""


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def complete_box(slices: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box that slices cut from a tensor of `shape`; dims without a slice are whole.

    Example: `complete_box((slice(1, 3),), (4, 2))` is `(slice(1, 3), slice(0, 2))`.
    """
    whole = [slice(None)] * (len(shape) - len(slices))
    ranges = zip([*slices, *whole], shape, strict=True)
    return tuple(slice(*part.indices(size)[:2]) for part, size in ranges)


def intersect_boxes(
    start: Sequence[int], size: Sequence[int], other_start: Sequence[int], other_size: Sequence[int]
) -> Box | None:
    """The box that two boxes have in common; None if it is empty."""
    common = []
    for a, n, b, m in zip(start, size, other_start, other_size, strict=True):
        cut = slice(max(a, b), min(a + n, b + m))
        if cut.start >= cut.stop:
            return None
        common.append(cut)
    return tuple(common)


def shift_box(box: Sequence[slice], origin: Sequence[int]) -> Box:
    """`box` in coordinates that begin at `origin`."""
    ranges = zip(box, origin, strict=True)
    return tuple(slice(cut.start - first, cut.stop - first) for cut, first in ranges)
