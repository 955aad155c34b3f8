"""What stays for the life of a process is kept from the garbage collector.

torch, transformers and vLLM leave objects by the hundred thousand, none of which is ever garbage.
Python looks through all of them several times while vLLM is imported, and vLLM while an engine is
made.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Around imports: nothing is collected, and what is there afterwards stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
