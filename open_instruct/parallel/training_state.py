"""The bytes of training state that each parameter keeps from step to step.

Weights, gradients and the optimizer's moments are float32 whatever dtype computes.
"""

from __future__ import annotations

MASTER_BYTES = GRADIENT_BYTES = MOMENT_BYTES = 4
ADAMW_MOMENTS = 2
