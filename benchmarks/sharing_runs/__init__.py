"""The rows of `prefix_sharing.py`, and what they cost."""

import harness  # noqa: F401  # so that what follows imports this checkout
