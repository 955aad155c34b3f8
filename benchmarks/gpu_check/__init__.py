"""One command that says what of this package works on a machine's GPU, and how fast:
docs/gpu.md.
"""

import harness  # noqa: F401  # so that what follows imports this checkout
