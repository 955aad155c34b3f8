"""Seeded damage:

JSON with one value changed to something odd, bytes with some of them changed, cut or doubled.
"""

import copy
import random
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        7,
        1000,
        2**31,
        2**63,
        10**30,
        -(10**30),
        0.5,
        -0.0,
        1e-300,
        1e308,
    ),
    *(
        float("inf"),
        float("nan"),
        "",
        "x",
        "7",
        "é\ud800",
        "../../etc/passwd",
        "a/b",
        "\x00\x1b[31m",
    ),
    *([], [0], ["x", None], [[]], {}, {"x": 1}, {"": {}}),
)


def mutated(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value in which one place, at any depth, is another value, is gone, or has
    another name.
    """
    value = copy.deepcopy(value)
    places = list(_places(value))
    container, key = rng.choice(places)
    choice = rng.random()
    if choice < 0.15:
        del container[key]
    elif choice < 0.25 and isinstance(container, dict):
        container[rng.choice([*container, "x", ""])] = container.pop(key)
    elif choice < 0.35:
        other, other_key = rng.choice(places)
        container[key] = copy.deepcopy(other[other_key])
    else:
        container[key] = rng.choice(ODD_VALUES)
    return value


def _places(value: Any) -> Any:
    if not isinstance(value, dict | list):
        return
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        yield from _places(value[key])


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """`data` with a few bytes changed, a piece cut out, doubled, or the end missing."""
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.choice((1, 1, 2, 8, 64)))
    piece = data[start:stop]
    replaced = (
        bytes(rng.randrange(256) for _ in piece),
        bytes([piece[0] ^ 1 << rng.randrange(8)]) + piece[1:],
        piece * 2,
        b"",
    )
    if rng.random() < 0.1:
        return data[:start]
    return data[:start] + rng.choice(replaced) + data[stop:]
