"""Preference rows, `{"chosen": [messages], "rejected": [messages]}`, and the pieces of a pair.

The two conversations are equal up to the last turn, which is the assistant's and differs. Or they
are two replies alone, to a prompt in the same row. Where a row has `sampled`, the ids are its own.
"""

from collections.abc import Mapping
from typing import Any

from open_instruct.core.text import spell_count
from open_instruct.data.conversations.messages import REASONING, Message, check_is_learned
from open_instruct.data.conversations.rendered_row import RenderedRow
from open_instruct.data.conversations.row_forms import find_replies
from open_instruct.data.conversations.tool_turns import CALLS
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.sampled.sampled_rows import check_pair, read_pair


def parse_preference_row(row: Mapping[str, Any]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Check one row and return its chosen and its rejected conversation.

    They differ in the last turn alone.

    Raises:
        MalformedRow: with the kind and the reason; docs/data.md lists them.
    """
    chosen, rejected = find_replies(row, ("chosen", "rejected"))
    for key, messages in (("chosen", chosen), ("rejected", rejected)):
        check_is_learned(messages[-1], repr(key))
    if chosen[:-1] != rejected[:-1]:
        raise MalformedRow("prompts_differ", _describe_difference(chosen, rejected))
    if _strip_reply(chosen[-1]) == _strip_reply(rejected[-1]):
        raise MalformedRow("chosen_equals_rejected", "the chosen reply equals the rejected one")
    return chosen, rejected


def _strip_reply(reply: Message) -> tuple[Any, ...]:
    calls = [reply.get(key) for key in CALLS]
    return (reply.get(REASONING, "").strip(), reply["content"].strip(), *calls)


def _describe_difference(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> str:
    if len(chosen) != len(rejected):
        return (
            f"the prompts differ: 'chosen' has {spell_count(len(chosen), 'turn')}, 'rejected' has "
            f"{len(rejected)}"
        )
    turns = enumerate(zip(chosen, rejected, strict=True), start=1)
    turn = next(number for number, (one, other) in turns if one != other)
    return (
        f"the prompts differ at turn {turn}; every turn but the last must be the same in "
        "'chosen' and 'rejected'"
    )


def check_preference_row(row: Mapping[str, Any]) -> None:
    """Check one row as far as that needs no tokenizer.

    Raises:
        MalformedRow: see `parse_preference_row`; or what was sampled cannot be read.
    """
    if read_pair(row) is None:
        parse_preference_row(row)


class PreferenceBuilder(RowBuilder):
    """The pieces of a pair: the prompt, the chosen reply, the rejected reply."""

    unit = "pair"
    columns = ("prompt", "chosen", "rejected")
    row_example = (
        '{"prompt": "text", "chosen": "text", "rejected": "text"}, or lists of messages in place '
        "of the texts"
    )
    documents_per_row = 2
    document_titles = ("chosen", "rejected")
    check = staticmethod(check_preference_row)

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        pair = read_pair(row)
        if pair is not None:
            check_pair(pair, row, self.chat.fingerprint, self.chat.tokenizer)
            return RenderedRow.from_token_ids(
                [pair.prompt_token_ids, pair.chosen_token_ids, pair.rejected_token_ids]
            )
        chosen, rejected = parse_preference_row(row)
        prompt, replies = self.chat.render(chosen[:-1], (chosen[-1], rejected[-1]))
        return RenderedRow(texts=(prompt, *replies), messages=chosen)

    def cut(self, pieces: list[list[int]]) -> list[list[int]] | None:
        """Replies are cut on the right, prompts never."""
        prompt, chosen, rejected = pieces
        room = self.max_seq_length - len(prompt)
        if chosen[:room] == rejected[:room]:
            self.counts.filtered["same_tokens"] += 1
            return None
        return [prompt, chosen[:room], rejected[:room]]

    def suggest_remedy(self) -> str:
        if (self.counts.shortest_prompt or 0) >= self.max_seq_length:
            return super().suggest_remedy()
        return "raise --max_seq_length, so that the replies reach the place where they differ"
