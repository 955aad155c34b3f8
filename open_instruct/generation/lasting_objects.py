"""What stays for the life of a process is kept from the garbage collector.

torch, transformers and vLLM leave a million objects, and a look through all of them takes half a
second. Python takes several while vLLM is imported, and vLLM asks for two while an engine is made.
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
