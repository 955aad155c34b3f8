"""Counts of what happens to rows while a data set is built, and the warnings that follow."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from open_instruct.core.text import spell_count
from open_instruct.data.conversations.messages import find_reasoning

MAX_KEYS_SHOWN = 8  # in a warning
END_OF_THOUGHT = "</think>"


@dataclass(kw_only=True)
class RowCounts:
    """What is counted of the rows of a data set that are well-formed."""

    unread: Counter[str] = field(default_factory=Counter)
    """The number of rows with a value under each key that nothing reads."""
    filtered: Counter[str] = field(default_factory=Counter)
    """Rows of which nothing is left to learn, by reason."""
    num_truncated: int = 0
    """Rows that are cut to the length limit."""
    num_without_end: int = 0
    """Replies that do not end with an end token."""
    num_parts_without_end: int = 0
    """Learned parts that are given as ids and do not end with one."""
    num_with_two_ends: int = 0
    """Replies that end with two of them or more."""
    num_with_more_thoughts: int = 0
    """Rows in whose text the template writes more ends of thoughts than they have."""
    num_with_two_starts: int = 0
    """Rows that begin with two bos tokens."""
    num_replies_left_out: int = 0
    """Prompts that end with a reply, which is not asked with."""
    left_out: Counter[str] = field(default_factory=Counter)
    """The rows by role of which the template leaves out a turn of the system or the user."""
    with_turn_tokens: Counter[str] = field(default_factory=Counter)
    """The rows by token of the template that spell it out in such a turn."""
    shortest_prompt: int | None = None
    """The fewest tokens of any row's first piece."""

    def list_warnings(self, template: str, optional_keys: Mapping[str, str]) -> list[str]:
        """Warnings about what was counted.

        Args:
            template: the chat template's name.
            optional_keys: keys of rows that a flag would have read, with that flag.
        """
        warnings = self._list_template_warnings(f"{template} chat template")
        unread = [key for key, _ in self.unread.most_common() if key not in optional_keys]
        if unread:
            keys_shown = ", ".join(map(repr, unread[:MAX_KEYS_SHOWN]))
            if len(unread) > MAX_KEYS_SHOWN:
                keys_shown += f" and {len(unread) - MAX_KEYS_SHOWN} more"
            warnings.append(
                f"not read by this run: {keys_shown} of "
                f"{spell_count(self.unread[unread[0]], 'row')}"
            )
        if self.num_replies_left_out:
            warnings.append(
                f"the reply at the end of {spell_count(self.num_replies_left_out, 'prompt')} is "
                "left out: a prompt is asked, and not continued"
            )
        if self.num_parts_without_end:
            warnings.append(
                f"{spell_count(self.num_parts_without_end, 'learned part')} given as ids, of token "
                f"files or sampled, do not end with an end-of-turn token of the {template} chat "
                "template, so the model will not learn there where a reply stops"
            )
        for key, flag in optional_keys.items():
            if key in self.unread:
                warnings.append(f"{key!r} is read with {flag} only")
        return warnings

    def _list_template_warnings(self, template: str) -> list[str]:
        warnings = []
        if self.num_with_two_ends:
            warnings.append(
                f"{template} adds an end token behind that of "
                f"{spell_count(self.num_with_two_ends, 'reply')}, and both are learned: leave it "
                "out of the rows"
            )
        if self.num_with_two_starts:
            warnings.append(
                f"{template} and {spell_count(self.num_with_two_starts, 'row')} each begin with "
                "the bos token, and it is there twice: leave it out of the rows"
            )
        for role, num_rows in self.left_out.items():
            warnings.append(
                f"{template} leaves out a {role} turn of {spell_count(num_rows, 'row')}: choose "
                "another by --chat_template_name, or take the turn out of the rows"
            )
        if self.with_turn_tokens:
            token, _ = self.with_turn_tokens.most_common(1)[0]
            warnings.append(
                f"{spell_count(self.with_turn_tokens.total(), 'row')} spell out tokens of the "
                f"{template}, such as {token!r}, in what the system or the user says, and they "
                "are read as those tokens: if a template wrote these texts before, give the "
                "messages that it wrote them of"
            )
        if self.num_with_more_thoughts:
            warnings.append(
                f"{template} writes more {END_OF_THOUGHT} than "
                f"{spell_count(self.num_with_more_thoughts, 'row')} has in its replies, and each "
                "is learned: an empty thought, or a second end of one that the row has"
            )
        if self.num_without_end:
            warnings.append(
                f"{template} ends {spell_count(self.num_without_end, 'reply')} without an "
                "end-of-turn token, so the model will not learn where a reply stops"
            )
        return warnings


def count_thoughts(row: Any) -> int:
    """The thoughts that a row has, which end in its texts or have a key of their own."""
    if isinstance(row, str):
        return row.count(END_OF_THOUGHT)
    if isinstance(row, Mapping):
        return bool(find_reasoning(row)) + sum(map(count_thoughts, row.values()))
    if isinstance(row, list | tuple):
        return sum(map(count_thoughts, row))
    return 0
