"""The forms in which published rows write prompts and replies, turned into conversations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from open_instruct.data.files.foreign_json import kind_of
from open_instruct.data.files.rows import MalformedRow, reach, says
from open_instruct.data.messages import Message, keys_of, parse_conversation, role_of

# The keys of conversations; the second and the third are ShareGPT's.
_TURNS = ("messages", "conversations", "conversation")
# The keys of a prompt (TRL's, Alpaca's, OpenOrca's), of a reply, and of a system prompt.
_ASKED = ("prompt", "instruction", "question")
_SAID = ("completion", "response", "output")
_SYSTEM = ("system", "system_prompt")
_FEWEST_WORDS = 3  # of a prompt that replies repeat: they may begin with fewer words by chance
# One text for a conversation, as Anthropic's hh-rlhf has it.
_TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
# Other names of a column, by its name here; a dot reaches into an object.
_OTHER_NAMES = {
    "prompt": ("question", "query", "problem", "input", "user", "text"),
    "completion": ("answer", "reply", "target", "assistant", "solution", "chosen"),
    "chosen": ("chosen_response", "response_chosen", "preferred", "winner", "better", "accepted", "positive"),
    "rejected": ("rejected_response", "response_rejected", "dispreferred", "loser", "worse", "negative"),
    "label": ("is_desirable", "desirable", "liked", "thumbs_up"),
    "ground_truth": ("reward_model.ground_truth", "answer", "solution", "final_answer", "target", "label"),
}


def conversation_of(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The conversation of a row of any form; the last turn is the assistant's.

    Raises:
        MalformedRow: the row has none, or see `parse_conversation`.
    """
    if not _key(row, _TURNS):
        asked, replied = _key(row, _ASKED), _key(row, _SAID)
        if asked and replied:
            both = f"{asked} + {replied}"
            return parse_conversation({both: _prompt_and_reply(row, replied, row[replied])}, both)
        if "messages" not in row:
            raise MalformedRow(
                "missing_key",
                "no key 'messages', nor 'conversations', 'prompt' with 'completion' or 'instruction' with 'output'; "
                f"the row has {keys_of(row)}",
            )
    key, turns = _turns_asked(row)
    return parse_conversation({key: turns}, key)


def prompt_of(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The prompt of a row of any form; an answer as its last turn is left out.

    Raises:
        MalformedRow: the row has no prompt, or see `parse_conversation`.
    """
    key, turns = _turns_asked(row)
    return parse_conversation({key: turns}, key, last_role="user")


def replies_to_one(row: Mapping[str, Any], keys: Sequence[str]) -> list[tuple[Message, ...]]:
    """A conversation for each of `keys`: the turns under the key, or the row's prompt with the reply under the key.

    Raises:
        MalformedRow: a reply has no prompt; a conversation does not begin with the row's `prompt`; or see
            `parse_conversation`.
    """
    values = {key: row[key] for key in keys if key in row}
    prompt = row["prompt"] if says(row, "prompt") else None
    if isinstance(prompt, str) and len(prompt.split()) >= _FEWEST_WORDS and not _is_transcript(prompt):
        # Some rows repeat the prompt at the beginning of every reply.
        is_repeated = all(isinstance(text, str) and text.startswith(prompt) for text in values.values())
        values = {key: text.removeprefix(prompt).lstrip() for key, text in values.items()} if is_repeated else values
    turns = {key: _with_reply(row, key, value) for key, value in values.items()}
    return [parse_conversation(turns if key in turns else row, key) for key in keys]


def guessed_columns(row: Mapping[str, Any], wanted: Sequence[str]) -> str:
    """The words of `--columns` that would map other columns of a row to `wanted`; "" if one has no likely column."""
    words = []
    for ours in wanted:
        if says(row, ours) or (ours == "prompt" and _key(row, (*_TURNS, *_ASKED))):
            continue
        theirs = next((name for name in _OTHER_NAMES[ours] if reach(row, name) is not None), None)
        if theirs is None:
            return ""
        words.append(f"{ours}={theirs}")
    return " ".join(words)


def _with_reply(row: Mapping[str, Any], key: str, value: Any) -> Any:
    """The turns of `value`, unchecked; a reply alone is put behind the row's prompt."""
    asked = _key(row, (*_TURNS, *_ASKED))
    if isinstance(value, str) and _is_transcript(value) and (not asked or _is_transcript(row[asked])):
        return _with_system(row, _turns_of_transcript(value))
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(value, str) or (isinstance(first, Mapping) and role_of(first) == "assistant"):
        return _prompt_and_reply(row, key, value, f"{key!r} is a reply alone: ")
    if not isinstance(value, list):
        return value
    if asked == "prompt":
        _check_same_prompt(row, key, value)
    return _with_system(row, value)


def _check_same_prompt(row: Mapping[str, Any], key: str, turns: list[Any]) -> None:
    there = {text.strip() for text in _texts_of_users(turns)}
    if any(text.strip() not in there for text in _texts_of_users(_turns_asked(row)[1])):
        raise MalformedRow(
            "prompts_differ",
            f"'prompt' asks what {key!r}, a whole conversation, does not: give one of the two, or mend the row",
        )


def _texts_of_users(turns: list[Any]) -> list[str]:
    users = [turn for turn in turns if isinstance(turn, Mapping) and role_of(turn) == "user"]
    return [text for turn in users if isinstance(text := turn.get("content", turn.get("value")), str)]


def _prompt_and_reply(row: Mapping[str, Any], key: str, reply: Any, before: str = "") -> list[Any]:
    """The row's prompt and a reply as turns; the reply is a text, a message or a list of one message."""
    asked, turns = _turns_asked(row, before)
    if isinstance(reply, list):
        if len(reply) != 1:
            raise MalformedRow("not_messages", f"{key!r} must be one message, the reply, not {len(reply)}")
        return [*turns, *reply]
    if isinstance(reply, str) and _is_transcript(row[asked]):
        reply = reply.strip()  # the space behind "Assistant:"
    return [*turns, reply if isinstance(reply, Mapping) else {"role": "assistant", "content": reply}]


def _turns_asked(row: Mapping[str, Any], before: str = "") -> tuple[str, list[Any]]:
    """The key of a row's prompt, and the turns there, unchecked."""
    key = _key(row, (*_TURNS, *_ASKED)) or ("messages" if "messages" in row else None)
    if key is None:
        raise MalformedRow(
            "missing_key",
            f"{before}no key 'prompt', nor 'messages', 'conversations' or 'instruction'; the row has {keys_of(row)}",
        )
    turns = _alpaca(row) if key == "instruction" else row[key]
    if key in _ASKED and isinstance(turns, str):
        turns = _turns_of_transcript(turns) if _is_transcript(turns) else [{"role": "user", "content": turns}]
    if not isinstance(turns, list):
        text = "text or " if key in _ASKED else ""
        raise MalformedRow("not_messages", f"{key!r} must be {text}a list of messages, not {kind_of(turns)}")
    return key, _with_system(row, turns)


def _with_system(row: Mapping[str, Any], turns: list[Any]) -> list[Any]:
    """The turns with the row's separate system prompt in front, unless they have one."""
    key = _key(row, _SYSTEM)
    first = turns[0] if turns else None
    if key is None or (isinstance(first, Mapping) and role_of(first) == "system"):
        return turns
    system = row[key]
    return [{"role": "system", "content": system}, *turns] if not isinstance(system, str) or system.strip() else turns


def _is_transcript(text: Any) -> bool:
    return isinstance(text, str) and text.lstrip().startswith("Human:")


def _turns_of_transcript(text: str) -> list[Any]:
    _, *parts = _TRANSCRIPT.split(text.strip())
    pairs = [(speaker, words.strip()) for speaker, words in zip(parts[::2], parts[1::2], strict=True)]
    if pairs[-1] == ("Assistant", ""):  # a prompt ends with the name of the next speaker
        pairs.pop()
    return [{"role": "user" if speaker == "Human" else "assistant", "content": words} for speaker, words in pairs]


def _alpaca(row: Mapping[str, Any]) -> list[Any]:
    """The turns of an Alpaca row: the instruction with its `input`, behind the turns of `history`."""
    earlier, more = row.get("history") or [], row.get("input")
    if not isinstance(earlier, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in earlier):
        raise MalformedRow("not_messages", "'history' must be a list of pairs, what was asked and what was said")
    turns = [turn for pair in earlier for turn in zip(("user", "assistant"), pair, strict=True)]
    instruction = row["instruction"]
    if isinstance(instruction, str) and isinstance(more, str) and more.strip():
        instruction = f"{instruction}\n{more}"
    return [{"role": role, "content": text} for role, text in [*turns, ("user", instruction)]]


def _key(row: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """The first of `keys` under which a row has a value."""
    return next((key for key in keys if says(row, key)), None)
