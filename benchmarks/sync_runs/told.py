"""What one process tells another by a file."""

import pickle
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0


def publish(path: Path, content: dict[str, Any]) -> None:
    path.with_suffix(".partial").write_bytes(pickle.dumps(content))
    path.with_suffix(".partial").rename(path)


def awaited(path: Path) -> dict[str, Any]:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)
    content: dict[str, Any] = pickle.loads(path.read_bytes())
    return content
