"""Checks at an engine's start, and vLLM's refusals in terms of our flags; without vLLM itself."""

import re
from collections.abc import Iterable, Mapping
from math import floor

import numpy as np

from open_instruct.config.lora import LoRASection
from open_instruct.core.errors import InputError, RunError
from open_instruct.generation.requests import EngineSettings

# vLLM's message when another process holds the GPU's memory: free and total GiB, rounded to
# hundredths.
FREE_MEMORY = re.compile(r"Free memory on device \S+ \(([\d.]+)/([\d.]+) GiB\)")
ROUNDED_GIB = 0.01
# Temperatures of the check, at start-up, that log-probs are of the distribution that is sampled
# from.
PROBED_TEMPERATURES = (1.0, 2.0)
NUM_PROBED = 10
LEAST_SPREAD = 0.1  # nats; where all tokens are as likely, rounding decides


def explain_memory_error(
    words: str, settings: EngineSettings, *, has_cache_size: bool
) -> str | None:
    """vLLM's refusal for want of memory, in terms of our flags; None if its error is another."""
    share = settings.fleet.vllm_gpu_memory_utilization
    match = FREE_MEMORY.match(words)
    if match:
        free = float(match[1])
        total = float(match[2])
        percent = max(0, floor(100 * (free - ROUNDED_GIB) / total))
        remedy = "end what holds it, or give engines a GPU of their own"
        if percent:
            remedy = (
                f"use {percent / 100:g}, or less where the learner's steps need memory "
                "(open-instruct plan grpo)"
            )
        return (
            f"--vllm_gpu_memory_utilization {share:g} is {share * total:.1f} of {total:g} GiB, "
            f"and {free:g} GiB are free on an engine's GPU, beside the learner of "
            f"--single_gpu_mode or other processes: {remedy}"
        )
    if "KV cache" not in words and "cache blocks" not in words:
        return None
    flag = f"--vllm_gpu_memory_utilization, which is {share:g}"
    if has_cache_size:
        flag = "--vllm_kv_cache_mib"
    return (
        f"the keys and values of one completion, {settings.max_model_len} tokens with its prompt, "
        f"do not fit into an engine's cache: raise {flag}, or lower --response_length or "
        "--max_prompt_token_length"
    )


def check_temperature(warm: Mapping[int, float], hot: Mapping[int, float]) -> None:
    """Compare the likeliest tokens' log-probs after one prompt at both `PROBED_TEMPERATURES`.

    Twice the temperature halves all differences between log-probs. Where vLLM does not apply it,
    they are the same.

    Args:
        warm: log-probs by token at temperature 1.
        hot: log-probs by token at temperature 2.

    Raises:
        RunError: vLLM did not apply it.
    """
    shared = warm.keys() & hot.keys()
    spread_warm = np.ptp([warm[token] for token in shared])
    spread_hot = np.ptp([hot[token] for token in shared])
    if LEAST_SPREAD < spread_warm < 1.5 * spread_hot:
        raise RunError(
            f"vLLM's log-probs are not those that it samples from: between {len(shared)} tokens "
            f"they differ by up to {spread_warm:.3g} at temperature 1 and by {spread_hot:.3g} at "
            "temperature 2, which should be half of it. Have vLLM's other model runner by "
            "--vllm_runner v1 (or v2, if it is v1)"
        )


def check_targets(adapter: LoRASection, layers: Iterable[str]) -> None:
    """Check that vLLM can adapt the layers that `adapter` is for.

    Args:
        layers: the names of the layers that vLLM can adapt.

    Raises:
        InputError: it cannot.
    """
    adaptable = {layer.rpartition(".")[2] for layer in layers}
    missing = [target for target in adapter.targets if target not in adaptable]
    if missing:
        raise InputError(
            "--lora_sync adapter: vLLM's layers of this model take no adapter for "
            f"{', '.join(missing)}; use --lora_sync merged",
            kind="unsupported_model",
        )
