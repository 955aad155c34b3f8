"""A conversation as rows hold it: an optional system turn, then user and assistant in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from open_instruct.data.foreign_json import kind_of
from open_instruct.data.rows import MalformedRow

ROLES = ("system", "user", "assistant")
# ShareGPT's turns are {"from", "value"}, of some of the programs that its conversations were had with.
_SPEAKERS = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")}


class Message(TypedDict):
    """One turn of a conversation: `{"role": "user", "content": "What is 2 + 2?"}`."""

    role: str
    content: str


def parse_conversation(
    row: Mapping[str, Any], key: str, *, last_role: Literal["assistant", "user"] = "assistant"
) -> tuple[Message, ...]:
    """The turns under `key`: an optional system turn, then user and assistant in turn, until `last_role`'s.

    Where that is the user, an assistant's turn at the end, which answers, is left out.

    Raises:
        MalformedRow: they are not such turns, or the last is empty.
    """
    if key not in row:
        raise MalformedRow("missing_key", f"no key {key!r}; the row has {keys_of(row)}")
    value = row[key]
    if not isinstance(value, list):
        raise MalformedRow("not_messages", f"{key!r} must be a list of messages, not {kind_of(value)}")
    if not value:
        raise MalformedRow("not_messages", f"{key!r} is an empty list of messages")
    messages = tuple(_parse_message(message, f"{key!r}, turn {i}") for i, message in enumerate(value, start=1))
    if last_role == "user" and len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    _check_order(messages, key, last_role)
    if not messages[-1]["content"].strip():
        kind, what = ("empty_reply", "reply") if last_role == "assistant" else ("empty_prompt", "last turn")
        raise MalformedRow(kind, f"the {what} in {key!r} is empty")
    return messages


def keys_of(row: Mapping[str, Any]) -> str:
    """The keys of a row, to tell of."""
    return ", ".join(map(repr, row)) or "no keys"


def role_of(message: Mapping[str, Any]) -> Any:
    """Who speaks, under whichever key and name; unchecked."""
    speaker = message.get("role", message.get("from"))
    return _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker


def _parse_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise MalformedRow(
            "bad_message", f"{where}: must be an object with 'role' and 'content', not {kind_of(message)}"
        )
    if "role" not in message and "from" in message:
        message = {**message, "role": role_of(message), "content": message.get("value")}
    for key in ("role", "content"):
        if message.get(key) is None:
            raise MalformedRow("bad_message", f"{where}: no {key!r}")
        if not isinstance(message[key], str):
            raise MalformedRow("bad_message", f"{where}: {key!r} must be text, not {kind_of(message[key])}")
    if message.get("tool_calls"):
        raise MalformedRow("bad_message", f"{where}: 'tool_calls' are not supported; write them into 'content'")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise MalformedRow("unknown_role", f"{where}: unknown role {role!r}; use {', '.join(ROLES)}")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON may spell half of a surrogate pair: "\ud83d"
        raise MalformedRow(
            "not_unicode", f"{where}: 'content' has half of a surrogate pair at character {error.start + 1}"
        ) from error
    return {"role": role, "content": content}


def _check_order(messages: tuple[Message, ...], key: str, last_role: str) -> None:
    roles = [message["role"] for message in messages]
    first = 1 if roles[0] == "system" else 0
    for turn, role in enumerate(roles[first:], start=first + 1):
        expected = ("user", "assistant")[(turn - first - 1) % 2]
        if role != expected:
            raise MalformedRow(
                "roles_out_of_order",
                f"{key!r}, turn {turn}: the role is {role!r} where {expected!r} should follow; "
                "an optional system turn comes first, then user and assistant in turn",
            )
    if roles[-1] != last_role:
        raise MalformedRow("roles_out_of_order", f"{key!r}: the last turn is {roles[-1]!r}, it must be {last_role!r}")
