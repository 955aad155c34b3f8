"""Files of numpy arrays with a checksum, written at once and mapped into memory when read.

They are safetensors. All metadata of a file is one JSON text: safetensors writes several entries in
no fixed order, and equal arrays should be equal bytes.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from open_instruct.core.errors import InputError, RunError

_METADATA = "open_instruct"
_CHECKSUM = "sha256"


def find_cache_folder(cache_dir: str | Path | None) -> Path:
    """The folder of cached data: `cache_dir`, $OPEN_INSTRUCT_CACHE or ~/.cache/open_instruct."""
    folder = cache_dir or os.environ.get("OPEN_INSTRUCT_CACHE") or "~/.cache/open_instruct"
    return Path(folder).expanduser()


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Write arrays and metadata, which is of JSON.

    It writes beside `path` and renames, so that a reader, or a crash, never meets half a file.

    Raises:
        InputError: the folder cannot be made or written to.
        RunError: the disk is full.
    """
    from safetensors.numpy import save_file

    partial = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except OSError as error:
        raise InputError(
            f"--cache_dir: cannot write to {path.parent}: {error}; give another folder.",
            kind="unreadable_file",
        ) from error
    try:
        content = json.dumps({**metadata, _CHECKSUM: _find_checksum(arrays)})
        save_file(dict(arrays), partial, metadata={_METADATA: content})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except Exception as error:
        raise RunError(
            f"writing {path} failed: {error}; free some space, or give another --cache_dir."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and metadata as written; the arrays are read-only views of the mapped file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is cut short, or its content is not what was written.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:  # numpy's would read all of it into memory
            metadata: dict[str, Any] = json.loads(file.metadata()[_METADATA])
            arrays: dict[str, np.ndarray] = {
                name: file.get_tensor(name).numpy() for name in file.offset_keys()
            }
        for array in arrays.values():
            array.flags.writeable = False
        if metadata.pop(_CHECKSUM) != _find_checksum(arrays):
            raise ValueError("its checksum does not match")
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return arrays, metadata


def _find_checksum(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()
