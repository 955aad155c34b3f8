"""The two sides of `engine_agreement.py`, and what is compared of them."""

import harness  # noqa: F401  # so that what follows imports this checkout
