"""The shapes of public models by their names on the Hugging Face hub, so that a plan downloads nothing.

public_models.json has, of the config.json that each was released with, what decides its shape. All are taken to be
stored in 16 bits, as the tuned ones are; for another dtype, or another shape, give the folder or its config.json.
"""

import contextlib
import difflib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from open_instruct.errors import InputError
from open_instruct.planning.subject.model import ModelShape, read_config, shape_of_fields

# Words of a name that say how a model was trained or when, not how large it is.
_VARIANT = re.compile(
    r"-(?:meta|base|pt|hf|sft|dpo|rlvr\d?|instruct|think|chat|rl|zero|math|code|if|general|mix|\d{4})(?=-)"
)


def model_shape(name_or_path: str) -> ModelShape:
    """The shape of a model.

    Args:
        name_or_path: a folder with config.json, a config.json, or the name of a public model, with or without its
            organisation, or of a tuned variant; a name on the hub that is not among them is not fetched.

    Raises:
        InputError: there is no such model; a field is missing, or the family is not supported.
    """
    with contextlib.suppress(OSError, RuntimeError):  # a name that no file can have, or of a user that is not there
        path = Path(name_or_path).expanduser()
        if path.exists():
            return read_config(path / "config.json" if path.is_dir() else path)
    for public, fields in public_models().items():
        if _size_of(public) == _size_of(name_or_path):
            return shape_of_fields(fields, name=public, where=public)
    known = {name.rpartition("/")[2].lower(): name for name in public_models()}
    near = difflib.get_close_matches(name_or_path.rpartition("/")[2].lower(), known, n=3, cutoff=0.5)
    names = f"like {', '.join(known[name] for name in near)}" if near else f"such as {next(iter(public_models()))}"
    raise InputError(
        f"{name_or_path}: no such folder or config.json, and no model whose shape is built in; give a folder, a "
        f"config.json, or a name {names}"
    )


def _size_of(name: str) -> str:
    """`-olmo-3-7b-` of "allenai/Olmo-3-7B-Think-SFT" and of "Olmo-3-1025-7B"."""
    return _VARIANT.sub("", f"-{name.rpartition('/')[2].lower()}-")


@cache
def public_models() -> Any:
    """The fields of each by its name."""
    return json.loads(Path(__file__).with_name("public_models.json").read_text("utf-8"))
