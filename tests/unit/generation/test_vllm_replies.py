"""How vLLM is asked for a reply: as transformers' `generate` would draw it from the same folder."""

from typing import Any

import pytest

from open_instruct.generation.replies import Sampling
from open_instruct.generation.vllm_replies import choose_options, find_unread

DRAWN = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "repetition_penalty": 1.1,
}
GREEDY = {"temperature": 0.0}


@pytest.mark.parametrize(
    ("fields", "temperature", "top_p", "expected"),
    [
        ({}, None, None, GREEDY),
        (
            {"repetition_penalty": 1.1, "top_p": 0.9},
            None,
            None,
            GREEDY | {"repetition_penalty": 1.1},
        ),
        (DRAWN, None, None, {name: DRAWN[name] for name in DRAWN if name != "do_sample"}),
        (DRAWN, 0.0, None, GREEDY | {"repetition_penalty": 1.1}),
        (DRAWN, 0.0, 0.5, GREEDY | {"repetition_penalty": 1.1}),
        ({"do_sample": True, "min_p": 0.1}, None, None, {"min_p": 0.1, "top_k": 50}),
        ({"top_k": 20, "repetition_penalty": None}, 0.7, None, {"top_k": 20, "temperature": 0.7}),
        ({"do_sample": False}, None, 0.5, {"top_k": 50, "top_p": 0.5}),
    ],
)
def test_reply_is_drawn_as_transformers_draws_it(
    fields: dict[str, Any],
    temperature: float | None,
    top_p: float | None,
    expected: dict[str, Any],
) -> None:
    sampling = Sampling(
        max_new_tokens=8, temperature=temperature, top_p=top_p, seed=None, end_token_ids=(1,)
    )
    assert choose_options(fields, sampling) == expected


def test_fields_that_vllm_has_nothing_for_are_found() -> None:
    neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "suppress_tokens": None, "typical_p": 1}
    assert find_unread(DRAWN | neutral | {"max_length": 20}) == []
    assert find_unread(neutral | {"num_beams": 4, "min_new_tokens": 2}) == [
        "min_new_tokens",
        "num_beams",
    ]
