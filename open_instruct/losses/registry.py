"""Tables of functions of this room by the names that flags choose them by.

Each function is registered with the flags that it is given, as keyword-only arguments of their
names.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


def bind_flags(
    function: Callable[..., Result], flags: Sequence[str], section: object
) -> Callable[..., Result]:
    """The function with the values that these flags have in `section`."""
    return partial(function, **{flag: getattr(section, flag) for flag in flags})


def make_register(
    table: dict[str, Any], record: Callable[..., Any]
) -> Callable[..., Callable[[Function], Function]]:
    """`register(name, formula, paper, **facts)`, which puts the decorated function into `table`, in
    a `record`.
    """

    def register(
        name: str,
        formula: str,
        paper: str,
        **facts: Any,
    ) -> Callable[[Function], Function]:
        def add(function: Function) -> Function:
            table[name] = record(
                function=function,
                formula=formula,
                paper=paper,
                **facts,
            )
            return function

        return add

    return register
