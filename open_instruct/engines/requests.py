"""Records of an engine: requests, answers and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from open_instruct.config.lora import LoRASection
from open_instruct.config.rollout_sections import FleetSection
from open_instruct.engines.batching import Batching
from open_instruct.records import Completion

Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How completions are sampled. Temperature 0 takes the likeliest token."""

    temperature: float
    top_p: float
    max_tokens: int
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion asked for. The seed travels with the request, so that asking again asks for the same.

    Example: sample 2 of ticket 41 is `GenerationRequest(request_id="41/2", prompt_token_ids=(1, 40, 11, 2), seed=…,
    sampling=…)`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    sampling: SamplingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswers:
    """The outcomes since the last poll, and how the engine is.

    Example: `EngineAnswers(seconds_in_step=0.2, outcomes={7: Completion(…), 8: "the prompt has 90 tokens, …"})`.
    """

    seconds_in_step: float
    """Of the present step so far; 0 between two steps."""
    outcomes: Mapping[int, Completion | str]
    """By the key that each request was begun under; a sentence with the reason where it cannot be completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How one vLLM engine is set up; `model_folder` is a Hugging Face folder that every node can read.

    With an `adapter` the engine holds one beside a model that never changes, and updates carry the adapter alone.
    """

    model_folder: str
    tokenizer_folder: str
    dtype: Dtype
    max_model_len: int  # tokens of the longest prompt with its completion
    batching: Batching
    fleet: FleetSection
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    adapter: LoRASection | None = None
