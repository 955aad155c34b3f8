"""A sampled text becomes a message of OpenAI's form: its thoughts, its text, its calls."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from open_instruct.environments.argument_types import read_arguments
from open_instruct.environments.environment import ToolCall
from open_instruct.rewards.verifier import remove_thinking
from open_instruct.rl.agents.api_requests import ReplyRequest
from open_instruct.rl.agents.messages import Turn
from open_instruct.rl.episodes.tool_calls import ToolCallError, find_text_before_calls, tool_calls


def read_reply(
    text: str,
    request: ReplyRequest,
    *,
    call_form: str,
    is_only_thinking: bool,
    name: str,
) -> tuple[dict[str, Any], Turn]:
    """The message that an agent is given, and the turn that it will repeat.

    A call that cannot be read stays in the text, as servers do it. Of more calls than the request
    allows the first are given, and the reply is learned whole.

    Args:
        text: of the reply, without the token that ends it.
        request: that it answers.
        call_form: in which the policy calls tools.
        is_only_thinking: whether it is nothing but thoughts that the prompt began.
        name: of the reply, for the ids of its calls.
    """
    text = _cut_at_stop(text, request.stop)
    if request.text is not None:  # nothing is read into a text of the agent's own
        plain = {"role": "assistant", "content": text}
        return plain, plain
    content = text
    thoughts = ""
    if is_only_thinking:
        content = ""
        thoughts = text
    elif "<think>" in text or "</think>" in text:
        content = remove_thinking(text).lstrip("\n")
        thoughts = text[: len(text) - len(content)].replace("<think>", "").replace("</think>", "")
    calls: Sequence[ToolCall] = ()
    if request.max_calls and not is_only_thinking:
        try:
            calls = _read_calls(text, call_form, request.tools)[: request.max_calls]
        except ToolCallError:
            calls = ()
    if calls:
        content = find_text_before_calls(content, call_form).strip()
    message: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts.strip():
        message["reasoning_content"] = thoughts.strip()
    if calls:
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        turn["tool_calls"] = [{"type": "function", "function": each} for each in functions]
        message["tool_calls"] = [
            {
                "id": f"call_{name}_{number}",
                "type": "function",
                "function": {**each, "arguments": json.dumps(each["arguments"])},
            }
            for number, each in enumerate(functions)
        ]
    else:
        message["content"] = content
    return message, turn


def _cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the texts that end a reply."""
    places = [place for place in map(text.find, stop) if place >= 0]
    return text[: min(places, default=len(text))]


def _read_calls(text: str, call_form: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    names = [tool["function"]["name"] for tool in tools]
    calls: list[ToolCall] = []
    for call in tool_calls(text, call_form, names):
        arguments = call.arguments
        if call.are_texts:
            arguments = read_arguments(arguments, tools, call.name)
        calls.append(ToolCall(name=call.name, arguments=arguments))
    return calls
