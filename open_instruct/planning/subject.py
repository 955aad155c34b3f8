"""What is planned: a model by its folder or its name."""

from __future__ import annotations

import contextlib
import difflib
from pathlib import Path

from open_instruct.errors import InputError
from open_instruct.planning.model_shape import ModelShape, read_config
from open_instruct.planning.public_models import find_public_model, public_names


def model_shape(name_or_path: str) -> ModelShape:
    """The shape of a model.

    Args:
        name_or_path: a folder with config.json, a config.json, or the name of a public model, with or without its
            organisation; a name on the hub that is not among them is not fetched.

    Raises:
        InputError: there is no such model; a field is missing, or the family is not supported.
    """
    with contextlib.suppress(OSError, RuntimeError):  # a name that no file can have, or of a user that is not there
        path = Path(name_or_path).expanduser()
        if path.is_dir():
            return read_config(path / "config.json")
        if path.is_file():
            return read_config(path)
    found = find_public_model(name_or_path)
    if found is not None:
        return found
    known = {name.rpartition("/")[2].lower(): name for name in public_names()}
    near = difflib.get_close_matches(name_or_path.rpartition("/")[2].lower(), known, n=3, cutoff=0.5)
    names = f"like {', '.join(known[name] for name in near)}" if near else f"such as {next(iter(public_names()))}"
    raise InputError(
        f"{name_or_path}: no such folder or config.json, and no model whose shape is built in; give a folder, a "
        f"config.json, or a name {names}"
    )
