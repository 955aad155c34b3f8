"""A half-open span of tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Half-open range of token positions `[start, stop)`.

    Example: the reply of a ten-token conversation whose prompt takes six tokens is `Span(start=6,
    stop=10)`.
    """

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start
