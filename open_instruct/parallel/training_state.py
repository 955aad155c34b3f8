"""The bytes of training state that each parameter keeps from step to step.

Weights, gradients and the optimizer's moments are float32, also where the forward pass is in bfloat16.
"""

MASTER_BYTES = GRADIENT_BYTES = MOMENT_BYTES = 4
ADAMW_MOMENTS = 2
