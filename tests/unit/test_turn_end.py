"""The tokens at which a reply is over: those of the template, and the tokenizer's own."""

from __future__ import annotations

import pytest

from open_instruct.data.chat import ChatFormat, ChatTemplate
from tests.unit.test_chat import CHATML, EOS, LLAMA3, chat, make_tokenizer

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def ends(form: ChatFormat) -> list[str]:
    return form.tokenizer.convert_ids_to_tokens(list(form.turn_end_token_ids()))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("tulu", [EOS]),
        ("olmo", [EOS]),
        ("simple_chat", [EOS]),
        ("chatml", [EOS, "<|im_end|>"]),
        ("qwen", [EOS, "<|im_end|>"]),
        ("llama3", [EOS, "<|eot_id|>"]),
    ],
)
def test_of_the_built_in_templates(template: str, expected: list[str]) -> None:
    assert ends(chat(make_tokenizer([*CHATML, *LLAMA3]), template)) == expected


def test_a_line_break_after_the_turn_is_not_its_end() -> None:
    form = ChatFormat(make_tokenizer(CHATML), ChatTemplate(name="own", text=HEAD + "<|im_end|>\n{% endfor %}" + ASK))
    assert ends(form) == [EOS, "<|im_end|>"]


def test_a_template_without_an_end_leaves_the_tokenizers() -> None:
    form = ChatFormat(make_tokenizer(CHATML), ChatTemplate(name="own", text=HEAD + "\n{% endfor %}" + ASK))
    assert ends(form) == [EOS]


def test_a_tokenizer_without_an_end_leaves_the_templates() -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.eos_token = None
    assert ends(chat(tokenizer, "chatml")) == ["<|im_end|>"]


def test_they_are_ascending_and_once_each() -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.eos_token = "<|im_end|>"
    form = chat(tokenizer, "chatml")
    assert form.turn_end_token_ids() == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    ids = chat(make_tokenizer(CHATML), "chatml").turn_end_token_ids()
    assert list(ids) == sorted(set(ids)) and len(ids) == 2
