"""A conversation as rows hold it: an optional system turn, then user and assistant in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NotRequired, TypedDict, cast

from open_instruct.data.files.foreign_json import kind_of
from open_instruct.data.files.rows import MalformedRow

ROLES = ("system", "user", "assistant")
# Other names of the roles: ShareGPT's, those of chat programs in its data, and OpenAI's.
_OTHER_ROLES = {
    "human": "user",
    "developer": "system",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}
# ShareGPT writes turns as {"from", "value"}. OpenAI's `weight` and axolotl's `train` say whether a reply is learned.
READ_KEYS = {"role", "content", "from", "value", "weight", "train"}
REASONING: Final = "reasoning_content"


class Message(TypedDict):
    """One turn of a conversation: `{"role": "user", "content": "What is 2 + 2?"}`."""

    role: str
    content: str
    reasoning_content: NotRequired[str]  # the reasoning before the reply, which some templates write
    is_learned: NotRequired[Literal[False]]  # a reply that is context only, not to be learned


def parse_conversation(
    row: Mapping[str, Any], key: str, *, last_role: Literal["assistant", "user"] = "assistant"
) -> tuple[Message, ...]:
    """The turns under `key`: an optional system turn, then user and assistant in turn, until `last_role`'s.

    If `last_role` is the user, an assistant's turn at the end is left out.

    Raises:
        MalformedRow: the turns are of another form, or the last one is empty.
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
    """The keys of a row, for messages."""
    return ", ".join(map(repr, row)) or "no keys"


def unread_of_messages(row: Mapping[str, Any], reads_reasoning: bool) -> set[str]:
    """Keys of a row's messages that nothing reads, such as `reasoning_content` where the chat template ignores it."""
    read = {*READ_KEYS, REASONING} if reads_reasoning else READ_KEYS
    lists = [value for value in row.values() if isinstance(value, list)]
    messages = [item for each in lists for item in each if isinstance(item, Mapping) and role_of(item) in ROLES]
    return {f"{key} of messages" for each in messages for key, value in each.items() if value and key not in read}


def role_of(message: Mapping[str, Any]) -> Any:
    """The role of a message, under any of its known keys and names; unchecked."""
    speaker = message.get("role", message.get("from"))
    return _OTHER_ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker


def check_is_learned(reply: Message, where: str) -> None:
    """:raises MalformedRow: the reply is marked as not learned, but the loss is of whole replies."""
    if "is_learned" in reply:
        raise MalformedRow("nothing_learned", f"the reply in {where} has weight 0 or train false: leave the row out")


def _parse_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise MalformedRow(
            "bad_message", f"{where}: must be an object with 'role' and 'content', not {kind_of(message)}"
        )
    content = _text_of(message.get("content") if "role" in message or "content" in message else message.get("value"))
    fields = {"role": role_of(message), "content": content}
    if message.get(REASONING):
        fields[REASONING] = _text_of(message[REASONING])
    for key, value in fields.items():
        if value is None:
            raise MalformedRow("bad_message", f"{where}: no {key!r}")
        if not isinstance(value, str):
            raise MalformedRow("bad_message", f"{where}: {key!r} must be text, not {kind_of(value)}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON may spell half of a surrogate pair: "\ud83d"
            raise MalformedRow(
                "not_unicode", f"{where}: {key!r} has half of a surrogate pair at character {error.start + 1}"
            ) from error
    if message.get("tool_calls"):
        raise MalformedRow("bad_message", f"{where}: 'tool_calls' are not supported; write them into 'content'")
    parsed = cast(Message, fields)
    if parsed["role"] not in ROLES:
        raise MalformedRow("unknown_role", f"{where}: unknown role {parsed['role']!r}; use {', '.join(ROLES)}")
    if not _is_learned(message, where) and parsed["role"] == "assistant":
        parsed["is_learned"] = False
    return parsed


def _text_of(content: Any) -> Any:
    """The text of content in parts, `[{"type": "text", "text": "What is 2 + 2?"}]`; any other content as it is."""
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        return content
    texts = [part.get("text") for part in content]
    return "".join(texts) if texts and all(isinstance(text, str) for text in texts) else content


def _is_learned(message: Mapping[str, Any], where: str) -> bool:
    is_learned = True
    for key in ("weight", "train"):
        value = message.get(key)
        if value not in (None, 0, 1):
            raise MalformedRow("bad_weight", f"{where}: {key!r} must be 0 or 1, or false or true, not {value!r}")
        if value and role_of(message) != "assistant":
            raise MalformedRow("bad_weight", f"{where}: {key!r} asks to learn a turn that is no assistant's")
        is_learned = is_learned and value != 0
    return is_learned


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
