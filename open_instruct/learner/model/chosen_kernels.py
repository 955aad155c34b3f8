"""The choice of attention kernels and of activation checkpointing for a run's model."""

from __future__ import annotations

from olmo_core.nn.transformer import Transformer
from olmo_core.train.train_module.transformer import TransformerActivationCheckpointingConfig

from open_instruct.config.training import LearnerConfig
from open_instruct.learner.model.activation_checkpointing import build_activation_checkpointing
from open_instruct.learner.model.kernels import choose_attention, kernel_warnings
from open_instruct.run.opened import Run


def choose_kernels(
    model: Transformer, *, run: Run, config: LearnerConfig
) -> TransformerActivationCheckpointingConfig | None:
    """Choose the attention kernels, and return the activation checkpointing; the console warns of replaced settings."""
    device, param_dtype = run.process.device, config.model.param_dtype
    checkpointing, warnings = build_activation_checkpointing(config.memory, model=model, device=device)
    for warning in [*warnings, *kernel_warnings(config.memory, param_dtype=param_dtype, device=device)]:
        run.console.warn(warning)
    if message := choose_attention(device, param_dtype=param_dtype):
        run.console.say(message)
    return checkpointing
