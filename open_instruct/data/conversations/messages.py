"""Messages of a conversation: their fields, their order, and the checks of each.

A conversation is an optional system turn, then user and assistant in turn. Answers of tools stand
between two turns of the assistant. `row_forms.py` finds the messages in rows of other forms.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final, Literal, NotRequired, TypedDict, cast

from open_instruct.data.conversations.row_keys import OTHER_NAMES, missing_key_error
from open_instruct.data.conversations.tool_turns import (
    CALLS,
    OTHER_FORM,
    read_calls,
    read_schemas,
)
from open_instruct.data.files.message_text import read_message_text
from open_instruct.data.files.rows import MalformedRow, name_json_type

ROLES = ("system", "user", "assistant", "tool")
# What may come behind each of them; "" is the beginning.
_FOLLOWING = {
    "": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
# Whether a reply is learned: OpenAI's mark, axolotl's, and ms-swift's.
LEARNING_MARKS = ("weight", "train", "loss")
REASONING: Final = "reasoning_content"
# The same, as servers call it since vLLM 0.12, and OpenRouter.
REASONING_KEYS = (REASONING, "reasoning")
# ShareGPT writes turns as {"from", "value"}.
READ_KEYS = {"role", "content", "from", "value", *LEARNING_MARKS, *OTHER_FORM}


def _list_role_names() -> dict[str, str]:
    """Our name of a role, by the name that others give it."""
    names = {}
    for role, others in OTHER_NAMES["roles"].items():
        names.update(dict.fromkeys(others, role))
    return names


_ROLE_NAMES = _list_role_names()


class Message(TypedDict):
    """One turn of a conversation: `{"role": "user", "content": "What is 2 + 2?"}`."""

    role: str
    content: str
    # The reasoning before the reply, which some templates write.
    reasoning_content: NotRequired[str]
    is_learned: NotRequired[Literal[False]]  # a reply that is context only, not to be learned
    tools: NotRequired[list[Any]]  # JSON schemas of all tools, in the first message
    functions: NotRequired[str]  # the same, as OLMo 3's data have it
    tool_calls: NotRequired[list[Any]]
    function_calls: NotRequired[str]  # the same, as OLMo 3's data have it


def parse_conversation(
    row: Mapping[str, Any], key: str, *, last_role: Literal["assistant", "user"] = "assistant"
) -> tuple[Message, ...]:
    """Check the turns under `key`, and return those up to the last turn of `last_role`.

    If `last_role` is the user, the last turn may also be a tool's, and an assistant's turn at the
    end is left out.

    Raises:
        MalformedRow: the turns are of another form or order, or the last one is empty.
    """
    if key not in row:
        raise missing_key_error(row, key)
    value = row[key]
    if not isinstance(value, list):
        raise MalformedRow(
            "not_messages", f"{key!r} must be a list of messages, not {name_json_type(value)}"
        )
    if not value:
        raise MalformedRow("not_messages", f"{key!r} is an empty list of messages")
    messages = tuple(
        _parse_message(message, f"{key!r}, turn {turn}")
        for turn, message in enumerate(value, start=1)
    )
    if last_role == "user" and len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    _check_order(messages, key, last_role)
    if is_empty_turn(messages[-1]) and messages[-1]["role"] != "tool":
        if last_role == "assistant":
            raise MalformedRow("empty_reply", f"the reply in {key!r} is empty")
        raise MalformedRow("empty_prompt", f"the last turn in {key!r} is empty")
    return messages


def is_empty_turn(message: Message) -> bool:
    """Whether a turn has neither text nor calls of tools."""
    has_calls = any(message.get(key) for key in CALLS)
    return not message["content"].strip() and not has_calls


def check_is_learned(reply: Message, where: str) -> None:
    """Refuse a reply that is marked as context only, where the loss is of whole replies.

    Raises:
        MalformedRow: the reply has weight 0, or `train` or `loss` false.
    """
    if "is_learned" in reply:
        raise MalformedRow(
            "nothing_learned",
            f"the reply in {where} has weight 0, or train or loss false: leave the row out",
        )


def find_role(message: Mapping[str, Any]) -> Any:
    """The role of a message, under any of its known keys and names; unchecked."""
    speaker = message.get("role")
    return _name_role(message.get("from") if speaker is None else speaker)


def _name_role(speaker: Any) -> Any:
    return _ROLE_NAMES.get(speaker, speaker) if isinstance(speaker, str) else speaker


def find_content(message: Mapping[str, Any]) -> Any:
    """The text of a message, under any of its known keys; unchecked."""
    return _join_text_parts(message.get("value" if _is_sharegpt(message) else "content"))


def find_unread_keys(row: Mapping[str, Any], reads_reasoning: bool) -> set[str]:
    """Keys of a row's messages that nothing reads, such as "weights of messages".

    Args:
        row: with lists of messages under any of its keys.
        reads_reasoning: whether the chat template writes `reasoning_content`.
    """
    known_keys = {*READ_KEYS, *REASONING_KEYS} if reads_reasoning else READ_KEYS
    unread: set[str] = set()
    for value in map(read_message_text, row.values()):
        if not isinstance(value, list):
            continue
        for message in value:
            if not isinstance(message, Mapping) or find_role(message) not in ROLES:
                continue
            unread.update(
                f"{key} of messages"
                for key, item in message.items()
                if _says_something(item) and (key not in known_keys or _is_overruled(key, message))
            )
    return unread


def _is_overruled(key: str, message: Mapping[str, Any]) -> bool:
    """Whether another key of the message is read in its place, and says something else."""
    if key == "from":
        return bool(_name_role(message[key]) != find_role(message))
    if key == "value":
        return not _is_sharegpt(message) and message[key] != message.get("content")
    return key in REASONING_KEYS and message[key] != find_reasoning(message)


def find_reasoning(message: Mapping[str, Any]) -> Any:
    """What was thought before a reply, under any of its keys; unchecked, and None without one."""
    return next((message[key] for key in REASONING_KEYS if message.get(key)), None)


def _says_something(value: Any) -> bool:
    """Whether a value is one: `false` and 0 are, an empty text or list is none."""
    return value is not None and value not in ("", [], {})


def _parse_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise MalformedRow(
            "bad_message",
            f"{where}: must be an object with 'role' and 'content', not {name_json_type(message)}",
        )
    calls = read_calls(message.get("tool_calls"), where)
    content = find_content(message)
    if content is None and (calls or message.get("function_calls")):
        content = ""  # as OpenAI writes a reply that only calls
    texts = {"role": find_role(message), "content": content}
    reasoning = find_reasoning(message)
    if reasoning:
        texts[REASONING] = _join_text_parts(reasoning)
    for key in ("functions", "function_calls"):
        if message.get(key) not in (None, []):
            texts[key] = message[key]
    schemas = read_schemas(message.get("tools"))
    lists = {"tools": schemas, "tool_calls": calls}
    lists = {key: value for key, value in lists.items() if value}
    for key, text in texts.items():
        _check_text(text, key, where)
    for key, value in lists.items():
        _check_text(json.dumps(value, ensure_ascii=False, default=str), key, where)
    parsed = cast(Message, texts | lists)
    if parsed["role"] not in ROLES:
        raise MalformedRow(
            "unknown_role", f"{where}: unknown role {parsed['role']!r}; use {', '.join(ROLES)}"
        )
    if message.get("tools") and not schemas:
        raise MalformedRow(
            "bad_tools",
            f"{where}: 'tools' are JSON schemas, not {name_json_type(message['tools'])} of names",
        )
    if parsed["role"] != "assistant" and any(parsed.get(key) for key in CALLS):
        raise MalformedRow("bad_tools", f"{where}: calls of tools in a turn that is no assistant's")
    if not _is_learned(message, where) and parsed["role"] == "assistant":
        parsed["is_learned"] = False
    return parsed


def _check_text(value: Any, key: str, where: str) -> None:
    if value is None:
        raise MalformedRow("bad_message", f"{where}: no {key!r}")
    if not isinstance(value, str):
        raise MalformedRow(
            "bad_message", f"{where}: {key!r} must be text, not {name_json_type(value)}"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON may spell half of a surrogate pair: "\ud83d"
        raise MalformedRow(
            "not_unicode",
            f"{where}: {key!r} has half of a surrogate pair at character {error.start + 1}",
        ) from error


def _is_sharegpt(message: Mapping[str, Any]) -> bool:
    """Whether the text is under `value`. Tables of rows from several sources have all keys."""
    return message.get("role") is None and message.get("content") is None


def _join_text_parts(content: Any) -> Any:
    """The text of parts, `[{"type": "text", "text": "Hi"}]`; any other content as it is."""
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        return content
    texts = [part.get("text") for part in content]
    if texts and all(isinstance(text, str) for text in texts):
        return "".join(texts)
    return content


def _is_learned(message: Mapping[str, Any], where: str) -> bool:
    is_learned = True
    for key in LEARNING_MARKS:
        value = message.get(key)
        if value not in (None, 0, 1):
            raise MalformedRow(
                "bad_weight", f"{where}: {key!r} must be 0 or 1, or false or true, not {value!r}"
            )
        if value and find_role(message) != "assistant":
            raise MalformedRow(
                "bad_weight", f"{where}: {key!r} asks to learn a turn that is no assistant's"
            )
        is_learned = is_learned and value != 0
    return is_learned


def _check_order(messages: tuple[Message, ...], key: str, last_role: str) -> None:
    roles = [message["role"] for message in messages]
    first = 1 if roles[0] == "system" else 0
    for turn, (before, role) in enumerate(pairwise(["", *roles[first:]]), start=first + 1):
        if role not in _FOLLOWING[before]:
            remedy = ""
            if not before and role == "assistant" and "user" in roles:
                remedy = " (--on_bad_row trim reads such rows from the user's first turn on)"
            raise MalformedRow(
                "roles_out_of_order",
                f"{key!r}, turn {turn}: the role is {role!r} where "
                f"{' or '.join(map(repr, _FOLLOWING[before]))} should follow; an optional system "
                f"turn comes first, then user and assistant in turn{remedy}",
            )
    if roles[-1] != last_role and (last_role, roles[-1]) != ("user", "tool"):
        raise MalformedRow(
            "roles_out_of_order",
            f"{key!r}: the last turn is {roles[-1]!r}, it must be {last_role!r}",
        )
