"""The backends that `--backend` can name: entry points of installed packages, in the group `open_instruct.backends`.

The name of an entry point is the flag's value, and its object a `BackendRecord`. Ours stand in pyproject.toml.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from open_instruct.config.parser import nearest
from open_instruct.errors import InputError

GROUP = "open_instruct.backends"


@cache
def installed_backend(name: str) -> Any:
    """:raises InputError: no installed backend has this name."""
    known = {each.name: each for each in entry_points(group=GROUP)}
    if not known:
        raise InputError("no backend is installed: run `make install`, or `pip install .`, once more")
    if name not in known:
        raise InputError(f"--backend {name}: takes {' or '.join(sorted(known))}{nearest(name, known)}")
    return known[name].load()
