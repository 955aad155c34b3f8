"""A few pages of text of our own, from which the tokenizers of small models learn their words."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files


def built_in_corpus() -> Iterator[str]:
    """Prose, small talk, code and sums; always the same, in the same order."""
    yield from (files("open_instruct.toys") / "prose.txt").read_text(encoding="utf-8").split("\n\n")
    for a in range(2, 40):
        for b in range(3, 40, 4):
            yield f"{a} + {b} = {a + b}. {a} times {b} is {a * b}. What is {a + b} minus {b}? The answer is {a}."
            yield f"Tom has {a} apples and buys {b} more, so he has {a} + {b} = {a + b} apples. #### {a + b}"
