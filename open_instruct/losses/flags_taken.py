"""The flags that a function of this room takes: its keyword-only arguments, each named as its flag is."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

Result = TypeVar("Result")


@cache
def flags_taken(function: Callable[..., Any]) -> tuple[str, ...]:
    """Example: of `def gated(inputs, *, sapo_temperature_pos)` they are `("sapo_temperature_pos",)`."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


def with_flags(function: Callable[..., Result], section: object) -> Callable[..., Result]:
    """The function with the values that its flags have in `section`."""
    return partial(function, **{flag: getattr(section, flag) for flag in flags_taken(function)})
