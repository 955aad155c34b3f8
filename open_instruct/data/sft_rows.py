"""Rows of supervised fine-tuning, `{"messages": [...]}`: every reply of a row is learned."""

from collections.abc import Mapping
from typing import Any

from open_instruct.data.conversations.messages import Message, is_empty_turn
from open_instruct.data.conversations.row_forms import find_conversation
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.row_builder import RenderedRow, RowBuilder


def parse_sft_row(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """Check one row and return its conversation, which ends with an assistant's turn.

    Other keys are not read.

    Raises:
        MalformedRow: with the kind and the reason; docs/data.md lists them.
    """
    messages = find_conversation(row)
    replies = [message for message in messages if message["role"] == "assistant"]
    if all("is_learned" in reply for reply in replies):
        raise MalformedRow(
            "nothing_learned",
            "every reply has weight 0 or train false, so there is nothing to learn",
        )
    for turn, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and is_empty_turn(message):
            raise MalformedRow("empty_reply", f"turn {turn}: the reply is empty")
    return messages


class SFTBuilder(RowBuilder):
    """Builds conversations, whose pieces are context and learned replies in turn."""

    unit = "conversation"
    columns = ("prompt", "completion")
    check = staticmethod(parse_sft_row)
    row_example = (
        '{"messages": [{"role": "user", "content": "text"}, {"role": "assistant", "content": '
        '"text"}]}'
    )

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        messages = parse_sft_row(row)
        replies = [message for message in messages if message["role"] == "assistant"]
        pieces = self.chat.render_turns(messages)
        texts = [""]  # context and learned replies in turn
        for prompt, text, reply in zip(pieces[::2], pieces[1::2], replies, strict=True):
            texts[-1] += prompt
            if reply.get("is_learned", True):
                texts += [text, ""]
            else:
                texts[-1] += text
        # Without the context behind the last learned reply.
        return RenderedRow(texts=tuple(texts[:-1]))
