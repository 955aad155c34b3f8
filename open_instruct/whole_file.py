"""Small text files replaced as a whole: a full disk, a kill or a power cut leaves the old one or the new one."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write beside `path`, and put it in place in one move; `durable` waits until the disk has it.

    Raises:
        OSError: it cannot be written; what was there is unharmed.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(path.parent)


def remove_partials(path: Path) -> None:
    """Remove what killed processes left beside `path`; nobody else may be writing it."""
    for leftover in path.parent.glob(f".{path.name}.*-*.partial"):
        leftover.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """A new name is on the disk only once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # file systems that sync no folders
    finally:
        os.close(descriptor)
