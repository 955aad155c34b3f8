"""Records of an engine: requests and settings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from open_instruct.config.fleet_sections import FleetSection
from open_instruct.config.lora import LoRASection
from open_instruct.core.errors import InputError

Dtype = Literal["bfloat16", "float32"]

CUDA_SEQS = 256
CPU_SEQS = 64
# On a CPU a step of this many tokens is already bound by compute; more tokens only make other
# requests wait.
CPU_TOKENS_OF_A_STEP = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """The sampling parameters of completions. Temperature 0 takes the likeliest token.

    With a `json_schema`, as JSON, only texts of that form can be sampled.
    """

    temperature: float
    top_p: float
    max_tokens: int
    stop_strings: tuple[str, ...] = ()
    json_schema: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for one completion, with its seed, so that sending it again samples the same.

    Example: sample 2 of ticket 41 is `GenerationRequest(request_id="41/2", prompt_token_ids=(1, 40,
    11, 2), seed=…, sampling=…)`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    sampling: SamplingSettings


def make_sampling_seed(*parts: int | str) -> int:
    """A request's seed, made of the run's and the request's place in the run.

    63 bits that are the same on every machine and in every version of Python.

    Example: `make_sampling_seed(run_seed, ticket, sample_index)`.
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """The limits of one step of an engine.

    `max_num_batched_tokens` of None is the choice of vLLM's `LLM` for the device: 16,384 with 70
    GiB or more, 8,192 with less and on an A100. With `schedules_ahead` a step is scheduled while
    the one before is computed.

    Example: on a CPU, `Batching(max_num_seqs=64, max_num_batched_tokens=4096,
    schedules_ahead=False)`.
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
            raise InputError(
                "--vllm_async_scheduling on: vLLM never does on a CPU; use auto, or off",
                kind="machine",
            )
        if tokens is not None and tokens < max_model_len:
            raise InputError(
                f"--vllm_max_num_batched_tokens {tokens}: on a CPU a prompt is not cut in two, "
                f"and one may have {max_model_len} tokens with its completion; use at least so "
                "many, or leave it out",
                kind="out_of_range",
            )
        return cls(
            max_num_seqs=fleet.vllm_max_num_seqs or CPU_SEQS,
            max_num_batched_tokens=tokens or max(CPU_TOKENS_OF_A_STEP, max_model_len),
            schedules_ahead=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of one vLLM engine.

    With an `adapter` the engine holds one beside a model that never changes, and updates carry the
    adapter alone. If learners hold the model in 4 bits, the engine rounds it alike, with scales of
    `dtype_of_scales`.
    """

    model_folder: str  # a Hugging Face folder that every node can read
    tokenizer_folder: str
    dtype: Dtype
    max_model_len: int  # tokens of the longest prompt with its completion
    batching: Batching
    fleet: FleetSection
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    adapter: LoRASection | None = None
    dtype_of_scales: Dtype = "bfloat16"


@dataclass(slots=True)
class Home:
    """The index of the engine that holds an episode's keys and values; None before a request."""

    engine: int | None = None
