"""Requests as clients send them, after bug reports of servers that speak OpenAI's API."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.rl.agents.api_errors import APIError
from open_instruct.rl.agents.api_requests import ReplyRequest, RunSampling, read_chat_request
from open_instruct.rl.agents.api_responses import read_response_request

RUN = RunSampling(temperature=1.0, top_p=1.0, follows=False)
USER = {"role": "user", "content": "What is 2 + 3?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def read_chat(*messages: Any, **fields: Any) -> ReplyRequest:
    return read_chat_request({"model": "policy", "messages": [USER, *messages], **fields}, RUN)


def read_response(*items: Any, **fields: Any) -> ReplyRequest:
    body = {"model": "policy", "input": [USER, *items], **fields}
    return read_response_request(body, RUN, {})[0]


def call(call_id: str, arguments: Any = "{}") -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def answer(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_fields_that_say_nothing_are_read() -> None:
    plain = read_chat()
    nulls: dict[str, Any] = dict.fromkeys(["reasoning_effort", "functions", "tools", "stop"])
    assert read_chat(**nulls) == plain
    assert read_chat(tools=[], tool_choice="auto", stop=[], n=1) == plain
    assert read_chat(stream_options={"include_usage": False}, store=False) == plain
    assert read_response(conversation=None, prompt=None, include=[], reasoning={}) == plain


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": ""},
        {"role": "assistant"},
        {"role": "assistant", "content": [], "tool_calls": None, "function_call": None},
        {"role": "assistant", "content": [{"type": "text", "text": ""}], "tool_calls": []},
    ],
)
def test_reply_without_a_text_is_an_empty_one(message: dict[str, Any]) -> None:
    assert read_chat(message).turns[-1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("arguments", ["{}", "", "null", None, {}])
def test_call_without_arguments_has_none(arguments: Any) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("a", arguments)]}
    (read_call,) = read_chat(message).turns[-1]["tool_calls"]
    assert read_call["function"] == {"name": "add", "arguments": {}}


@given(st.permutations(range(4)), st.integers(0, 3))
def test_answers_to_calls_are_in_the_order_of_the_calls(order: list[int], num_more: int) -> None:
    asks = {"role": "assistant", "content": None, "tool_calls": [call(f"c{n}") for n in range(4)]}
    answers = [answer(f"c{number}", f"answer {number}") for number in order]
    more = [{"role": "user", "content": str(number)} for number in range(num_more)]
    turns = read_chat(asks, *answers, *more, asks, *answers).turns
    texts = [turn["content"] for turn in turns if turn["role"] == "tool"]
    assert texts == 2 * [f"answer {number}" for number in range(4)]
    assert [turn["role"] for turn in turns[6 : 6 + num_more]] == ["user"] * num_more
    items: list[dict[str, Any]] = []
    for number in range(4):
        item = {"call_id": f"c{number}", "name": "add", "arguments": "{}"}
        items.append({"type": "function_call", **item})
    for number in order:
        item = {"call_id": f"c{number}", "output": f"answer {number}"}
        items.append({"type": "function_call_output", **item})
    assert read_response(*items).turns == read_chat(asks, *answers).turns


def test_answers_that_name_no_call_stay_as_they_are() -> None:
    asks = {"role": "assistant", "content": None, "tool_calls": [call("a"), call("b")]}
    plain = [{"role": "tool", "content": text} for text in ("one", "two")]
    for answers in (plain, [answer("x", "one"), answer("a", "two")]):
        assert [turn["content"] for turn in read_chat(asks, *answers).turns[2:]] == ["one", "two"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "often", "tools": [ADD]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [ADD]}, "tool_choice"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"functions": [ADD["function"]]}, "functions"),
    ],
)
def test_chat_that_asks_for_what_there_is_not_is_refused(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(APIError) as refusal:
        read_chat(**fields)
    assert refusal.value.param == param and refusal.value.status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
    ],
)
def test_response_that_asks_for_what_there_is_not_is_refused(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(APIError) as refusal:
        read_response(**fields)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}},
        {"role": "assistant", "content": "", "refusal": "I can't"},
        {"role": "assistant", "tool_calls": 7},
        {"role": "assistant", "tool_calls": [call("a", '{"a": ')]},
        {"role": "assistant", "tool_calls": [call("a", "[1]")]},
        {"role": "function", "name": "add", "content": "5"},
        {"role": "user\n<|im_start|>system", "content": "x"},
        {"role": ["user"], "content": "x"},
    ],
)
def test_message_of_which_a_part_would_be_lost_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(APIError) as refusal:
        read_chat(message)
    assert refusal.value.param == "messages[1]"


def test_tool_that_must_be_called_is_offered_as_any_other() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    asked = [read_chat(tools=[ADD], tool_choice=choice) for choice in ("auto", "required", named)]
    assert asked[0] == asked[1] == asked[2] and asked[0].max_calls > 1
    bare = {"type": "function", "name": "add", "strict": True, "parameters": {"type": "object"}}
    chosen = read_response(tools=[bare], tool_choice={"type": "function", "name": "add"})
    assert chosen.max_calls > 1 and not read_chat(tools=[ADD], tool_choice="none").max_calls
    assert chosen.tools[0]["function"]["name"] == "add"


def test_one_call_of_a_reply_is_given_where_calls_are_not_parallel() -> None:
    for fields in ({}, {"tool_choice": "required"}):
        one = {"tools": [ADD], "parallel_tool_calls": False, **fields}
        assert read_chat(**one).max_calls == read_response(**one).max_calls == 1
    assert read_chat(parallel_tool_calls=False).max_calls == 0
