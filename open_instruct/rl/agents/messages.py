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
# What a message may have beside its role, text and calls. Ids tie an answer to its call, which a
# template knows by the order; the others are of replies that clients send back.
OTHER_KEYS = {
    "name",
    "tool_call_id",
    "refusal",
    "annotations",
    "audio",
    "function_call",
    "reasoning_content",
    "reasoning",
    "provider_specific_fields",
}


def read_messages(messages: Sequence[Any]) -> tuple[Turn, ...]:
    """The turns of a request's messages.

    Raises:
        APIError: one is not of OpenAI's form, or has more than text and calls.
    """
    return tuple(_read_message(message, number) for number, message in enumerate(messages))


def _read_message(message: Any, number: int) -> Turn:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise APIError(f"{where} is no object with a role", param=where)
    known = {"role", "content", "tool_calls"} | OTHER_KEYS
    unknown = [key for key, value in message.items() if key not in known and value]
    if unknown:
        raise APIError(f"{where} has {unknown[0]!r}, which is not read here", param=where)
    # A developer's turn is what a system's was called before.
    role = "system" if message["role"] == "developer" else message["role"]
    turn: dict[str, Any] = {"role": role, "content": read_text(message.get("content"), where)}
    if message.get("tool_calls"):
        turn["tool_calls"] = [_read_call(call, where) for call in message["tool_calls"]]
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
            arguments = json.loads(arguments)
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
