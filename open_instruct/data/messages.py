"""The conversations of rows: the forms in which published rows write them, and the checks of their
messages.

A conversation is an optional system turn, then user and assistant in turn; answers of tools stand
between two turns of the assistant.
"""

import json
import re
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NotRequired, TypedDict, cast

import yaml

from open_instruct.data.files.rows import MalformedRow, kind_of
from open_instruct.data.tool_turns import CALLS, OTHER_FORM, calls_of, schemas_of

ROLES = ("system", "user", "assistant", "tool")
# What may come behind each of them; "" is the beginning.
_FOLLOWING = {
    "": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
# ShareGPT writes turns as {"from", "value"}. OpenAI's `weight` and axolotl's `train` say whether a
# reply is learned.
READ_KEYS = {"role", "content", "from", "value", "weight", "train", *OTHER_FORM}
REASONING: Final = "reasoning_content"
# The keys of conversations; the second and the third are ShareGPT's.
_TURNS = ("messages", "conversations", "conversation")
# The keys of a prompt (TRL's, Alpaca's, OpenOrca's), of a reply, and of a system prompt.
_ASKED = ("prompt", "instruction", "question")
_SAID = ("completion", "response", "output")
_SYSTEM = ("system", "system_prompt")
_ALIKE = 0.75  # the least likeness of a name that was mistyped, as `get_close_matches` measures it
_FEWEST_WORDS = 3  # of a prompt that replies repeat: they may begin with fewer words by chance
# One text for a conversation, as Anthropic's hh-rlhf has it.
_TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
_OTHERS = yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8"))
_ROLE_OF = {other: role for role, others in _OTHERS["roles"].items() for other in others}


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


class ReadRow(UserDict[str, Any]):
    """A row that knows which of its keys were read."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        super().__init__(value)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self.data[key]

    def unread(self) -> Iterator[str]:
        """The keys with a value that nothing has read."""
        return (key for key, item in self.data.items() if item is not None and key not in self.read)

    def read_part(self) -> dict[str, Any]:
        """The keys with a value that was read."""
        return {
            key: item for key, item in self.data.items() if item is not None and key in self.read
        }


def conversation_of(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The conversation of a row of any form; the last turn is the assistant's.

    Raises:
        MalformedRow: the row has none, or see `parse_conversation`.
    """
    if not _key(row, _TURNS):
        asked = _key(row, _ASKED)
        replied = _key(row, _SAID)
        if asked and replied:
            both = f"{asked} + {replied}"
            return parse_conversation({both: _prompt_and_reply(row, replied, row[replied])}, both)
        if "messages" not in row:
            raise MalformedRow(
                "missing_key",
                "no key 'messages', nor 'conversations', 'prompt' with 'completion' or "
                f"'instruction' with 'output'; the row has {keys_of(row)}",
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
    """A conversation for each of `keys`: the turns under the key, or the row's prompt with the
    reply under the key.

    Raises:
        MalformedRow: a reply has no prompt; a conversation does not begin with the row's `prompt`;
            or see `parse_conversation`.
    """
    values = {key: row[key] for key in keys if key in row}
    prompt = row["prompt"] if _key(row, ("prompt",)) else None
    if (
        isinstance(prompt, str)
        and len(prompt.split()) >= _FEWEST_WORDS
        and not _is_transcript(prompt)
    ):
        # Some rows repeat the prompt at the beginning of every reply.
        is_repeated = all(
            isinstance(text, str) and text.startswith(prompt) for text in values.values()
        )
        if is_repeated:
            values = {key: text.removeprefix(prompt).lstrip() for key, text in values.items()}
    turns = {key: _with_reply(row, key, value) for key, value in values.items()}
    return [parse_conversation(turns if key in turns else row, key) for key in keys]


def parse_conversation(
    row: Mapping[str, Any], key: str, *, last_role: Literal["assistant", "user"] = "assistant"
) -> tuple[Message, ...]:
    """The turns under `key`, as this file's head has them, until `last_role`'s.

    If `last_role` is the user, it may also be a tool's, and an assistant's turn at the end is left
    out.

    Raises:
        MalformedRow: the turns are of another form, or the last one is empty.
    """
    if key not in row:
        raise without_key(row, key)
    value = row[key]
    if not isinstance(value, list):
        raise MalformedRow(
            "not_messages", f"{key!r} must be a list of messages, not {kind_of(value)}"
        )
    if not value:
        raise MalformedRow("not_messages", f"{key!r} is an empty list of messages")
    messages = tuple(
        _parse_message(message, f"{key!r}, turn {i}") for i, message in enumerate(value, start=1)
    )
    if last_role == "user" and len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    _check_order(messages, key, last_role)
    if says_nothing(messages[-1]) and messages[-1]["role"] != "tool":
        kind, what = (
            ("empty_reply", "reply") if last_role == "assistant" else ("empty_prompt", "last turn")
        )
        raise MalformedRow(kind, f"the {what} in {key!r} is empty")
    return messages


def says_nothing(message: Message) -> bool:
    """Whether a turn has neither text nor calls."""
    return not message["content"].strip() and not any(message.get(key) for key in CALLS)


def check_is_learned(reply: Message, where: str) -> None:
    """:raises MalformedRow: the reply is marked as not learned, but the loss is of whole
    replies.
    """
    if "is_learned" in reply:
        raise MalformedRow(
            "nothing_learned",
            f"the reply in {where} has weight 0 or train false: leave the row out",
        )


def unread_of_messages(row: Mapping[str, Any], reads_reasoning: bool) -> set[str]:
    """Keys of a row's messages that nothing reads, such as `reasoning_content` where the chat
    template ignores it.
    """
    read = {*READ_KEYS, REASONING} if reads_reasoning else READ_KEYS
    unread: set[str] = set()
    for value in row.values():
        if not isinstance(value, list):
            continue
        for message in value:
            if isinstance(message, Mapping) and role_of(message) in ROLES:
                unread.update(
                    f"{key} of messages"
                    for key, item in message.items()
                    if item and key not in read
                )
    return unread


def guessed_columns(row: Mapping[str, Any], wanted: Sequence[str]) -> str:
    """The words of `--columns` that would map other columns of a row to `wanted`; "" if one has no
    likely column.
    """
    words = []
    # The prompt of a pair may be in its conversations.
    is_whole = "chosen" in wanted and any(isinstance(value, list) for value in row.values())
    has_prompt = is_whole or _key(row, (*_TURNS, *_ASKED)) is not None
    for ours in wanted:
        if _key(row, (ours,)) or (ours == "prompt" and has_prompt):
            continue
        known = [name for name in _OTHERS["columns"][ours] if reach(row, name) is not None]
        alike = get_close_matches(
            ours, [name for name in row if name not in wanted], n=1, cutoff=_ALIKE
        )
        if not known and not alike:
            return ""
        words.append(f"{ours}={[*known, *alike][0]}")
    return " ".join(words)


def role_of(message: Mapping[str, Any]) -> Any:
    """The role of a message, under any of its known keys and names; unchecked."""
    speaker = message.get("role", message.get("from"))
    return _ROLE_OF.get(speaker, speaker) if isinstance(speaker, str) else speaker


def reach(row: Mapping[str, Any], name: str) -> Any:
    """The value under a name, None if there is none; a dot reaches into an object:

    `reward_model.ground_truth`.
    """
    if name in row or "." not in name:
        return row.get(name)
    first, _, rest = name.partition(".")
    inner = row.get(first)
    return reach(inner, rest) if isinstance(inner, Mapping) else None


def without_key(row: Mapping[str, Any], key: str, hint: str = "") -> MalformedRow:
    """The error of a row that lacks a key; a `hint` follows the keys that it has."""
    return MalformedRow(
        "missing_key", f"no key {key!r}; the row has {keys_of(row)}{hint}", missing_key=key
    )


def keys_of(row: Mapping[str, Any]) -> str:
    """The keys of a row, for messages."""
    return ", ".join(map(repr, row)) or "no keys"


def _parse_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise MalformedRow(
            "bad_message",
            f"{where}: must be an object with 'role' and 'content', not {kind_of(message)}",
        )
    content = _text_of(
        message.get("content")
        if "role" in message or "content" in message
        else message.get("value")
    )
    calls = calls_of(message.get("tool_calls"), where)
    if content is None and (calls or message.get("function_calls")):
        content = ""  # as OpenAI writes a reply that only calls
    fields = {"role": role_of(message), "content": content}
    if message.get(REASONING):
        fields[REASONING] = _text_of(message[REASONING])
    fields |= {
        key: message[key]
        for key in ("functions", "function_calls")
        if message.get(key) not in (None, [])
    }
    of_tools = {"tools": schemas_of(message.get("tools")), "tool_calls": calls}
    of_tools = {key: value for key, value in of_tools.items() if value}
    told = {
        key: json.dumps(value, ensure_ascii=False, default=str) for key, value in of_tools.items()
    }
    for key, value in {**fields, **told}.items():
        if value is None:
            raise MalformedRow("bad_message", f"{where}: no {key!r}")
        if not isinstance(value, str):
            raise MalformedRow(
                "bad_message", f"{where}: {key!r} must be text, not {kind_of(value)}"
            )
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON may spell half of a surrogate pair: "\ud83d"
            raise MalformedRow(
                "not_unicode",
                (f"{where}: {key!r} has half of a surrogate pair at character {error.start + 1}"),
            ) from error
    parsed = cast(Message, fields | of_tools)
    if parsed["role"] not in ROLES:
        raise MalformedRow(
            "unknown_role", f"{where}: unknown role {parsed['role']!r}; use {', '.join(ROLES)}"
        )
    if message.get("tools") and not of_tools.get("tools"):
        raise MalformedRow(
            "bad_tools",
            f"{where}: 'tools' are JSON schemas, not {kind_of(message['tools'])} of names",
        )
    if parsed["role"] != "assistant" and any(parsed.get(key) for key in CALLS):
        raise MalformedRow("bad_tools", f"{where}: calls of tools in a turn that is no assistant's")
    if not _is_learned(message, where) and parsed["role"] == "assistant":
        parsed["is_learned"] = False
    return parsed


def _text_of(content: Any) -> Any:
    """The text of content in parts, `[{"type": "text", "text": "What is 2 + 2?"}]`; any other
    content as it is.
    """
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        return content
    texts = [part.get("text") for part in content]
    return "".join(texts) if texts and all(isinstance(text, str) for text in texts) else content


def _is_learned(message: Mapping[str, Any], where: str) -> bool:
    is_learned = True
    for key in ("weight", "train"):
        value = message.get(key)
        if value not in (None, 0, 1):
            raise MalformedRow(
                "bad_weight", f"{where}: {key!r} must be 0 or 1, or false or true, not {value!r}"
            )
        if value and role_of(message) != "assistant":
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
            raise MalformedRow(
                "roles_out_of_order",
                f"{key!r}, turn {turn}: the role is {role!r} where "
                f"{' or '.join(map(repr, _FOLLOWING[before]))} should follow; an optional system "
                "turn comes first, then user and assistant in turn",
            )
    if roles[-1] != last_role and (last_role, roles[-1]) != ("user", "tool"):
        raise MalformedRow(
            "roles_out_of_order",
            f"{key!r}: the last turn is {roles[-1]!r}, it must be {last_role!r}",
        )


def _with_reply(row: Mapping[str, Any], key: str, value: Any) -> Any:
    """The turns of `value`, unchecked; a reply alone is put behind the row's prompt."""
    asked = _key(row, (*_TURNS, *_ASKED))
    if (
        isinstance(value, str)
        and _is_transcript(value)
        and (not asked or _is_transcript(row[asked]))
    ):
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
            f"'prompt' asks what {key!r}, a whole conversation, does not: give one of the two, or "
            "mend the row",
        )


def _texts_of_users(turns: list[Any]) -> list[str]:
    users = [turn for turn in turns if isinstance(turn, Mapping) and role_of(turn) == "user"]
    return [
        text for turn in users if isinstance(text := turn.get("content", turn.get("value")), str)
    ]


def _prompt_and_reply(row: Mapping[str, Any], key: str, reply: Any, before: str = "") -> list[Any]:
    """The row's prompt and a reply as turns; the reply is a text, a message or a list of one
    message.
    """
    asked, turns = _turns_asked(row, before)
    if isinstance(reply, list):
        if len(reply) != 1:
            raise MalformedRow(
                "not_messages", f"{key!r} must be one message, the reply, not {len(reply)}"
            )
        return [*turns, *reply]
    if isinstance(reply, str) and _is_transcript(row[asked]):
        reply = reply.strip()  # the space behind "Assistant:"
    return [
        *turns,
        reply if isinstance(reply, Mapping) else {"role": "assistant", "content": reply},
    ]


def _turns_asked(row: Mapping[str, Any], before: str = "") -> tuple[str, list[Any]]:
    """The key of a row's prompt, and the turns there, unchecked."""
    key = _key(row, (*_TURNS, *_ASKED)) or ("messages" if "messages" in row else None)
    if key is None:
        raise MalformedRow(
            "missing_key",
            f"{before}no key 'prompt', nor 'messages', 'conversations' or 'instruction'; the row "
            f"has {keys_of(row)}",
        )
    turns = _alpaca(row) if key == "instruction" else row[key]
    if key in _ASKED and isinstance(turns, str):
        turns = (
            _turns_of_transcript(turns)
            if _is_transcript(turns)
            else [{"role": "user", "content": turns}]
        )
    if not isinstance(turns, list):
        text = "text or " if key in _ASKED else ""
        raise MalformedRow(
            "not_messages", f"{key!r} must be {text}a list of messages, not {kind_of(turns)}"
        )
    return key, _with_system(row, turns)


def _with_system(row: Mapping[str, Any], turns: list[Any]) -> list[Any]:
    """The turns with the row's separate system prompt in front, unless they have one; the first has
    the row's tools.
    """
    key = _key(row, _SYSTEM)
    first = turns[0] if turns else None
    if key is not None and not (isinstance(first, Mapping) and role_of(first) == "system"):
        system = row[key]
        if not isinstance(system, str) or system.strip():
            turns = [{"role": "system", "content": system}, *turns]
    if turns and isinstance(turns[0], Mapping) and schemas_of(_unread(row).get("tools")):
        turns = [
            {**turns[0], "tools": schemas_of(turns[0].get("tools")) + schemas_of(row["tools"])},
            *turns[1:],
        ]
    return turns


def _is_transcript(text: Any) -> bool:
    return isinstance(text, str) and text.lstrip().startswith("Human:")


def _turns_of_transcript(text: str) -> list[Any]:
    _, *parts = _TRANSCRIPT.split(text.strip())
    pairs = [
        (speaker, words.strip()) for speaker, words in zip(parts[::2], parts[1::2], strict=True)
    ]
    if pairs[-1] == ("Assistant", ""):  # a prompt ends with the name of the next speaker
        pairs.pop()
    return [
        {"role": "user" if speaker == "Human" else "assistant", "content": words}
        for speaker, words in pairs
    ]


def _alpaca(row: Mapping[str, Any]) -> list[Any]:
    """The turns of an Alpaca row: the instruction with its `input`, behind the turns of
    `history`.
    """
    earlier = row.get("history") or []
    more = row.get("input")
    if not isinstance(earlier, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in earlier
    ):
        raise MalformedRow(
            "not_messages", "'history' must be a list of pairs, what was asked and what was said"
        )
    turns = []
    for asked, said in earlier:
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    instruction = row["instruction"]
    if isinstance(instruction, str) and isinstance(more, str) and more.strip():
        instruction = f"{instruction}\n{more}"
    return [*turns, {"role": "user", "content": instruction}]


def _key(row: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """The first of `keys` under which a row has a value other than null, which Arrow fills missing
    columns with.
    """
    return next((key for key in keys if _unread(row).get(key) is not None), None)


def _unread(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row, to be looked into without its keys counting as read."""
    return row.data if isinstance(row, ReadRow) else row
