"""What verifiers and tools are given of a reply: its tags too, where they are special tokens."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.commands.tiny_model import EOS
from open_instruct.generation.reply_text import decode_reply
from open_instruct.rewards.verifier import remove_thinking
from open_instruct.rewards.words import find_tagged_answer
from tests.unit.token_data import byte_tokenizer

REPLY = "<think>no , 7</think> a , b<answer>42</answer>"


@pytest.fixture(scope="module", params=["special", "plain"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    made.add_tokens(tags, special_tokens=request.param == "special")
    # As in the files of Llama 3; it takes the space before a comma away.
    made.clean_up_tokenization_spaces = True
    made.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    return made


@pytest.mark.parametrize(
    ("sampled", "finish_reason", "stop_reason", "text"),
    [
        (REPLY + EOS, "stop", None, REPLY),
        (REPLY + EOS, "stop", 2, REPLY),
        (REPLY, "length", None, REPLY),
        (REPLY, "stop", "</answer>", REPLY),
        (REPLY + "!", "stop", "</answer>", REPLY),
        ("12</th", "stop", "</t", "12</t"),
    ],
)
def test_text_has_all_tokens_but_the_end(
    tokenizer: Any, sampled: str, finish_reason: str, stop_reason: Any, text: str
) -> None:
    ids = tokenizer(sampled, add_special_tokens=False)["input_ids"]
    decoded = decode_reply(tokenizer, ids, finish_reason=finish_reason, stop_reason=stop_reason)
    assert decoded == text


def test_thoughts_and_answers_are_found_by_their_tags(tokenizer: Any) -> None:
    ids = tokenizer(REPLY + EOS, add_special_tokens=False)["input_ids"]
    text = decode_reply(tokenizer, ids, finish_reason="stop", stop_reason=None)
    assert "7" not in remove_thinking(text)
    assert find_tagged_answer(text) == "42"
