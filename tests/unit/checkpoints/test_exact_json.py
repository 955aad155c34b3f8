"""Values of a checkpoint through JSON text and back, bit for bit."""

import json
import math
import random
import struct
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from open_instruct.checkpoints.safe_checkpointer import from_json, to_json


def bits(value: Any) -> Any:
    """Types and bits, so that -0.0 is not 0.0 and a tuple is no list."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, torch.Tensor):
        return (
            value.dtype,
            tuple(value.shape),
            value.contiguous().view(-1).view(torch.uint8).tolist(),
        )
    if isinstance(value, np.ndarray | np.generic):
        return (type(value), value.dtype, value.shape, value.tobytes())
    if isinstance(value, dict):
        return (dict, [(bits(key), bits(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [bits(item) for item in value])
    return (type(value), value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, 2**80, -7, "ä\u2028\0", "", [], (), {}],
        [0.1, -0.0, 5e-324, 1e308, math.inf, -math.inf, math.nan],
        {"betas": (0.9, 0.999), 3: [(1, (2,))], (1, "a"): {"tensor": "F32", "tuple": 1}},
        torch.tensor([1.5, -0.0, math.nan]),
        [
            torch.tensor(3, dtype=torch.int64),
            torch.zeros(0, 4),
            torch.ones(2, 3, dtype=torch.bool).T,
        ],
        torch.randn(5).to(torch.bfloat16),
        [
            np.float32(0.1),
            np.int64(-3),
            np.bool_(True),
            np.arange(6, dtype=np.uint32).reshape(2, 3).T,
        ],
        random.Random(3).getstate(),
        np.random.RandomState(3).get_state(),
        np.random.default_rng(3).bit_generator.state,
        torch.get_rng_state(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_value_comes_back_as_it_was(value: Any) -> None:
    assert bits(from_json(json.loads(json.dumps(to_json(value))))) == bits(value)


class Colour(Enum):
    RED = 1


class MyInt(int):
    pass


@pytest.mark.parametrize(
    "value", [Colour.RED, MyInt(3), {1, 2}, b"raw", object(), np.array([object()]), [{"a": print}]]
)
def test_exact_json_refuses_values_it_could_only_guess(value: Any) -> None:
    with pytest.raises(TypeError, match="a checkpoint cannot hold a"):
        to_json(value)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"object": "os.system"},
        {"tensor": "load"},
        {"tensor": to_json(torch.ones(2))["tensor"][:-4]},
        {"array": "|O8"},
        {"array": {"tensor": "not base64"}},
        {"dict": [[1]]},
        {"dict": [[{"dict": []}, 1]]},
    ],
)
def test_exact_json_raises_its_error_for_any_foreign_text(told: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError, SafetensorError)):
        from_json(told)
