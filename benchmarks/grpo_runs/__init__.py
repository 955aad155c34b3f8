"""What `grpo_vs_trl.py` runs."""

import harness  # noqa: F401  # so that what follows imports this checkout
