"""Tiny models of fewer layers, for tests that prove of each layer what they prove of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from open_instruct.toys.tiny import SIZES, write_tiny_model


def write_shallow_model(folder: Path, *, layers: int, **given: Any) -> Path:
    """As `write_tiny_model`, whose smallest size has four layers."""
    with patch.dict(SIZES, {"shallow": replace(SIZES["tiny"], layers=layers)}):
        return write_tiny_model(folder, size="shallow", **given)
