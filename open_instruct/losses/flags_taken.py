"""Tables of functions of this room, and the flags that each takes: its keyword-only arguments,
named as its flags.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def flags_taken(function: Callable[..., Any]) -> tuple[str, ...]:
    """Example: of `def gated(inputs, *, sapo_temperature_pos)` they are
    `("sapo_temperature_pos",)`.
    """
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


def with_flags(function: Callable[..., Result], section: object) -> Callable[..., Result]:
    """The function with the values that its flags have in `section`."""
    return partial(function, **{flag: getattr(section, flag) for flag in flags_taken(function)})


def registers(
    table: dict[str, Any], record: Callable[..., Any]
) -> Callable[..., Callable[[Function], Function]]:
    """`register(name, formula, paper, **facts)`, which puts the decorated function into `table`, in
    a `record`.
    """

    def register(
        name: str, formula: str, paper: str, **facts: Any
    ) -> Callable[[Function], Function]:
        def add(function: Function) -> Function:
            table[name] = record(function=function, formula=formula, paper=paper, **facts)
            return function

        return add

    return register
