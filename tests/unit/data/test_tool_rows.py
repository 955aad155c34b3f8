"""Rows with tools: as the model's own chat template writes them, and replies alone are learned."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.cli import main
from open_instruct.data.chat import ChatFormat
from open_instruct.data.conversations.tool_turns import ToolForm
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.preference_rows import PreferenceBuilder, parse_preference_row
from open_instruct.data.prompts import PromptBuilder
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.sft_rows import SFTBuilder
from open_instruct.data.templates.chat_templates import ChatTemplate, read_template
from open_instruct.objectives.kto_rows import parse_labelled_row
from open_instruct.rewards.answers import GSM8K
from tests.unit.data.test_chat import CHATML, LLAMA3, make_tokenizer
from tests.unit.token_data import write_rows

# As the families' own templates have it: where tools stand, how calls and the answers of tools are
# written.
QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'Qwen.') }}
{{- '<tools>' }}{% for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- '\\n' if m.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' }}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}{% endif %}
{%- endfor %}{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""
LLAMA = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + ('Environment: ipython\\n' if tools else '') }}
{{- system + '<|eot_id|>' }}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- for m in turns %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' }}
{{- call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- elif m.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{{- ((tools | tojson(indent=4)) + '\\n\\n' if tools and loop.first else '') + (m.content | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt }}"""
# OLMo 3.1's, which reads both forms; `olmo` of ours, OLMo 3's, reads its own alone.
OLMO = """\
{%- for m in messages %}{{- '<|im_start|>' + ('environment' if m.role == 'tool' else m.role) + '\\n' + m.content }}
{%- if m.role == 'system' and tools %}{{- '<functions>' + (tools | tojson) + '</functions>' }}
{%- elif m.get('functions') %}{{- ' <functions>' + m['functions'] + '</functions>' }}{% endif %}
{%- if m.get('function_calls') %}{{- '<function_calls>' + m['function_calls'] + '</function_calls>' }}
{%- elif m.get('tool_calls') %}{{- '<function_calls>' }}
{%- for call in m['tool_calls'] %}{{- call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}{{- key ~ '=' ~ (value | tojson) }}
{{- ', ' if not loop.last }}{% endfor %}{{- ')' + ('' if loop.last else '\\n') }}{% endfor %}{{- '</function_calls>' }}
{%- endif %}{{- eos_token if loop.last and m.role == 'assistant' else '<|im_end|>\\n' }}
{%- endfor %}{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "olmo 3.1": OLMO, "olmo": read_template("olmo")}

SCHEMA = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": SCHEMA}
SYSTEM, ASKED = (
    {"role": role, "content": text}
    for role, text in (("system", "Be kind."), ("user", "What is it?"))
)
ANSWER = '{"sum": "é"}'
DONE = {"role": "assistant", "content": "It is 5."}


def calling(arguments: Any, *, num: int = 1, **more: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call] * num} | more


def answered(role: str = "tool", content: str = ANSWER) -> dict[str, Any]:
    return {"role": role, "content": content}


ARGUMENTS = {"a": 2, "b": "naïve"}
PYTHON = 'add(a=2, b="naïve")'
NATIVE = [SYSTEM, ASKED, calling(ARGUMENTS), answered(), DONE]
OPENAI = {"messages": NATIVE, "tools": [TOOL]}
IN_TEXT = {
    "messages": [
        *NATIVE[:2],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": json.dumps(calling(json.dumps(ARGUMENTS))["tool_calls"]),
        },
        answered("function"),
        DONE | {"tool_calls": None},
    ],
    "tools": json.dumps([TOOL]),
}
IN_OLMOS_FORM = {
    "messages": [
        SYSTEM | {"functions": json.dumps([TOOL]), "function_calls": None},
        ASKED | {"functions": None},
        {"role": "assistant", "content": None, "function_calls": PYTHON, "functions": None},
        answered("environment"),
        DONE,
    ]
}


# Without the outer object, as in the Responses API, the verifiers library and LLaMA-Factory's rows.
BARE = OPENAI | {"tools": [SCHEMA]}
BARE_WITH_TYPE = OPENAI | {"tools": json.dumps([{"type": "function", **SCHEMA}])}
BY_MCP = OPENAI | {
    "tools": [{"inputSchema" if key == "parameters" else key: SCHEMA[key] for key in SCHEMA}]
}


def calling_by(key: str) -> dict[str, Any]:
    """The same row with a bare call, whose arguments stand under another key."""
    call = {"name": "add", key: ARGUMENTS, "id": "1"}
    return OPENAI | {"messages": [*NATIVE[:2], calling({}) | {"tool_calls": [call]}, *NATIVE[3:]]}


ROWS = {
    "parameters": calling_by("parameters"),
    "args": calling_by("args"),
    "input": calling_by("input"),
    "by MCP": BY_MCP,
    "openai": OPENAI,
    "in text": IN_TEXT,
    "olmo": IN_OLMOS_FORM,
    "bare": BARE,
    "bare with type": BARE_WITH_TYPE,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer([*CHATML, *LLAMA3])


def form(tokenizer: Any, text: str) -> ChatFormat:
    return ChatFormat(tokenizer, ChatTemplate(name="own", text=text))


def texts(
    builder: type[RowBuilder], row: Any, tokenizer: Any, text: str, **more: Any
) -> tuple[str, ...]:
    chat = form(tokenizer, text)
    return builder(chat, on_bad_row="error", **{"max_seq_length": 999} | more).render(row).texts


def oracle(tokenizer: Any, name: str, messages: list[Any] = NATIVE, **more: Any) -> str:
    """transformers' own rendering of what the family's template reads."""
    tools: Any = [TOOL]
    if name == "olmo":
        tools, own = None, {"functions": json.dumps([TOOL])}
        messages = [
            SYSTEM | own,
            *({**{key: turn[key] for key in ("role", "content")}} for turn in messages[1:]),
        ]
        for turn in messages:
            turn |= {"role": "environment"} if turn["role"] == "tool" else {}
            turn |= {"function_calls": PYTHON} if turn["content"] == "" else {}
    written: str = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=TEMPLATES[name], tokenize=False, **more
    )
    return written


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_conversation_is_what_transformers_writes_and_replies_alone_are_learned(
    tokenizer: Any, name: str, row: Any
) -> None:
    pieces = texts(SFTBuilder, row, tokenizer, TEMPLATES[name])
    whole = oracle(tokenizer, name)
    # As the text has it, which this template sets apart otherwise.
    if (name, row) == ("olmo 3.1", IN_OLMOS_FORM):
        whole = whole.replace("kind.<functions>", "kind. <functions>")
    assert "".join(pieces) == whole.rstrip("\n")
    first, second = pieces[1::2]
    end = pieces[1][pieces[1].rindex("<|") :]
    call = {
        "qwen": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "naïve"}}\n</tool_call>',
        "llama": '{"name": "add", "parameters": {"a": 2, "b": "naïve"}}',
    }.get(name, f"<function_calls>{PYTHON}</function_calls>")
    assert first == call + end and second.startswith("It is 5.<|")
    assert json.dumps(ANSWER, ensure_ascii=False)[1:-1] in pieces[2] or ANSWER in pieces[2]


@pytest.mark.parametrize("name", TEMPLATES)
def test_pair_of_calls_and_a_prompt_that_ends_with_a_tools_answer(
    tokenizer: Any, name: str
) -> None:
    other = calling({"a": 3})
    pair = {
        "chosen": [*NATIVE[:2], calling(ARGUMENTS)],
        "rejected": [*NATIVE[:2], other],
        "tools": [TOOL],
    }
    prompt, chosen, rejected = texts(PreferenceBuilder, pair, tokenizer, TEMPLATES[name])
    assert prompt == oracle(tokenizer, name, NATIVE[:2], add_generation_prompt=True)
    assert (prompt + chosen).rstrip("\n") == oracle(tokenizer, name, NATIVE[:3]).rstrip("\n")
    assert "naïve" in chosen and "naïve" not in rejected and "3" in rejected
    messages, _ = parse_preference_row(pair)  # taken apart for KTO, it is read once more
    assert parse_labelled_row({"messages": list(messages), "label": 1}) == (messages, True)
    with pytest.raises(MalformedRow, match="the chosen reply equals"):
        texts(PreferenceBuilder, pair | {"rejected": pair["chosen"]}, tokenizer, TEMPLATES[name])

    row = {
        "messages": NATIVE[:4],
        "tools": json.dumps([TOOL]),
        "ground_truth": "5",
        "dataset": "gsm8k",
    }
    own = {"known_verifiers": {"gsm8k": GSM8K()}, "max_prompt_token_length": 999}
    chat = form(tokenizer, TEMPLATES[name])
    (asked,) = PromptBuilder(chat, on_bad_row="error", **own).render(row).texts
    assert asked == oracle(tokenizer, name, NATIVE[:4], add_generation_prompt=True)
    (asked,) = (
        PromptBuilder(chat, on_bad_row="error", system_prompt="Be brief.", **own).render(row).texts
    )
    assert asked == oracle(tokenizer, name, NATIVE[:4], add_generation_prompt=True).replace(
        "Be kind.", "Be brief."
    )


def test_olmo_gets_a_system_turn_with_the_functions_when_it_has_none(tokenizer: Any) -> None:
    prompt, *_ = texts(
        SFTBuilder, {"messages": NATIVE[1:], "tools": [TOOL]}, tokenizer, TEMPLATES["olmo"]
    )
    assert prompt.startswith(
        f"<|im_start|>system\n <functions>{json.dumps([TOOL])}</functions><|im_end|>"
    )


def test_form_of_a_template_is_found_in_its_text() -> None:
    openai, own = {"tools", "tool_calls"}, {"functions", "function_calls"}
    expected: dict[str, tuple[str, set[str]]] = {
        "qwen": ("tool", openai),
        "llama": ("ipython", openai),
        "olmo 3.1": ("environment", openai | own),
        "olmo": ("environment", own),
    }
    for name, (role, reads) in expected.items():
        assert ToolForm.detect(TEMPLATES[name]) == ToolForm(role=role, reads=frozenset(reads))
    assert ToolForm.detect(read_template("chatml")) == ToolForm(role="tool", reads=frozenset())


# What a template would drop without a word.
NO_ANSWERS = QWEN.replace("m.role == 'tool'", "m.role == 'nobody'")
FIRST_CALL = QWEN.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
ONLY_NAMED = QWEN.replace("(tool | tojson)", "''")


@pytest.mark.parametrize(
    ("text", "row", "told"),
    [
        (
            read_template("chatml"),
            OPENAI,
            "cannot write 'tools': choose another by --chat_template_name",
        ),
        (
            read_template("tulu"),
            {"messages": [*NATIVE[:2], calling({}), answered(), DONE]},
            "cannot write 'tool_calls'",
        ),
        (read_template("tulu"), IN_OLMOS_FORM, "cannot write 'functions'"),
        (NO_ANSWERS, OPENAI, 'leaves out \'{"sum": "é"}\', of tools or their calls and answers'),
        (
            FIRST_CALL,
            {"messages": [ASKED, calling({}, num=2)], "tools": [TOOL]},
            "leaves out 'add', of tools",
        ),
        (ONLY_NAMED, OPENAI, "leaves out 'add'"),
        (
            LLAMA,
            {"messages": [ASKED, calling({}, num=2)]},
            "refuses the conversation: one call at a time",
        ),
        (
            LLAMA,
            {"messages": [ASKED, calling({}, content="I call.")]},
            "leaves out part of the reply 'I call.'",
        ),
        (
            QWEN,
            {"messages": [ASKED | {"functions": "add(a, b)"}, DONE]},
            "cannot write 'functions'",
        ),
        (
            QWEN,
            {"messages": [ASKED, DONE | {"function_calls": "add(1)"}]},
            "cannot write 'function_calls'",
        ),
    ],
)
def test_tool_content_that_a_template_drops_is_refused(
    tokenizer: Any, text: str, row: Any, told: str
) -> None:
    with pytest.raises(MalformedRow) as caught:
        texts(SFTBuilder, row, tokenizer, text)
    assert caught.value.kind == "template" and told in caught.value.reason, caught.value.reason


def test_environment_has_its_own_tools(tokenizer: Any) -> None:
    own: dict[str, Any] = {
        "known_verifiers": {},
        "max_prompt_token_length": 999,
        "known_environments": {"counter"},
    }
    builder = PromptBuilder(form(tokenizer, OLMO), on_bad_row="error", environment="counter", **own)
    for row, told in (
        ({"messages": [ASKED], "tools": [TOOL]}, "'tools' are the names of those tools"),
        (
            {"messages": [ASKED], "tools": json.dumps([TOOL])},
            "'tools' are the names of those tools",
        ),
        (
            {"messages": [ASKED | {"functions": json.dumps([TOOL])}]},
            "has 'functions', and an environment",
        ),
    ):
        with pytest.raises(MalformedRow, match=told):
            builder.render(row)
    assert builder.render({"messages": NATIVE[:4]}).texts[0].count("<|im_start|>environment") == 1


def test_preview_shows_such_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tokenizer(CHATML, chat_template=QWEN).save_pretrained(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", IN_TEXT, IN_OLMOS_FORM)
    assert (
        main(
            [
                "preview",
                "sft",
                "--model_name_or_path",
                str(tmp_path / "model"),
                "--mixer_list",
                str(rows),
                "1.0",
            ]
        )
        == 0
    )
    shown = "".join(capsys.readouterr().out.split())
    call = '<tool_call>{"name":"add","arguments":{"a":2,"b":"naïve"}}</tool_call><|im_end|>'
    assert (
        shown.replace("⏎", "").count(f"⟦{call}⟧") == 2
        and '<tool_response>⏎{"sum":"é"}⏎</tool_response>' in shown
    )
