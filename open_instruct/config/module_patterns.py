"""Patterns of module names, as --activation_checkpointing_modules takes them."""

from __future__ import annotations

import re
from collections.abc import Iterable


def names_module(patterns: Iterable[str], name: str) -> bool:
    """Whether one of `patterns` is the module's name; a * stands for anything but a dot, so for one part of a name.

    Example: "blocks.*.attention" is "blocks.3.attention", and not "blocks.3.attention.w_q".
    """
    return any(re.fullmatch("[^.]*".join(map(re.escape, pattern.split("*"))), name) for pattern in patterns)
