"""Find the conversation, prompt or replies of a row in each form that published rows have.

Known are lists of messages (OpenAI's and ShareGPT's), a prompt with a reply (TRL's, Alpaca's,
OpenOrca's) and one text for a whole conversation (Anthropic's hh-rlhf).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from open_instruct.data.conversations.messages import (
    Message,
    find_content,
    find_role,
    parse_conversation,
)
from open_instruct.data.conversations.row_keys import describe_keys, find_key, unwrap_row
from open_instruct.data.conversations.tool_turns import read_schemas
from open_instruct.data.files.message_text import read_message_text
from open_instruct.data.files.rows import MalformedRow, name_json_type

# The keys of conversations; the second and the third are ShareGPT's.
CONVERSATION_KEYS = ("messages", "conversations", "conversation")
# The keys of a prompt (TRL's, Alpaca's, OpenOrca's), of a reply, and of a system prompt.
PROMPT_KEYS = ("prompt", "instruction", "question")
_REPLY_KEYS = ("completion", "response", "output")
_SYSTEM_KEYS = ("system", "system_prompt")
_MIN_REPEATED_WORDS = 3  # of a prompt: replies may begin with fewer of its words by chance
# One text for a conversation, as Anthropic's hh-rlhf has it.
_TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


def find_conversation(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The conversation of a row of any form; the last turn is the assistant's.

    Raises:
        MalformedRow: the row has none, or see `parse_conversation`.
    """
    if not find_key(row, CONVERSATION_KEYS):
        prompt_key = find_key(row, PROMPT_KEYS)
        reply_key = find_key(row, _REPLY_KEYS)
        if prompt_key and reply_key:
            both = f"{prompt_key} + {reply_key}"
            reply = read_message_text(row[reply_key])
            turns = _join_prompt_and_reply(row, reply_key, reply)
            return parse_conversation({both: turns}, both)
        if "messages" not in row:
            raise MalformedRow(
                "missing_key",
                "no key 'messages', nor 'conversations', 'prompt' with 'completion' or "
                f"'instruction' with 'output'; the row has {describe_keys(row)}",
            )
    key, turns = _find_prompt_turns(row)
    return parse_conversation({key: turns}, key)


def find_prompt(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The prompt of a row of any form; an answer as its last turn is left out.

    Raises:
        MalformedRow: the row has no prompt, or see `parse_conversation`.
    """
    key, turns = _find_prompt_turns(row)
    return parse_conversation({key: turns}, key, last_role="user")


def ends_with_reply(row: Mapping[str, Any]) -> bool:
    """Whether a row's prompt ends with a reply, which `find_prompt` leaves out."""
    _, turns = _find_prompt_turns(row)
    return isinstance(turns[-1], Mapping) and find_role(turns[-1]) == "assistant"


def find_replies(row: Mapping[str, Any], keys: Sequence[str]) -> list[tuple[Message, ...]]:
    """A whole conversation for each of `keys`, such as "chosen" and "rejected".

    It is what stands under the key, or the row's prompt with the reply under the key.

    Raises:
        MalformedRow: a reply has no prompt; a conversation does not begin with the row's `prompt`;
            or see `parse_conversation`.
    """
    values = {key: read_message_text(row[key]) for key in keys if key in row}
    prompt = row["prompt"] if find_key(row, ("prompt",)) else None
    if _is_repeated(prompt, values):
        values = {key: text.removeprefix(prompt).lstrip() for key, text in values.items()}
    turns = {key: _find_turns(row, key, value) for key, value in values.items()}
    return [parse_conversation(turns if key in turns else row, key) for key in keys]


def _is_repeated(prompt: Any, values: Mapping[str, Any]) -> bool:
    """Whether every reply begins with the prompt, as some rows repeat it."""
    if not isinstance(prompt, str) or _is_transcript(prompt):
        return False
    if len(prompt.split()) < _MIN_REPEATED_WORDS:
        return False
    return all(isinstance(text, str) and text.startswith(prompt) for text in values.values())


def _find_turns(row: Mapping[str, Any], key: str, value: Any) -> Any:
    """The turns of `value`, unchecked; a reply alone is put behind the row's prompt."""
    prompt_key = find_key(row, (*CONVERSATION_KEYS, *PROMPT_KEYS))
    if _is_transcript(value) and (not prompt_key or _is_transcript(row[prompt_key])):
        return _add_row_context(row, _split_transcript(value))
    first = value[0] if isinstance(value, list) and value else value
    is_reply = isinstance(first, Mapping) and find_role(first) == "assistant"
    if isinstance(value, str) or is_reply:
        return _join_prompt_and_reply(row, key, value, f"{key!r} is a reply alone: ")
    if not isinstance(value, list):
        return value
    if prompt_key == "prompt":
        _check_same_prompt(row, key, value)
    return _add_row_context(row, value)


def _check_same_prompt(row: Mapping[str, Any], key: str, turns: list[Any]) -> None:
    _, prompt_turns = _find_prompt_turns(row)
    texts = {text.strip() for text in _list_user_texts(turns)}
    if any(text.strip() not in texts for text in _list_user_texts(prompt_turns)):
        raise MalformedRow(
            "prompts_differ",
            f"'prompt' asks what {key!r}, a whole conversation, does not: give one of the two, or "
            "mend the row",
        )


def _list_user_texts(turns: list[Any]) -> list[str]:
    texts = []
    for turn in turns:
        if not isinstance(turn, Mapping) or find_role(turn) != "user":
            continue
        text = find_content(turn)
        if isinstance(text, str):
            texts.append(text)
    return texts


def _join_prompt_and_reply(
    row: Mapping[str, Any],
    key: str,
    reply: Any,
    problem_prefix: str = "",
) -> list[Any]:
    """The row's prompt and a reply as turns.

    Args:
        row: it has the prompt.
        key: of the reply, for messages.
        reply: a text, a message, or a list of one message.
        problem_prefix: what the error says first where there is no prompt.
    """
    prompt_key, turns = _find_prompt_turns(row, problem_prefix)
    if isinstance(reply, list):
        if len(reply) != 1:
            raise MalformedRow(
                "not_messages", f"{key!r} must be one message, the reply, not {len(reply)}"
            )
        return [*turns, *reply]
    if isinstance(reply, Mapping):
        return [*turns, reply]
    if isinstance(reply, str) and _is_transcript(row[prompt_key]):
        reply = reply.strip()  # the space behind "Assistant:"
    return [*turns, {"role": "assistant", "content": reply}]


def _find_prompt_turns(row: Mapping[str, Any], problem_prefix: str = "") -> tuple[str, list[Any]]:
    """The key of a row's prompt, and the turns there, unchecked."""
    key = find_key(row, (*CONVERSATION_KEYS, *PROMPT_KEYS))
    if key is None and "messages" in row:
        key = "messages"
    if key is None:
        raise MalformedRow(
            "missing_key",
            f"{problem_prefix}no key 'prompt', nor 'messages', 'conversations' or 'instruction'; "
            f"the row has {describe_keys(row)}",
        )
    turns = _read_alpaca(row) if key == "instruction" else read_message_text(row[key])
    if key in PROMPT_KEYS and isinstance(turns, str):
        turns = _read_prompt_text(turns)
    if not isinstance(turns, list):
        text = "text or " if key in PROMPT_KEYS else ""
        raise MalformedRow(
            "not_messages", f"{key!r} must be {text}a list of messages, not {name_json_type(turns)}"
        )
    return key, _add_row_context(row, turns)


def _read_prompt_text(text: str) -> list[Any]:
    if _is_transcript(text):
        return _split_transcript(text)
    return [{"role": "user", "content": text}]


def _add_row_context(row: Mapping[str, Any], turns: list[Any]) -> list[Any]:
    """The turns with the row's own system prompt in front, unless they have one, and its tools."""
    key = find_key(row, _SYSTEM_KEYS)
    first = turns[0] if turns else None
    if key is not None and not (isinstance(first, Mapping) and find_role(first) == "system"):
        system = row[key]
        if not isinstance(system, str) or system.strip():
            turns = [{"role": "system", "content": system}, *turns]
    if turns and isinstance(turns[0], Mapping) and read_schemas(unwrap_row(row).get("tools")):
        first, *others = turns
        schemas = read_schemas(first.get("tools")) + read_schemas(row["tools"])
        turns = [{**first, "tools": schemas}, *others]
    return turns


def _is_transcript(text: Any) -> bool:
    return isinstance(text, str) and text.lstrip().startswith("Human:")


def _split_transcript(text: str) -> list[Any]:
    _, *parts = _TRANSCRIPT.split(text.strip())
    turns = []
    for speaker, words in zip(parts[::2], parts[1::2], strict=True):
        role = "user" if speaker == "Human" else "assistant"
        turns.append({"role": role, "content": words.strip()})
    # A prompt ends with the name of the next speaker.
    if turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()
    return turns


def _read_alpaca(row: Mapping[str, Any]) -> list[Any]:
    """The turns of an Alpaca row: its `history`, then the instruction with its `input`."""
    history = row.get("history") or []
    more = row.get("input")
    if not isinstance(history, list) or not all(map(_is_pair, history)):
        raise MalformedRow(
            "not_messages", "'history' must be a list of pairs, what was asked and what was said"
        )
    turns = []
    for prompt, reply in history:
        turns.append({"role": "user", "content": prompt})
        turns.append({"role": "assistant", "content": reply})
    instruction = row["instruction"]
    if isinstance(instruction, str) and isinstance(more, str) and more.strip():
        instruction = f"{instruction}\n{more}"
    return [*turns, {"role": "user", "content": instruction}]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2
