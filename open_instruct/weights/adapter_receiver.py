"""The receiving end of a weight sync of adapters alone: the methods that vLLM adds to its workers for it."""

from collections.abc import Iterator
from typing import Any

import torch

from open_instruct.errors import RunError
from open_instruct.weights.receiver import WeightReceiver, Weights

ADAPTER_ID = 1


class AdapterReceiver(WeightReceiver):
    """Receives the weights of one adapter, which every request names, and not those of a model.

    The model never changes, and an update that failed before it was put in place leaves the previous adapter.
    """

    def adapted_layers(self: Any) -> list[str]:
        """The layers that can have an adapter, by Hugging Face's names: `model.layers.3.self_attn.q_proj`."""
        manager = self.model_runner.lora_manager._adapter_manager
        return [part for layer in manager.modules for part in manager.packed_modules.get(layer, [layer])]

    def hold_no_adapter(self: Any) -> None:
        """Compute without an adapter, by the name of the one that vLLM uses for warming up."""
        manager = self.model_runner.lora_manager._adapter_manager
        self.put_in_place(manager.create_dummy_lora(ADAPTER_ID, rank=1, embedding_modules={}))

    def hold_adapter(self: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Compute with these matrices from now on, by the names of an adapter's file.

        Raises:
            RunError: the engine lacks a layer of the adapter; names it.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        rank = next(whole.shape[0] for name, whole in tensors.items() if ".lora_A." in name)
        renames = getattr(self.get_model(), "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            tensors,
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # B has its factor already
            device=str(self.device),
            dtype=self.vllm_config.lora_config.lora_dtype,
            weights_mapper=renames and renames.get_rename_mapper(),
        )
        if unknown := sorted(adapter.loras.keys() - set(self.adapted_layers())):
            raise RunError(f"an engine can hold no adapter for {unknown[0]}: use --lora_sync merged")
        self.put_in_place(adapter)

    def put_in_place(self: Any, adapter: Any) -> None:
        """Copy the new adapter over the previous one."""
        manager = self.model_runner.lora_manager._adapter_manager
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)

    def start_update(self: Any) -> None:
        """Nothing to prepare: the adapter is replaced once the next one has arrived completely."""

    def take_weights(self: Any, buckets: Iterator[Weights]) -> None:
        """Compute with the matrices that have come, once all have."""
        self.hold_adapter({name: whole for weights in buckets for name, whole in weights})

    def finish_update(self: Any) -> None:
        """Nothing to finish: no layer was taken apart."""
