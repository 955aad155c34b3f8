"""Requests of a prompt to engines; their seeds depend only on the run's seed and a request's place in the run."""

from __future__ import annotations

import hashlib

from open_instruct.engines.requests import GenerationRequest, SamplingSettings
from open_instruct.records import Prompt


def samples_of(
    prompt: Prompt, num_samples: int, sampling: SamplingSettings, *, seed: int, place: tuple[int | str, ...]
) -> list[GenerationRequest]:
    """One request for each sample of the prompt; `place` names the request's place in the run, such as a ticket."""
    return [
        GenerationRequest(
            request_id="/".join(map(str, (*place, index))),
            prompt_token_ids=prompt.token_ids,
            seed=sampling_seed(seed, *place, index),
            sampling=sampling,
        )
        for index in range(num_samples)
    ]


def sampling_seed(*parts: int | str) -> int:
    """63 bits that are the same on every machine and in every version of Python.

    Example: `sampling_seed(run_seed, ticket, sample_index)`.
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
