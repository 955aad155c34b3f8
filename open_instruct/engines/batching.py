"""The batch size of an engine's step, from the device and the flags."""

from __future__ import annotations

from dataclasses import dataclass

from open_instruct.config.rollout_sections import FleetSection
from open_instruct.errors import InputError

CUDA_SEQS = 256
CPU_SEQS = 64
# On a CPU a step of this many tokens is already bound by compute; more tokens only make other requests wait.
CPU_TOKENS_OF_A_STEP = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """The limits of one step of an engine.

    `max_num_batched_tokens` of None is the choice of vLLM's `LLM` for the device: 16,384 with 70 GiB or more, 8,192
    with less and on an A100. With `schedules_ahead` a step is scheduled while the one before is computed.

    Example: on a CPU, `Batching(max_num_seqs=64, max_num_batched_tokens=4096, schedules_ahead=False)`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int | None
    schedules_ahead: bool

    @classmethod
    def of(cls, fleet: FleetSection, *, on_cuda: bool, max_model_len: int) -> Batching:
        """The flags' values, and the device's defaults where no flag is given.

        Args:
            max_model_len: tokens of the longest prompt with its completion.

        Raises:
            InputError: it cannot be on this device; says what can.
        """
        tokens = fleet.vllm_max_num_batched_tokens
        if on_cuda:
            seqs = fleet.vllm_max_num_seqs or CUDA_SEQS
            return cls(
                max_num_seqs=min(seqs, tokens or seqs),
                max_num_batched_tokens=tokens,
                schedules_ahead=fleet.vllm_async_scheduling != "off",
            )
        if fleet.vllm_async_scheduling == "on":
            raise InputError("--vllm_async_scheduling on: vLLM never does on a CPU; use auto, or off")
        if tokens is not None and tokens < max_model_len:
            raise InputError(
                f"--vllm_max_num_batched_tokens {tokens}: on a CPU a prompt is not cut in two, and one may have "
                f"{max_model_len} tokens with its completion; use at least so many, or leave it out"
            )
        return cls(
            max_num_seqs=fleet.vllm_max_num_seqs or CPU_SEQS,
            max_num_batched_tokens=tokens or max(CPU_TOKENS_OF_A_STEP, max_model_len),
            schedules_ahead=False,
        )
