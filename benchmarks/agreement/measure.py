"""What the engine samples, and how far the learner's log-probs of it are from the engine's own."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from agreement.engine import LONGEST_COMPLETION, NUM_AT_ONCE, EngineProcess, settings_of
from agreement.learner import TEMPERATURE, Learner, send_weights
from agreement.prompts import DrawPrompt
from open_instruct.core.records import Completion
from open_instruct.generation.requests import GenerationRequest, SamplingSettings

Sample = list[tuple[GenerationRequest, Completion]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One version of the weights. `moved` is None for the start model."""

    version: int
    num_tokens: int
    largest: float
    mean: float
    rho_mean: float
    rho_std: float
    rho_min: float
    rho_max: float
    moved: float | None


def measure(
    folder: Path,
    *,
    dtype: str,
    draw_prompt: DrawPrompt,
    num_tokens: int,
    num_syncs: int,
    noise: float,
) -> tuple[list[Agreement], Sample]:
    """The start model and each version that was sent; and what the start model sampled."""
    engine = EngineProcess(settings_of(folder, dtype=dtype))
    learner = Learner(folder, dtype=dtype)
    first = sample_tokens(engine, draw_prompt, num_tokens=num_tokens, version=0)
    agreements = [compare(learner, first, version=0, moved=None)]
    sample = first
    for version in range(1, num_syncs + 1):
        learner.change(noise)
        moved = float((learner.logprobs(sample) - engine_logprobs(sample)).abs().mean())
        send_weights(learner, engine, version=version)
        sample = sample_tokens(engine, draw_prompt, num_tokens=num_tokens, version=version)
        agreements.append(compare(learner, sample, version=version, moved=moved))
    learner.sender.close()
    engine.stop()
    return agreements, first


def sample_tokens(
    engine: EngineProcess,
    draw_prompt: DrawPrompt,
    *,
    num_tokens: int,
    version: int,
) -> Sample:
    """Completions with `num_tokens` tokens at least; the same prompts for every version."""
    rng = random.Random(0)
    sampling = SamplingSettings(temperature=TEMPERATURE, top_p=1.0, max_tokens=LONGEST_COMPLETION)
    sample: Sample = []
    while sum(len(completion.token_ids) for _, completion in sample) < num_tokens:
        requests = []
        for _ in range(NUM_AT_ONCE):
            prompt = draw_prompt(rng)
            seed = rng.randrange(2**31)
            requests.append(
                GenerationRequest(
                    request_id=str(seed), prompt_token_ids=prompt, seed=seed, sampling=sampling
                )
            )
        sample += zip(requests, engine.generate(requests), strict=True)
    assert {number for _, completion in sample for number in completion.versions} == {version}
    return sample


def compare(learner: Learner, sample: Sample, *, version: int, moved: float | None) -> Agreement:
    difference_N = learner.logprobs(sample) - engine_logprobs(sample)
    return agreement_of(difference_N, version=version, moved=moved)


def agreement_of(difference_N: torch.Tensor, *, version: int, moved: float | None) -> Agreement:
    rho_N = difference_N.exp()
    return Agreement(
        version=version,
        num_tokens=difference_N.numel(),
        largest=float(difference_N.abs().max()),
        mean=float(difference_N.abs().mean()),
        rho_mean=float(rho_N.mean()),
        rho_std=float(rho_N.std()),
        rho_min=float(rho_N.min()),
        rho_max=float(rho_N.max()),
        moved=moved,
    )


def engine_logprobs(sample: Sample) -> torch.Tensor:
    return torch.tensor([value for _, completion in sample for value in completion.logprobs])
