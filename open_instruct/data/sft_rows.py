"""What a row of supervised tuning must look like: `{"messages": [...]}`, every assistant turn of which is learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from open_instruct.data.preference_rows import Message, parse_conversation
from open_instruct.data.rows import MalformedRow


def parse_sft_row(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """Checks one row and takes out its conversation, which ends with an assistant's turn; other keys are left alone.

    Raises:
        MalformedRow: with the kind and the reason; docs/data.md lists them.
    """
    messages = parse_conversation(row, "messages")
    for turn, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and not message["content"].strip():
            raise MalformedRow("empty_reply", f"'messages', turn {turn}: the reply is empty")
    return messages
