"""The ranks of `load_memory.py`."""

import harness  # noqa: F401  # so that what follows imports this checkout
