"""What the compiler keeps, and what it warned of."""

import inspect
import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def compiled_versions(model: Any) -> dict[str, int]:
    """How many versions the compiler keeps of a block's forward pass and of the head's; 0 where it
    is not compiled.
    """
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    def versions(functions: Iterable[Any]) -> int:
        plain = (inspect.unwrap(function) for function in functions)
        return sum(len(_debug_get_cache_entry_list(function.__code__)) for function in plain)

    def forwards(module: torch.nn.Module) -> Iterator[Any]:
        return (
            vars(kind)["forward"]
            for kind in type(module).__mro__[: -len(torch.nn.Module.__mro__)]
            if "forward" in vars(kind)
        )

    head, block = model.lm_head, next(iter(model.blocks.values()))
    # One that is recomputed lies within another module.
    block = getattr(block, "_checkpoint_wrapped_module", block)
    # Of the head it may be functions beside its class that are compiled.
    beside = [
        value
        for value in vars(sys.modules[type(head).__module__]).values()
        if inspect.isfunction(value)
    ]
    return {
        "block": versions(forwards(block)),
        "head": versions([*forwards(head), *beside]),
    }


class Listening(logging.Handler):
    """Keeps the first line of every warning."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage().strip().partition("\n")[0])
