"""Where Triton keeps the kernels that a rank compiles.

Ranks of a host that share one folder were seen to read what another was still writing. OLMo-core
therefore makes a folder in /tmp for every process, at a place that another user may have made
before, and leaves it there. Here each rank has a folder in this user's cache, which later runs use
again. Where that cannot be, or where others may write, it is a new folder, which is removed when
the process ends.
"""

import atexit
import os
import shutil
import socket
import stat
import tempfile
from importlib.util import find_spec
from pathlib import Path

# Read by Triton whenever it compiles.
CACHE_VARIABLE = "TRITON_CACHE_DIR"
# What we set it to: a process that inherits both takes a folder of its own rank.
OURS_VARIABLE = "OPEN_INSTRUCT_TRITON_CACHE_DIR"

_temporary_folders: list[str] = []


def set_triton_cache(local_rank: int) -> None:
    """Give this rank a folder of its own for compiled kernels; one that the user has set stays."""
    current = os.environ.get(CACHE_VARIABLE)
    is_users_choice = current is not None and current != os.environ.get(OURS_VARIABLE)
    if is_users_choice or find_spec("triton") is None:
        return
    folder = make_user_folder(local_rank) or make_temporary_folder()
    os.environ[CACHE_VARIABLE] = os.environ[OURS_VARIABLE] = folder


def make_user_folder(local_rank: int) -> str | None:
    """The rank's folder in this user's cache; None where it cannot be made, or others may write."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "open_instruct")
        cache.mkdir(parents=True, exist_ok=True)
        folder = cache
        for name in ("triton", socket.gethostname(), f"rank-{local_rank}"):
            folder = folder / name
            folder.mkdir(mode=0o700, exist_ok=True)
            if not is_private(folder):
                return None
    except (OSError, RuntimeError):  # the latter where a user has no home
        return None
    return str(folder)


def is_private(folder: Path) -> bool:
    """Whether this user owns the folder, which is no link, and nobody else may write into it."""
    status = folder.lstat()
    others_write = stat.S_IWGRP | stat.S_IWOTH
    is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own_folder and not status.st_mode & others_write and os.access(folder, os.W_OK)


def make_temporary_folder() -> str:
    folder = tempfile.mkdtemp(prefix="open-instruct-triton-")
    if not _temporary_folders:
        atexit.register(remove_temporary_folders)
    _temporary_folders.append(folder)
    return folder


def remove_temporary_folders() -> None:
    """Remove what `make_temporary_folder` made, where Python's own exit does not."""
    while _temporary_folders:
        shutil.rmtree(_temporary_folders.pop(), ignore_errors=True)
