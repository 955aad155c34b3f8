"""Messages of OpenAI's form, read into turns that a chat template writes, and compared.

Two assistant's turns are the same if their texts are, but for white space around them, and their
calls have the same names and arguments: clients parse arguments and write them anew, and give calls
other ids. Any other turn is the same only if its text is exactly so.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from open_instruct.rl.agents.api_errors import APIError

Turn = Mapping[str, Any]
"""`role`, `content` (a text), and perhaps `tool_calls`, with arguments as objects."""

TEXT_PARTS = ("text", "input_text", "output_text")
ROLES = ("system", "developer", "user", "assistant", "tool")
# What a message may have beside its role, text and calls. No template here writes a name; the
# others are of replies that clients send back, whose thoughts stand in their ids.
OTHER_KEYS = {
    "name",
    "tool_call_id",
    "annotations",
    "reasoning_content",
    "reasoning",
    "provider_specific_fields",
}


def read_messages(messages: Sequence[Any]) -> tuple[Turn, ...]:
    """The turns of a request's messages.

    Raises:
        APIError: one is not of OpenAI's form, or has more than text and calls.
    """
    numbers = _order_answers(messages)
    return tuple(_read_message(messages[number], number) for number in numbers)


def _order_answers(messages: Sequence[Any]) -> list[int]:
    """The numbers of messages, with the answers to several calls in the order of the calls.

    An agent sends answers as they come, and ids say to which calls; a template goes by the order.
    """
    numbers = list(range(len(messages)))
    for number, message in enumerate(messages):
        call_ids = _list_call_ids(message)
        start = number + 1
        stop = start
        places: dict[int, int] = {}
        while stop < len(messages) and _find_answered_id(messages[stop]) in call_ids:
            places[stop] = call_ids.index(_find_answered_id(messages[stop]))
            stop += 1
        numbers[start:stop] = sorted(places, key=places.__getitem__)
    return numbers


def _list_call_ids(message: Any) -> list[Any]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return []
    return [call.get("id") for call in calls if isinstance(call, Mapping) and call.get("id")]


def _find_answered_id(message: Any) -> Any:
    """The id of the call that a message answers; None where it answers none."""
    is_answer = isinstance(message, Mapping) and message.get("role") == "tool"
    return message.get("tool_call_id") if is_answer else None


def _read_message(message: Any, number: int) -> Turn:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise APIError(f"{where} is no object with a role of {', '.join(ROLES)}", param=where)
    known = {"role", "content", "tool_calls"} | OTHER_KEYS
    unknown = [key for key, value in message.items() if key not in known and value]
    if unknown:
        raise APIError(f"{where} has {unknown[0]!r}, which is not read here", param=where)
    # A developer's turn is what a system's was called before.
    role = "system" if message["role"] == "developer" else message["role"]
    turn: dict[str, Any] = {"role": role, "content": read_text(message.get("content"), where)}
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise APIError(f"{where}: the tool calls are no list", param=where)
    if calls:
        turn["tool_calls"] = [_read_call(call, where) for call in calls]
    return turn


def read_text(content: Any, where: str) -> str:
    """The text of a message's content, of which the parts are joined.

    Raises:
        APIError: there is something else than text.
    """
    if content is None:
        return ""
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise APIError(f"{where}: the content is no text", param=where)
    texts: list[str] = []
    for part in parts:
        text = part
        if isinstance(part, Mapping) and part.get("type") in TEXT_PARTS:
            text = part.get("text")
        if not isinstance(text, str):
            raise APIError(f"{where}: the policy reads texts alone", param=where)
        texts.append(text)
    joined = "".join(texts)
    try:
        joined.encode()
    except UnicodeEncodeError:
        raise APIError(f"{where}: the text has half a surrogate pair", param=where) from None
    return joined


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise APIError(f"{where}: a tool call is an object with a function's name", param=where)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) or {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise APIError(f"{where}: the arguments of a call are no JSON object", param=where)
    return {
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


def make_key(turn: Turn) -> str:
    """A text that is equal for turns that are the same."""
    content = turn["content"]
    if turn["role"] == "assistant":
        content = content.strip()
    calls = [each["function"] for each in turn.get("tool_calls", ())]
    return json.dumps([turn["role"], content, calls], sort_keys=True)


def describe_turn(turn: Turn) -> dict[str, str]:
    """A turn for people to read: its calls stand behind its text."""
    calls = [json.dumps(each["function"]) for each in turn.get("tool_calls", ())]
    return {"role": turn["role"], "content": "\n".join(filter(None, [turn["content"], *calls]))}
