"""Activation checkpointing, from flags to OLMo-core's config; what would silently do nothing is replaced or refused."""

from __future__ import annotations

import torch
from olmo_core.nn.transformer import TransformerActivationCheckpointingMode as Mode
from olmo_core.train.train_module import TransformerActivationCheckpointingConfig

from open_instruct.config.sections import MemorySection


def build_activation_checkpointing(
    memory: MemorySection, *, device: torch.device
) -> tuple[TransformerActivationCheckpointingConfig | None, list[str]]:
    """The config (None: keep every activation) and warnings about what was replaced.

    A memory budget is spent by the compiler. Where compilation is skipped (no CUDA) OLMo-core would
    keep everything and say nothing, so whole blocks are recomputed instead.
    """
    warnings: list[str] = []
    compiles = memory.compile_model and device.type == "cuda"
    if memory.compile_model and not compiles:
        warnings.append("--compile_model does nothing without CUDA: the model runs uncompiled")
    if memory.activation_memory_budget < 1.0:
        if compiles:
            return (
                TransformerActivationCheckpointingConfig(
                    mode=Mode.budget, activation_memory_budget=memory.activation_memory_budget
                ),
                warnings,
            )
        warnings.append(
            f"--activation_memory_budget {memory.activation_memory_budget} needs the compiler, which is skipped "
            "without CUDA: recomputing whole blocks instead (--activation_checkpointing full)"
        )
        return TransformerActivationCheckpointingConfig(mode=Mode.full), warnings
    if memory.activation_checkpointing == "full":
        return TransformerActivationCheckpointingConfig(mode=Mode.full), warnings
    if memory.activation_checkpointing == "selected_modules":
        return (
            TransformerActivationCheckpointingConfig(
                mode=Mode.selected_modules, modules=list(memory.activation_checkpointing_modules)
            ),
            warnings,
        )
    return None, warnings
