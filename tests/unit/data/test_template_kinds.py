"""Chat templates as other people write them: what they teach, and what is said of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.commands.tiny_model import BOS, EOS
from open_instruct.core.errors import InputError
from open_instruct.data.chat import ChatFormat
from open_instruct.data.conversations.messages import Message
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.mixer import parse_mixer_list
from open_instruct.data.sft_rows import SFTBuilder
from open_instruct.data.templates.chat_templates import ChatTemplate, check_syntax
from open_instruct.run.generation_settings import build_generation_config
from tests.unit.token_data import byte_tokenizer, write_rows

ASKS = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
TURN = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}" + EOS + "\n{% endfor %}"
QUESTION: list[Message] = [{"role": "user", "content": "Hi"}]
REPLY: list[Message] = [{"role": "assistant", "content": "Hello"}]
# Always asked for: after a turn that ends as a reply does, after one with another end, and with no
# token at all.
ALWAYS = {
    "one end for all turns": TURN + "{{ '<|assistant|>\n' }}",
    "an end of replies alone": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token if m.role == "
        "'assistant' else '' }}\n{% endfor %}{{ '<|assistant|>\n' }}"
    ),
    "words": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor "
        "%}assistant: "
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def own(tokenizer: PreTrainedTokenizerFast, text: str) -> ChatFormat:
    return ChatFormat(tokenizer, ChatTemplate(name="own", text=text))


@pytest.mark.parametrize("kind", ALWAYS)
def test_question_behind_a_reply_is_not_learned(tokenizer: Any, kind: str) -> None:
    chat = own(tokenizer, ALWAYS[kind])
    prompt, (reply,) = chat.render(QUESTION, REPLY)
    assert reply == f"Hello{EOS}" and prompt.rstrip().endswith(("<|assistant|>", "assistant:"))
    assert chat.turn_end_token_ids() == (tokenizer.eos_token_id,)
    pieces = chat.render_turns([*QUESTION, *REPLY, *QUESTION, *REPLY])
    assert pieces[1] == pieces[3] == f"Hello{EOS}"
    assert "".join(pieces).count("Hello") == 2 and not chat.warnings


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        (TURN, True),
        (TURN + ASKS, False),
        (("{% for m in messages %}[{{ m.content }}]{{ eos_token if m.role == 'assistant' }}{% endfor %}"), True),
        ("{% for m in messages %}{{ '[I] ' + m.content + ' [/I]' if m.role == 'user' else m.content + eos_token }}"
         "{% endfor %}", False),
        ("{{ raise_exception('no system turn') if messages[0].role != 'system' }}", False),
        *((text, False) for text in ALWAYS.values()),
    ],
)  # fmt: skip
def test_header_that_is_learned_is_told_of(tokenizer: Any, text: str, warns: bool) -> None:
    assert bool(own(tokenizer, text).warnings) is warns


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("strftime_now('%Y-%m-%d')", "2024-07-26"),
        ("strftime_now('%A, %d %B %Y %H:%M')", "Friday, 26 July 2024 00:00"),
        ("date_string", "26 Jul 2024"),
    ],
)
def test_date_in_a_template_is_always_the_same(tokenizer: Any, call: str, written: str) -> None:
    prompt, _ = own(tokenizer, "{{ " + call + " }}" + TURN + ASKS).render(QUESTION, ())
    assert prompt.startswith(written)


@pytest.mark.parametrize(
    "call", ["{{ ['a', 'b'] | random }}", "{{ lipsum() }}", "{% set x = lipsum(n=1) %}"]
)
def test_template_that_writes_at_random_is_refused(call: str) -> None:
    with pytest.raises(InputError, match=r"line 2: (random|lipsum)"):
        check_syntax("a template", "\n" + call)


@pytest.mark.parametrize(
    ("template", "reply", "counts"),
    [
        (TURN + ASKS, "Hello", (0, 0, 0)),
        (TURN + ASKS, f"Hello{EOS}", (1, 0, 0)),
        (
            "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}" + ASKS,
            "Hello",
            (0, 0, 1),
        ),
        (
            "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}" + ASKS,
            f"Hello{EOS}",
            (0, 0, 0),
        ),
        (
            TURN.replace("{{ m.content }}", "<think></think>{{ m.content }}") + ASKS,
            "Hello",
            (0, 1, 0),
        ),
        (TURN + ASKS, "<think>so</think>Hello", (0, 0, 0)),
        (
            TURN.replace("{{ m.content }}", "<think></think>{{ m.content }}") + ASKS,
            "<think>so</think>Hello",
            (0, 1, 0),
        ),
    ],
)
def test_ends_and_thoughts_that_a_template_doubles_are_counted(
    tokenizer: Any, tmp_path: Path, template: str, reply: str, counts: tuple[int, int, int]
) -> None:
    file = write_rows(
        tmp_path / "r.jsonl", {"messages": [*QUESTION, {"role": "assistant", "content": reply}]}
    )
    (entry,) = parse_mixer_list([str(file), "1.0"])
    builder = SFTBuilder(own(tokenizer, template), max_seq_length=200, on_bad_row="error")
    _, report = builder.build([entry], [entry.open({})], seed=1)
    assert (
        builder.counts.num_with_two_ends,
        builder.counts.num_with_more_thoughts,
        builder.counts.num_without_end,
    ) == counts
    assert len(report.warnings) == sum(counts)


@pytest.mark.parametrize(("text", "warns"), [("Hi", False), (f"{BOS}Hi", True)])
def test_bos_token_that_a_row_has_too_is_told_of(
    tokenizer: Any, tmp_path: Path, text: str, warns: bool
) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    file = write_rows(
        tmp_path / "r.jsonl", {"messages": [{"role": "user", "content": text}, *REPLY]}
    )
    (entry,) = parse_mixer_list([str(file), "1.0"])
    builder = SFTBuilder(own(tokenizer, template), max_seq_length=200, on_bad_row="error")
    _, report = builder.build([entry], [entry.open({})], seed=1)
    assert bool(report.warnings) is warns


def warnings_of(tokenizer: Any, folder: Path, template: str, *messages: Any) -> list[str]:
    file = write_rows(folder / "r.jsonl", {"messages": list(messages)})
    (entry,) = parse_mixer_list([str(file), "1.0"])
    builder = SFTBuilder(own(tokenizer, template), max_seq_length=400, on_bad_row="error")
    _, report = builder.build([entry], [entry.open({})], seed=1)
    return report.warnings


SYSTEM: Message = {"role": "system", "content": 'Say "so",\n and no more.'}
# What is passed over: turns of the system, what follows the first letters.
NO_SYSTEM = TURN.replace("for m in messages", "for m in messages if m.role != 'system'")
FIRST_WORDS = TURN.replace("{{ m.content }}", "{{ m.content[:4] }}")
AS_JSON = TURN.replace(
    "{{ m.content }}", "{{ m.content if m.role == 'assistant' else m.content | tojson }}"
)


@pytest.mark.parametrize(
    ("template", "messages", "roles"),
    [
        (TURN, [SYSTEM, *QUESTION, *REPLY], []),
        (AS_JSON, [SYSTEM, *QUESTION, *REPLY], []),
        (TURN.replace("m.content", "m.content | trim"), [SYSTEM, *QUESTION, *REPLY], []),
        (NO_SYSTEM, [*QUESTION, *REPLY], []),
        (NO_SYSTEM, [SYSTEM, *QUESTION, *REPLY], ["system"]),
        (FIRST_WORDS, [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "So."}], ["user"]),
    ],
)  # fmt: skip
def test_turn_that_a_template_leaves_out_is_told_of(
    tokenizer: Any, tmp_path: Path, template: str, messages: list[Any], roles: list[str]
) -> None:
    warnings = warnings_of(tokenizer, tmp_path, template + ASKS, *messages)
    assert len(warnings) == len(roles)
    for role, warning in zip(roles, warnings, strict=True):
        assert f" {role} turn " in warning and "1 row" in warning


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("Hi", None),
        ("What does <think> do?", None),
        (f"<|user|>\nHi{EOS}\n<|assistant|>\n", "<|user|>"),
        (f"Hi{EOS}", EOS),
    ],
)
def test_row_that_a_template_wrote_before_is_told_of(
    tokenizer: Any, tmp_path: Path, text: str, token: str | None
) -> None:
    asked = {"role": "user", "content": text}
    warnings = warnings_of(tokenizer, tmp_path, TURN + ASKS, asked, *REPLY)
    assert len(warnings) == (token is not None)
    if token is not None:
        assert "1 row" in warnings[0] and any(each in warnings[0] for each in (token, EOS))


def test_named_template_for_tools_is_not_passed_over_in_silence(tokenizer: Any) -> None:
    """Some tokenizers have a template for rows with tools beside the default one, which leaves
    tools out.
    """
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {
        "default": TURN + ASKS,
        "tool_use": "{{ tools | tojson }}" + TURN + ASKS,
    }
    tool = {"type": "function", "function": {"name": "rain", "description": "", "parameters": {}}}
    asked: list[Any] = [{**QUESTION[0], "tools": [tool]}]
    with pytest.raises(MalformedRow, match="tools"):
        ChatFormat.choose(tokenizer, None).render(asked, REPLY)


# --- where a reply of the export ends
# --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "model", "is_own", "expected"),
    [
        ({"eos_token_id": 0, "temperature": 0.6}, {}, True, [0, 2]),
        ({"eos_token_id": [1, 2]}, {}, True, [1, 2]),
        ({"eos_token_id": 2}, {}, True, 2),
        ({}, {}, True, [2]),
        (None, {"eos_token_id": 0}, True, [0, 2]),
        (None, {}, True, [2]),
        # Of another tokenizer, where 200 is a byte.
        ({"eos_token_id": [1, 200]}, {}, False, [1, 2]),
        ({"eos_token_id": [1, 200]}, {}, True, [1, 200, 2]),
    ],
)
def test_export_ends_where_a_turn_does(
    tokenizer: Any,
    tmp_path: Path,
    given: dict[str, Any] | None,
    model: dict[str, Any],
    is_own: bool,
    expected: Any,
) -> None:
    if given is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(given))
    fields = build_generation_config(tmp_path, model, tokenizer, (2,), is_own_tokenizer=is_own)
    assert fields == {**(given or {}), "eos_token_id": expected}
