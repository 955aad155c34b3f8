"""What `queue_session.py` asks of its engine, and the formula that stands for its model."""

import torch

from open_instruct.generation.requests import GenerationRequest, SamplingSettings

NUM_REQUESTS, TEMPERATURE = 6, 0.7
STOP = 9  # ends a completion
FIRST = 10  # the likeliest token of version 0; that of version 1 is the next
STOPS_AT = 8  # tokens of a completion whose prompt begins with STOP


def logits_of(tokens: list[int], *, num_prompt: int, version: int, vocab_size: int) -> torch.Tensor:
    """They fall evenly from the likeliest token on, by a slope that all tokens so far decide."""
    stops = tokens[0] == STOP and len(tokens) - num_prompt + 1 == STOPS_AT
    likeliest = STOP if stops else FIRST + version
    slope = 0.05 * (1 + sum(tokens) % 7)
    return -slope * ((torch.arange(vocab_size) - likeliest) % vocab_size)


def requests() -> list[GenerationRequest]:
    """Of several lengths. Two end at a token, and one is ended by its first."""
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_token_ids=(STOP if number % 3 == 1 else 100, *range(3, 5 + 4 * number)),
            seed=2**63 - 1 - number,  # the largest that there is
            sampling=SamplingSettings(
                temperature=TEMPERATURE, top_p=1.0, max_tokens=1 if number == 5 else 14 + number
            ),
        )
        for number in range(NUM_REQUESTS)
    ]
