"""What one process of a test tells another through a file."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

FILE_TIMEOUT_S = 600.0


def tell(path: Path, info: dict[str, Any]) -> None:
    """Write it so that it is there as a whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(info))
    partial.rename(path)


def told(path: Path) -> dict[str, Any]:
    """Wait for it."""
    deadline = time.monotonic() + FILE_TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)
    info: dict[str, Any] = pickle.loads(path.read_bytes())
    return info
