"""The peer: how far transformers in bfloat16 is from transformers in float32, on the same tokens."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from agreement.learner import TEMPERATURE
from agreement.measure import Agreement, Sample, agreement_of


def measure_transformers(folder: Path, sample: Sample) -> Agreement:
    """What bfloat16 alone does to this model's log-probs, with one library and no engine."""
    float32_N = transformers_logprobs(folder, sample, torch.float32)
    bfloat16_N = transformers_logprobs(folder, sample, torch.bfloat16)
    return agreement_of(bfloat16_N - float32_N, version=0, moved=None)


@torch.no_grad()
def transformers_logprobs(folder: Path, sample: Sample, dtype: torch.dtype) -> torch.Tensor:
    """Of every token of every completion, in order: shape (N,), float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    parts: list[torch.Tensor] = []
    for request, completion in sample:
        num_prompt_tokens = len(request.prompt_token_ids)
        token_ids = torch.tensor([request.prompt_token_ids + completion.token_ids])
        logits_TV = model(token_ids).logits[0, num_prompt_tokens - 1 : -1].float() / TEMPERATURE
        targets_T1 = token_ids[0, num_prompt_tokens:, None]
        parts.append(logits_TV.log_softmax(-1).gather(-1, targets_T1).squeeze(-1))
    return torch.cat(parts)
