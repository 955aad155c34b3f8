"""The forms in which people write what was asked and what was said, as turns of a conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from open_instruct.data.foreign_json import kind_of
from open_instruct.data.messages import Message, keys_of, parse_conversation, role_of
from open_instruct.data.rows import MalformedRow

# Under which keys rows have turns; the second and the third are ShareGPT's.
_TURNS = ("messages", "conversations", "conversation")
# What is asked, and what is said to it: TRL's, and Alpaca's.
_ASKED_AND_SAID = (("prompt", "completion"), ("instruction", "output"))
# One text for a conversation, as Anthropic's hh-rlhf has it.
_TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


def conversation_of(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The conversation of a row in whatever form; the last turn is the assistant's.

    Raises:
        MalformedRow: the row has none, or see `parse_conversation`.
    """
    forms = () if _has(row, *_TURNS) else _ASKED_AND_SAID
    for asked, said in forms:
        if _has(row, asked) and _has(row, said):
            both = f"{asked} + {said}"
            return parse_conversation({both: [*_asked(row)[1], *_reply(row, said)]}, both)
    if forms and "messages" not in row:
        raise MalformedRow(
            "missing_key",
            "no key 'messages', nor 'conversations', 'prompt' with 'completion' or 'instruction' with 'output'; the "
            f"row has {keys_of(row)}",
        )
    key, turns = _asked(row)
    return parse_conversation({key: turns}, key)


def prompt_of(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """What a row asks, in whatever form; an answer that it has as its last turn is left out.

    Raises:
        MalformedRow: the row asks nothing, or see `parse_conversation`.
    """
    key, turns = _asked(row)
    return parse_conversation({key: turns}, key, last_role="user")


def turns_with_reply(row: Mapping[str, Any], key: str) -> Any:
    """The turns under `key`, unchecked; of a reply alone, those that the row asks with the reply behind them.

    Raises:
        MalformedRow: there is a reply alone, and nothing that asks for it.
    """
    value = row[key]
    is_bare = not _has(row, *_TURNS, "prompt", "instruction")
    if is_bare and isinstance(value, str) and value.lstrip().startswith("Human:"):
        _, *parts = _TRANSCRIPT.split(value.lstrip())
        roles = ("user" if speaker == "Human" else "assistant" for speaker in parts[::2])
        return [{"role": role, "content": text.strip()} for role, text in zip(roles, parts[1::2], strict=True)]
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(value, str) or (isinstance(first, Mapping) and role_of(first) == "assistant"):
        return [*_asked(row, f"{key!r} is a reply alone: ")[1], *_reply(row, key)]
    return value


def _reply(row: Mapping[str, Any], key: str) -> list[Any]:
    """A reply as text, as a message or as a list of one, as turns."""
    value = row[key]
    if isinstance(value, list):
        if len(value) != 1:
            raise MalformedRow("not_messages", f"{key!r} must be one message, the reply, not {len(value)}")
        return value
    return [value if isinstance(value, Mapping) else {"role": "assistant", "content": value}]


def _asked(row: Mapping[str, Any], before: str = "") -> tuple[str, list[Any]]:
    """Under which key a row asks, and the turns there, unchecked."""
    missing = None if "messages" not in row else "messages"
    key = next((key for key in (*_TURNS, "prompt", "instruction") if _has(row, key)), missing)
    if key is None:
        raise MalformedRow(
            "missing_key",
            f"{before}no key 'prompt', nor 'messages', 'conversations' or 'instruction'; the row has {keys_of(row)}",
        )
    turns = _alpaca(row) if key == "instruction" else row[key]
    if key == "prompt" and isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list):
        text = "text or " if key == "prompt" else ""
        raise MalformedRow("not_messages", f"{key!r} must be {text}a list of messages, not {kind_of(turns)}")
    system = row.get("system")
    if key != "messages" and isinstance(system, str) and system.strip():
        first = turns[0] if turns else None
        if not (isinstance(first, Mapping) and role_of(first) == "system"):
            turns = [{"role": "system", "content": system}, *turns]
    return key, turns


def _alpaca(row: Mapping[str, Any]) -> list[Any]:
    """An instruction with what it is about, and what was said before."""
    earlier, more = row.get("history") or [], row.get("input")
    if not isinstance(earlier, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in earlier):
        raise MalformedRow("not_messages", "'history' must be a list of pairs, what was asked and what was said")
    turns = [turn for pair in earlier for turn in zip(("user", "assistant"), pair, strict=True)]
    instruction = row["instruction"]
    if isinstance(instruction, str) and isinstance(more, str) and more.strip():
        instruction = f"{instruction}\n{more}"
    return [{"role": role, "content": text} for role, text in [*turns, ("user", instruction)]]


def _has(row: Mapping[str, Any], *keys: str) -> bool:
    return any(row.get(key) is not None for key in keys)
