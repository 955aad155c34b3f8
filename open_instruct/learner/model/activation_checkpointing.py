"""Activation checkpointing, from flags to OLMo-core's config; settings without an effect are replaced or refused."""

from collections.abc import Sequence

import torch
from olmo_core.nn.transformer import Transformer
from olmo_core.nn.transformer import TransformerActivationCheckpointingMode as Mode
from olmo_core.train.train_module import TransformerActivationCheckpointingConfig

from open_instruct.config.sections import MemorySection
from open_instruct.errors import InputError
from open_instruct.models.hf.names import names_module


def build_activation_checkpointing(
    memory: MemorySection, *, model: Transformer, device: torch.device
) -> tuple[TransformerActivationCheckpointingConfig | None, list[str]]:
    """The config (None: keep every activation) and warnings about what was replaced.

    The compiler spends a memory budget, see kernels.py. Without CUDA nothing is compiled, and OLMo-core would silently
    keep every activation, so whole blocks are recomputed instead. Offloading recomputes blocks too, and moves their
    inputs to the host, see inputs_on_host.py.

    :raises InputError: a pattern of modules matches nothing in `model`.
    """
    mode, budget, on_cuda = memory.activation_checkpointing, memory.activation_memory_budget, device.type == "cuda"
    whole_blocks = TransformerActivationCheckpointingConfig(mode=Mode.full)
    warnings: list[str] = []
    if memory.compile_model and not on_cuda:
        warnings.append("--compile_model does nothing without CUDA: the model runs uncompiled")
    if budget < 1.0:
        if on_cuda:
            return TransformerActivationCheckpointingConfig(mode=Mode.budget, activation_memory_budget=budget), warnings
        warnings.append(
            f"--activation_memory_budget {budget} needs the compiler, which is skipped without CUDA: recomputing whole "
            "blocks instead (--activation_checkpointing full)"
        )
        return whole_blocks, warnings
    if mode == "offload" and not on_cuda:
        warnings.append("--activation_checkpointing offload does without CUDA what full does: all is on the host")
    if mode in ("full", "offload"):
        return whole_blocks, warnings
    if mode == "selected_modules":
        modules = _selected(memory.activation_checkpointing_modules, model)
        return TransformerActivationCheckpointingConfig(mode=Mode.selected_modules, modules=modules), warnings
    return None, warnings


def _selected(patterns: Sequence[str], model: Transformer) -> list[str]:
    """The modules that `patterns` name, but none inside another; a * in OLMo-core's own patterns also matches dots."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(names_module([pattern], name) for name in names):
            parts = ", ".join(f"blocks.*.{name}" for name, _ in model.blocks["0"].named_children())
            raise InputError(
                f"--activation_checkpointing_modules {pattern}: the model has no module of that name (a * stands for "
                f"anything but a dot); the parts of its blocks are {parts}"
            )
    selected: list[str] = []
    for name in names:
        if names_module(patterns, name) and not any(name.startswith(f"{outer}.") for outer in selected):
            selected.append(name)
    return selected
