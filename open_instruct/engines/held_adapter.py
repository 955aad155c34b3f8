"""vLLM's settings for an engine that holds one adapter beside a model that never changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from open_instruct.config.lora import RANKS_OF_ENGINES, LoRASection
from open_instruct.errors import InputError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

ADAPTER_ID = 1


def options_of(adapter: LoRASection) -> dict[str, Any]:
    """Options of vLLM's `EngineArgs` for an adapter that is replaced in place."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in RANKS_OF_ENGINES if rank >= adapter.lora_r),
        "lora_target_modules": list(adapter.targets),  # others stay as fast as they are
    }


def names_of_versions() -> Iterator[LoRARequest]:
    """Yields the adapter's name for requests, with a new name and path for each version.

    vLLM shares cached prefixes among requests of one name. There is nothing at the path: vLLM reads it only for an
    adapter that it does not hold.
    """
    from vllm.lora.request import LoRARequest

    return (LoRARequest(f"policy {number}", ADAPTER_ID, f"memory/{number}") for number in itertools.count())


def check_targets(adapter: LoRASection, layers: Iterable[str]) -> None:
    """Check that vLLM can adapt the layers that `adapter` is for; `layers` are those that it can adapt.

    Raises:
        InputError: it cannot.
    """
    adapted = {layer.rpartition(".")[2] for layer in layers}
    if missing := [target for target in adapter.targets if target not in adapted]:
        raise InputError(
            f"--lora_sync adapter: vLLM's layers of this model take no adapter for {', '.join(missing)}; use "
            "--lora_sync merged"
        )
