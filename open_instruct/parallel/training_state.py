"""The bytes of training state: what is kept of each parameter from step to step.

Weights, their gradients and the optimizer's moments are float32 whatever is computed in.
"""

from __future__ import annotations

MASTER_BYTES = GRADIENT_BYTES = MOMENT_BYTES = 4
ADAMW_MOMENTS = 2
