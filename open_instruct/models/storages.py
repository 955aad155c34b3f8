"""The storages of tensors: which there are, and their bytes, whoever refers to them."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from open_instruct.core.errors import RunError
from open_instruct.models.shards import local_part, reshard


def list_module_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers of `module`, of which FSDP's are made shards first."""
    reshard(module)
    yield from module.parameters()
    yield from module.buffers()


def list_nested_tensors(value: object) -> Iterator[torch.Tensor]:
    """All tensors in lists, tuples and dictionaries, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from list_nested_tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from list_nested_tensors(each)


def view_storages(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The bytes of each storage of `tensors` on `device` that has any, once.

    Raises:
        RunError: a storage cannot be resized.
    """
    flats: dict[StorageWeakRef, torch.Tensor] = {}
    for tensor in tensors:
        local = local_part(tensor)
        storage = local.untyped_storage()
        if local.device.type != device.type or not storage.nbytes():
            continue
        if not storage.resizable():
            raise RunError(
                f"a tensor of shape {tuple(local.shape)} lies in memory that is not this "
                "process's alone, and cannot leave the device: use --placement split"
            )
        whole = local.as_strided((storage.nbytes() // local.itemsize,), (1,), 0)
        flats.setdefault(StorageWeakRef(storage), whole.view(torch.uint8))
    return list(flats.values())
