"""Calls of tools in replies: what counts as a call, as none, and as an error."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.environments.argument_types import read_arguments
from open_instruct.environments.environment import ToolCall
from open_instruct.rl.episodes.tool_calls import FORMS, ToolCallError, tool_calls

NAMES = ("calc", "now")
GOOD = {
    "hermes": '<tool_call>\n{"name": "calc", "arguments": {"x": "1+1", "n": 2}}\n</tool_call>',
    "llama3_json": '{"name": "calc", "parameters": {"x": "1+1", "n": 2}}',
    "function_calls": "<function_calls>calc(x='1+1', n=2)</function_calls>",
    "pythonic": "[calc(x='1+1', n=2)]",
    "qwen3_xml": "<tool_call>\n<function=calc>\n<parameter=x>\n1+1\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
}
TWO = {
    "hermes": 'a <tool_call>{"name": "now", "arguments": {}}</tool_call> b '
    '<tool_call>{"name": "calc", "arguments": {}}</tool_call>',
    "llama3_json": '{"name": "now", "parameters": {}}; {"name": "calc", "parameters": {}}',
    "function_calls": "Let me see. <function_calls>now()\ncalc()</function_calls>",
    "pythonic": "[now(), calc()]",
    "qwen3_xml": "<tool_call><function=now></function></tool_call>\n<tool_call><function=calc></function></tool_call>",
}
CALL = (ToolCall(name="calc", arguments={"x": "1+1", "n": 2}),)
PROPERTIES = {"x": {"type": "string"}, "n": {"type": "integer"}}
TOOLS = [{"function": {"name": "calc", "parameters": {"type": "object", "properties": PROPERTIES}}}]


def typed(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Calls with the types of their tool's schema, which one form does not have."""
    return tuple(
        ToolCall(name=each.name, arguments=read_arguments(each.arguments, TOOLS, each.name))
        if each.are_texts
        else each
        for each in calls
    )


BAD = [
    ("hermes", '<tool_call>{"name": "calc", "arguments": {"x": 1}}', "pair up"),
    ("hermes", '<tool_call>{"name": "calc", "arguments": [1]}</tool_call>', "not an object"),
    ("hermes", '<tool_call>{"name": "calc"}</tool_call>', "not an object"),
    ("hermes", '<tool_call>{"name": "calc", arguments}</tool_call>', "no JSON"),
    (
        "hermes",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        "the tools are calc, now",
    ),
    ("hermes", '{"name": "calc"}</tool_call>', "without <tool_call>"),
    ("hermes", '<tool_call>["calc"]</tool_call>', "name of a tool"),
    ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "no JSON"),
    ("llama3_json", '{"name": "calc", "parameters": {"x": 1}', "no JSON"),
    ("llama3_json", '{"name": "calc", "parameters": {}} and so on', "text behind a call"),
    ("function_calls", "<function_calls>calc(1)</function_calls>", "argument=value"),
    ("function_calls", "<function_calls>calc(x=now())</function_calls>", "no literal"),
    ("function_calls", "<function_calls>calc(x=</function_calls>", "no Python"),
    ("function_calls", f"<function_calls>calc(x={'(' * 5000})</function_calls>", "no Python"),
    ("pythonic", "[calc(x=1), import os]", "no Python"),
    (
        "qwen3_xml",
        "<tool_call><function=calc>x<parameter=n>2</parameter></function></tool_call>",
        "between the param",
    ),
    ("qwen3_xml", "<tool_call>calc</tool_call>", "<function=NAME>"),
]


@pytest.mark.parametrize("form", FORMS)
def test_call_is_read_with_its_arguments(form: str) -> None:
    assert typed(tool_calls(GOOD[form], form, NAMES)) == CALL
    assert [call.name for call in tool_calls(TWO[form], form, NAMES)] == ["now", "calc"]


@pytest.mark.parametrize("form", FORMS)
def test_text_without_a_call_calls_nothing(form: str) -> None:
    for text in ("", "The answer is 4.", "calc(x='1')", 'Sure: {"name": "calc", "parameters": {}}'):
        assert tool_calls(text, form, NAMES) == ()


@pytest.mark.parametrize("form", FORMS)
def test_reasoning_is_no_tool_call(form: str) -> None:
    assert tool_calls(f"<think>{GOOD[form]}</think>\n4", form, NAMES) == ()
    assert tool_calls(f"<think>{GOOD[form]}", form, NAMES) == ()
    assert typed(tool_calls(f"<think>hm</think>\n{GOOD[form]}", form, NAMES)) == CALL


@pytest.mark.parametrize(("form", "text", "why"), BAD)
def test_call_that_cannot_be_read_is_an_error(form: str, text: str, why: str) -> None:
    with pytest.raises(ToolCallError, match=why):
        tool_calls(text, form, NAMES)


def test_values_of_python_calls_are_json_s_too() -> None:
    text = "<function_calls>calc(a=null, b=true, c=-1, d=(1, {'e': false, 2: 3}))</function_calls>"
    assert tool_calls(text, "function_calls", NAMES)[0].arguments == {
        "a": None,
        "b": True,
        "c": -1,
        "d": [1, {"e": False, "2": 3}],
    }


@pytest.mark.parametrize("value", ["{1, 2}", "b'x'", "...", "1j", "{(1, 2): 3}", "0x" + "f" * 4000])
def test_value_of_a_python_call_that_json_has_not_is_an_error(value: str) -> None:
    with pytest.raises(ToolCallError, match="no literal"):
        tool_calls(f"<function_calls>calc(a={value})</function_calls>", "function_calls", NAMES)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, str]:
    """A good call with parts left out, doubled, or put in."""
    form = draw(st.sampled_from(sorted(FORMS)))
    text = draw(st.sampled_from([GOOD[form], TWO[form]]))
    for _ in range(draw(st.integers(1, 6))):
        at, to = sorted(draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
        kind = draw(st.sampled_from(["cut", "double", "insert"]))
        if kind == "cut":
            text = text[:at] + text[to:]
        elif kind == "double":
            text = text[:to] + text[at:]
        else:
            text = (
                text[:at]
                + draw(st.sampled_from([*"{}[]()\"'\\<>,:=\n\x00é", "</tool_call>", "null"]))
                + text[at:]
            )
    return form, text


@given(mutated())
def test_parsed_call_names_a_known_tool_with_an_object(case: tuple[str, str]) -> None:
    form, text = case
    try:
        calls = tool_calls(text, form, NAMES)
    except ToolCallError:
        return
    for call in calls:
        assert call.name in NAMES and isinstance(call.arguments, dict)
        assert (
            json.loads(json.dumps(call.arguments, sort_keys=True)).keys() == call.arguments.keys()
        )


@pytest.fixture(scope="module")
def vllms() -> dict[str, Any]:
    """vLLM's parsers of the same forms."""
    tool_parsers = pytest.importorskip("vllm.tool_parsers")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    from tests.unit.data.test_chat import CHATML, LLAMA3, make_tokenizer

    tokenizer = make_tokenizer([*CHATML, *LLAMA3, "<tool_call>", "</tool_call>", "<|python_tag|>"])
    schema = {"type": "object", "properties": {"x": {"type": "string"}, "n": {"type": "integer"}}}
    tools = [
        ChatCompletionToolsParam(type="function", function={"name": name, "parameters": schema})
        for name in NAMES
    ]
    names = {form: form for form in FORMS} | {"qwen3_xml": "qwen3_coder", "function_calls": "olmo3"}
    parser_of = tool_parsers.ToolParserManager.get_tool_parser
    return {form: parser_of(name)(tokenizer, tools) for form, name in names.items()}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_those_that_vllm_parses(form: str, vllms: dict[str, Any]) -> None:
    """The oracle. It is more lenient: what ours refuse, it may take."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "q"}], model="m", tools=vllms[form].tools or None
    )
    for text in (GOOD[form], TWO[form]):
        theirs = vllms[form].extract_tool_calls(text, request).tool_calls
        ours = typed(tool_calls(text, form, NAMES))
        assert [
            (call.function.name, json.loads(call.function.arguments or "{}")) for call in theirs
        ] == [(call.name, call.arguments) for call in ours]
