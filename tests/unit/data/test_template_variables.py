"""`--chat_template_kwargs`: variables of a chat template, in rows, prompts and exports alike."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from open_instruct.config.sections import RowsSection
from open_instruct.data.chat import ChatFormat
from open_instruct.data.mixer import parse_mixer_list
from open_instruct.data.prompts import load_prompt_dataset
from open_instruct.data.sft_rows import SFTBuilder
from open_instruct.data.templates.template_renderer import build_environment
from open_instruct.data.templates.template_variables import (
    find_variables,
    parse_variables,
    write_defaults,
)
from open_instruct.data.token_dataset import load_token_dataset
from open_instruct.rewards.answers import Passthrough
from tests.refusals import refused
from tests.unit.token_data import byte_tokenizer, marked, turns, write_rows

# As Qwen 3's does, it thinks unless it is told not to.
TEMPLATE = (
    "{% set quiet = enable_thinking is defined and enable_thinking is false %}"
    "{% for m in messages %}{{ m.role }}:{{ '<>' if quiet and m.role == 'assistant' }}"
    "{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{{ '<>' if quiet }}{% endif %}"
)
QUIET = ["enable_thinking=false"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("k=false", False),
        ("k=null", None),
        ("k=-3", -3),
        ("k=0.5", 0.5),
        ('k="false"', "false"),
        ("k=a=b", "a=b"),
        ("k=", ""),
        ("k=[1]", "[1]"),
        ("k=1e999", "1e999"),
        ("k=NaN", "NaN"),
    ],
)
def test_value_is_a_scalar_of_json_or_text(word: str, value: Any) -> None:
    (parsed,) = parse_variables([word]).values()
    assert parsed == value and type(parsed) is type(value)


@given(value=st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text())
def test_default_is_what_a_renderer_would_set(value: Any) -> None:
    text = "  {{ name }}|{% for _ in 'ab' %}{{ name is none }}{% endfor %}"
    if value in (float("inf"), -float("inf")):
        value = 0.0
    environment = build_environment()
    with_default = environment.from_string(write_defaults(text, {"name": value}))
    assert with_default.render() == environment.from_string(text).render(name=value)
    assert with_default.render(name=7) == environment.from_string(text).render(name=7)


def test_rows_prompts_and_exports_have_the_variables(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    keys = {"messages": turns("q", "a"), "dataset": "passthrough"}
    rows = write_rows(tmp_path / "rows.jsonl", keys)
    common: dict[str, Any] = {
        "entries": parse_mixer_list([str(rows), "1.0"]),
        "on_bad_row": "error",
        "seed": 0,
        "cache_dir": tmp_path,
    }
    bos, end = tokenizer.bos_token, tokenizer.eos_token
    fingerprints = set()
    for words, asked in (([], "assistant:"), (QUIET, "assistant:<>")):
        flags = RowsSection(chat_template_kwargs=words)
        chat = ChatFormat.from_flags(tokenizer, flags)
        conversations, _ = load_token_dataset(SFTBuilder, chat=chat, max_seq_length=99, **common)
        (document,) = conversations[0]
        assert marked(tokenizer, document) == f"user:q{end}{asked}[a{end}]"
        prompts, _ = load_prompt_dataset(
            chat=chat,
            known_verifiers={"passthrough": Passthrough()},
            max_prompt_token_length=99,
            **common,
        )
        assert prompts[0].text == f"user:q{end}{asked}"
        fingerprints |= {chat.fingerprint, conversations.fingerprint, prompts.fingerprint}
        # What is exported writes the same, unless it is told otherwise.
        for setting, written in (({}, asked), ({"enable_thinking": True}, "assistant:")):
            text = tokenizer.apply_chat_template(
                turns("q"),
                chat_template=chat.template.text,
                tokenize=False,
                add_generation_prompt=True,
                **setting,
            )
            assert text == f"user:q{end}{written}"
    assert len(fingerprints) == 6
    with_bos = RowsSection(chat_template_kwargs=QUIET, add_bos=True)
    text, _ = ChatFormat.from_flags(tokenizer, with_bos).render(turns("q"), ())
    assert text == f"{bos}user:q{end}assistant:<>"


def test_export_can_be_trained_on_with_another_value(tokenizer: PreTrainedTokenizerFast) -> None:
    quiet = ChatFormat.choose(tokenizer, None, variables=QUIET)
    exported = byte_tokenizer()
    exported.chat_template = quiet.template.text
    for words in ([], ["enable_thinking=true"]):
        chat = ChatFormat.choose(exported, None, variables=words)
        text, _ = chat.render(turns("q"), ())
        assert text.endswith("assistant:" if words else "assistant:<>")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{{ a }}{% if b is defined %}{{ b }}{% endif %}", {"a", "b"}),
        ("{% if not a is defined %}{% set a = true %}{% endif %}{{ a }}", {"a"}),
        ("{% set a = a | default(1) %}{{ a }}", {"a"}),
        ("{% for m in messages %}{% if m.x %}{% set a = 1 %}{% endif %}{{ a }}{% endfor %}", set()),
        ("{{ messages }}{{ strftime_now('%d') }}{{ eos_token }}{{ range(3) }}", set()),
        (
            "{% macro f(x) %}{{ x }}{{ a }}{% endmacro %}{% generation %}{{ f(b) }}{% endgeneration %}",
            {"a", "b"},
        ),
    ],
)
def test_variables_of_a_template_are_what_others_set(text: str, names: set[str]) -> None:
    assert find_variables(text) == names
    assert find_variables(write_defaults(text, dict.fromkeys(names, 1))) == names


def test_variable_that_cannot_be_set_is_refused_with_those_that_can(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    for word in ("enable_thinkin=false", "temperature=1"):
        name = word.partition("=")[0]
        with refused("bad_value", "chat_template_kwargs", name, "enable_thinking"):
            ChatFormat.choose(tokenizer, None, variables=[word])
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "date_string"):
        with refused("conflict", "chat_template_kwargs", name, "enable_thinking"):
            ChatFormat.choose(tokenizer, None, variables=[f"{name}=1"])
    with refused("bad_value", "chat_template_kwargs", "enable_thinking", "tulu"):
        ChatFormat.choose(tokenizer, "tulu", variables=QUIET)
