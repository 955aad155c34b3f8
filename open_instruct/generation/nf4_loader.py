"""A loader for vLLM that rounds a model's matrices to 4 bits (NF4), as QLoRA's learners hold them.

It serves engines that get the adapter alone. vLLM calls `register` in each of its processes, as
this package's entry points say. Engines compute with the rounded values; they hold no codes.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

import torch

from open_instruct.config.lora import MATRICES_IN_4_BITS
from open_instruct.core.errors import InputError
from open_instruct.generation.requests import EngineSettings
from open_instruct.models.hf.names import TensorNames, unpack_tensor
from open_instruct.models.nf4 import dequantize, quantize

PLUGIN = "open_instruct_nf4"
LOAD_FORMAT = "nf4_values"
DTYPE_OF_SCALES = "dtype_of_scales"


def load_options(settings: EngineSettings) -> dict[str, Any]:
    """Options of vLLM's `EngineArgs` for how it reads the model's files.

    Raises:
        InputError: vLLM will not call `register`.
    """
    if settings.adapter is None or not settings.adapter.use_qlora:
        return {"load_format": "safetensors"}
    is_allowed = PLUGIN in os.environ.get("VLLM_PLUGINS", PLUGIN).split(",")
    if not is_allowed or not entry_points(group="vllm.general_plugins", name=PLUGIN):
        remedy = "add it to VLLM_PLUGINS"
        if is_allowed:
            remedy = "install the package anew"
        raise InputError(
            f"--lora_sync adapter: vLLM lacks the plugin {PLUGIN}: {remedy}, or use --lora_sync "
            "merged",
            kind="missing_package",
        )
    return {
        "load_format": LOAD_FORMAT,
        "model_loader_extra_config": {DTYPE_OF_SCALES: settings.dtype_of_scales},
    }


def register() -> None:
    """Add the loader to the vLLM of this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class RoundingLoader(DefaultModelLoader):
        def __init__(self, load_config: Any) -> None:
            self._dtype = getattr(torch, load_config.model_loader_extra_config[DTYPE_OF_SCALES])
            super().__init__(
                replace(load_config, load_format="safetensors", model_loader_extra_config={})
            )

        def get_all_weights(
            self, model_config: Any, model: torch.nn.Module
        ) -> Iterator[tuple[str, torch.Tensor]]:
            names = TensorNames(model_config.hf_text_config)
            rounded = {hf_name for name, hf_name in names if name.endswith(MATRICES_IN_4_BITS)}
            for name, whole in super().get_all_weights(model_config, model):
                if unpack_tensor(name, whole.shape).keys() <= rounded:
                    yield name, dequantize(*quantize(whole, self._dtype))
                else:
                    yield name, whole

    register_model_loader(LOAD_FORMAT)(RoundingLoader)
