"""What one process of a test tells another through a file."""

import pickle
from pathlib import Path
from typing import Any

from tests.waiting import eventually


def tell(path: Path, info: dict[str, Any]) -> None:
    """Write it so that it is there as a whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(info))
    partial.rename(path)


def told(path: Path) -> dict[str, Any]:
    """Wait for it."""
    eventually(path.exists, what=f"{path} never came")
    info: dict[str, Any] = pickle.loads(path.read_bytes())
    return info
