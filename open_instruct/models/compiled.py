"""Compiled blocks and a compiled loss, in few versions, with a warning where there are too many.

The numbers of tokens and documents of a row and its longest document change from row to row. A
version compiled for one row would serve no other, so these sizes are symbols from the start.
Separate versions remain for separate computations: with or without gradient, with or without shared
keys, for each window, and for a row of a single token.
"""

import logging

import torch
import torch._dynamo

log = logging.getLogger(__name__)

# Versions of a function for all models and layers of the process; beyond, it runs uncompiled.
# PyTorch's default is 8.
MAX_VERSIONS = 64
# Dynamic inputs of blocks by the names of PyTorch's compiler: numbers, and the token axis of the
# residual stream. Other tensors carry marks of dynamic sizes; a mark on the stream would be lost in
# FSDP's hooks.
DYNAMIC_SOURCES = r"L\['kwargs'\]\['cu_doc_lens'\]\.max_(queries|keys),L\['x'\]:1,"


def prepare_compiler() -> None:
    """Set PyTorch's compiler for our blocks: the number of versions, symbolic sizes, a warning.

    PyTorch keeps these settings for each thread. A GPU has a thread of its own for backward passes,
    in which recomputed blocks may be compiled: call it there too.
    """
    torch._dynamo.config.recompile_limit = MAX_VERSIONS
    if DYNAMIC_SOURCES not in torch.compiler.config.dynamic_sources:
        torch.compiler.config.dynamic_sources += DYNAMIC_SOURCES
    logging.getLogger("torch._dynamo.convert_frame").addHandler(FALLBACKS)


class Fallbacks(logging.Handler):
    """Warns of functions that PyTorch gave up compiling, and counts them.

    PyTorch reports them to its own log alone.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not record.msg.startswith("torch._dynamo hit config."):
            return
        self.count += 1
        log.warning(
            "the compiler has made %s versions of %s, its limit: for rows that fit none of them "
            "it runs uncompiled from now on, slower, and without --activation_memory_budget. Use "
            "--no_compile_model, with --activation_checkpointing full where memory is short; the "
            "last version was made because: %s",
            *(record.args[index] for index in (1, 2, 3)),  # type: ignore[index]
        )


FALLBACKS = Fallbacks()
