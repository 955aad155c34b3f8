"""The heads of `distill_memory.py`, and how their memory is counted."""

import harness  # noqa: F401  # so that what follows imports this checkout
