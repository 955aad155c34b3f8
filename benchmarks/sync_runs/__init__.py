"""The processes of a weight sync, and what is measured in them."""

import harness  # noqa: F401  # so that what follows imports this checkout
