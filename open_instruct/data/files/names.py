"""What a name stands for, before anything is opened: a readable file, another file, or a data set on the hub."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from open_instruct.errors import InputError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".csv.gz", ".tsv", ".parquet", ".arrow")
# Endings that no data set on the hub has. A dot alone decides nothing: names such as llama-3.1-tulu have one.
_ENDS_AS_A_FILE = re.compile(
    r"\.(jsonl?|ndjson|csv|tsv|parquet|arrow|feather|txt|md|xlsx?|ya?ml|html|pkl|pickle|pt|npy|sqlite|db)"
    r"(\.(gz|zst|bz2|xz|zip))?$|\.(gz|zst|bz2|xz|zip|tar|tgz)$",
    re.IGNORECASE,
)


def suffix_of(path: Path) -> str:
    """The known suffix that a file's name ends with, else its last suffix: `.jsonl.gz` of rows.v2.jsonl.gz."""
    name = path.name.lower()
    return max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default=path.suffix)


def looks_like_a_file(name: str) -> bool:
    """Whether the name means a local file, so that a misspelled path is never looked up on the hub."""
    path = Path(name).expanduser()
    is_partly_there = len(path.parts) > 1 and path.parent.is_dir()
    return (
        is_partly_there
        or name.startswith((".", "/", "~"))
        or "\\" in name
        or len(path.parts) > 2
        or bool(_ENDS_AS_A_FILE.search(name))
    )


def near_files(path: Path) -> str:
    """A sentence that names files with names near that of a missing one, with a space before it."""
    if not path.parent.is_dir():
        return f" There is no folder {path.parent} either."
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=3)
    return f" Did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""


def refuse_missing_file(name: str, *, flag: str) -> None:
    """:raises InputError: the name is that of a file or folder, and there is none."""
    path = Path(name).expanduser()
    if not path.exists() and looks_like_a_file(name):
        raise InputError(
            f"{flag}: {name}: no such file (a name like this is not looked for on the hub).{near_files(path)}"
        )
