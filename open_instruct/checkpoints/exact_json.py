"""Plain values as JSON and back, bit for bit. Values that JSON has no form for are tagged; nothing is executed."""

import base64
from typing import Any

import numpy as np
import torch

from open_instruct.models.hf.checkpoint_files import DTYPE_NAMES, DTYPES

ARRAY_KINDS = "biufc"  # numpy's kinds that are numbers


def to_json(value: Any) -> Any:
    """The value in a form that `json.dumps` accepts. Tensors are moved to the CPU.

    :raises TypeError: for a value that could not be read back exactly: an object, an enum, a subclass.

    Example::

        >>> to_json({"betas": (0.9, 0.99)})
        {'dict': [['betas', {'tuple': [0.9, 0.99]}]]}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value  # the text of a float is exact, NaN and infinity have one
    if isinstance(value, torch.Tensor) and value.dtype in DTYPE_NAMES:
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return {"tensor": DTYPE_NAMES[value.dtype], "shape": list(value.shape), "base64": _text(raw)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in ARRAY_KINDS:
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {kind: value.dtype.str, "shape": list(value.shape), "base64": _text(np.ascontiguousarray(value))}
    if type(value) is tuple:
        return {"tuple": [to_json(item) for item in value]}
    if type(value) is list:
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(item)] for key, item in value.items()]}
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


def from_json(value: Any) -> Any:
    """The value that `to_json` was given.

    :raises ValueError, KeyError, TypeError: `to_json` returns no such value.
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(from_json(item) for item in value["tuple"])
    if "dict" in value:
        return {from_json(key): from_json(item) for key, item in value["dict"]}
    raw = bytearray(base64.b64decode(value["base64"], validate=True))
    if "tensor" in value:
        if not raw:
            return torch.empty(value["shape"], dtype=DTYPES[value["tensor"]])
        return torch.frombuffer(raw, dtype=torch.uint8).view(DTYPES[value["tensor"]]).reshape(value["shape"]).clone()
    dtype = np.dtype(value["array"] if "array" in value else value["number"])
    if dtype.kind not in ARRAY_KINDS:
        raise ValueError(f"an array of {dtype} is not one of numbers")
    array = np.frombuffer(raw, dtype=dtype).reshape(value["shape"])
    return array if "array" in value else array[()]


def _text(raw: np.ndarray | np.generic) -> str:
    return base64.b64encode(raw.tobytes()).decode()
