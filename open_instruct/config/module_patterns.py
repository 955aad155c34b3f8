"""Patterns of module names, as --activation_checkpointing_modules takes them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def names_module(patterns: Iterable[str], name: str) -> bool:
    """Whether one of `patterns` names the module: a shell's pattern for each part between dots, so a * stops at dots.

    Example: "blocks.*.attention" is "blocks.3.attention", and not "blocks.3.attention.w_q".
    """
    parts = name.split(".")
    return any(
        len(pattern.split(".")) == len(parts) and all(map(fnmatchcase, parts, pattern.split(".")))
        for pattern in patterns
    )
