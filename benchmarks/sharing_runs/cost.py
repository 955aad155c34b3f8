"""Time and activations of forward and backward, and what the time goes into."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer

from open_instruct.core.records import PackedBatch
from open_instruct.models.build import build_model
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.training.model.forward import token_logprobs

KINDS: dict[str, tuple[str, ...]] = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "gemm"),
    "attention": ("_attention", "flash"),
    "gathering and scattering": (
        "index_select",
        "index_copy",
        "index_add",
        "aten::cat",
        "split",
        "stack",
    ),
    "other": (),
}


def random_model(checkpoint: Path, device: torch.device) -> Transformer:
    model = build_model(load_hf_config(str(checkpoint)))
    model.init_weights(device=device)
    for name, parameter in model.named_parameters():
        torch.nn.init.ones_(parameter) if "norm" in name else torch.nn.init.normal_(
            parameter, std=0.02
        )
    return model.to(torch.bfloat16) if device.type == "cuda" else model


def forward_backward(model: Transformer, batch: PackedBatch, device: torch.device) -> None:
    model.zero_grad(set_to_none=True)
    token_logprobs(model, batch, device=device).logprobs_N.sum().backward()


def print_profile(
    model: Transformer, batches: dict[str, PackedBatch], device: torch.device
) -> None:
    """Shares of the time of packed and of shared rows by kind of operation."""
    for name in ("packed", "shared"):
        # The first touch of the memory would count as work.
        forward_backward(model, batches[name], device)
        with torch.profiler.profile() as profiler:
            forward_backward(model, batches[name], device)
        seconds = dict.fromkeys(KINDS, 0.0)
        for event in profiler.key_averages():
            kind = next(
                (kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)),
                "other",
            )
            seconds[kind] += (
                event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
            )
        shares = ", ".join(
            f"{kind} {value / sum(seconds.values()):.0%}" for kind, value in seconds.items()
        )
        print(f"  time of {name}: {shares}")


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds on a GPU; on a CPU the process's own, which other work on the machine disturbs
    less.
    """
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    began_s = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - began_s


def activation_bytes(model: Transformer, batch: PackedBatch, device: torch.device) -> int:
    """Bytes of the storages that the forward pass keeps for the backward pass, the parameters' own
    left out.
    """
    of_parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total = token_logprobs(model, batch, device=device).logprobs_N.sum()
    num_bytes = sum(storage.nbytes() for storage in kept.values())
    del total
    return num_bytes
