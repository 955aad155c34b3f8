"""Rows of supervised fine-tuning, `{"messages": [...]}`: every reply of a row is learned.

Where a row has `sampled`, those of its replies that were sampled are learned by their own ids.

With `--split_replies` a row of several replies becomes several rows. A template may write an
earlier reply otherwise once others follow it, such as without its thoughts (Qwen 3's own), so that
no single text teaches all of them. In a row of its own a reply is asked for as an engine would ask,
and earlier replies are context.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from open_instruct.data.conversations.messages import Message, is_empty_turn
from open_instruct.data.conversations.rendered_row import RenderedRow
from open_instruct.data.conversations.row_forms import find_conversation
from open_instruct.data.eval_split import join_columns
from open_instruct.data.files.rows import MalformedRow, RawRow, RowSource
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.sampled.sampled_rows import SAMPLED, check_branch, read_branch

# The key of a row that has the place of its reply among the messages; no column is called so.
REPLY_PLACE = "--split_replies"


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
            "every reply has weight 0, or train or loss false, so there is nothing to learn",
        )
    for turn, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and is_empty_turn(message):
            raise MalformedRow("empty_reply", f"turn {turn}: the reply is empty")
    return messages


def check_sft_row(row: Mapping[str, Any]) -> None:
    """Check one row as far as that needs no tokenizer.

    Raises:
        MalformedRow: see `parse_sft_row`; or what was sampled cannot be read.
    """
    if read_branch(row) is None:
        parse_sft_row(row)


class SFTBuilder(RowBuilder):
    """Builds conversations, whose pieces are context and learned replies in turn."""

    unit = "conversation"
    columns = ("prompt", "completion")
    check = staticmethod(check_sft_row)
    token_files_problem = ""
    row_example = (
        '{"messages": [{"role": "user", "content": "text"}, {"role": "assistant", "content": '
        '"text"}]}'
    )

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        return self.render_sampled(row) or self.render_messages(row)

    def render_sampled(self, row: Mapping[str, Any]) -> RenderedRow | None:
        """The ids that a row was sampled with; None where it does not say.

        Raises:
            MalformedRow: none of its replies was sampled so that it is learned, or see
                `check_branch`.
        """
        branch = read_branch(row)
        if branch is None:
            return None
        check_branch(branch, row, self.chat.fingerprint, self.chat.tokenizer)
        if not branch.replies:
            raise MalformedRow(
                "nothing_learned",
                "no reply was sampled as the server samples, so none has ids to learn: leave the "
                f"row out by --on_bad_row skip, or leave out its {SAMPLED!r}",
            )
        return RenderedRow.from_token_ids(branch.list_pieces())

    def render_messages(self, row: Mapping[str, Any]) -> RenderedRow:
        """The texts that the template writes of a row."""
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
        return RenderedRow(texts=tuple(texts[:-1]), messages=messages)


class ReplyBuilder(SFTBuilder):
    """As `SFTBuilder`, with a row of each reply that is learned; sampled ids need no such rows."""

    check = staticmethod(check_sft_row)
    token_files_problem = "--split_replies splits messages, and it has none; leave the flag out"

    @classmethod
    def adapt_source(cls, source: RowSource) -> RowSource:
        return split_replies(source)

    def render_messages(self, row: Mapping[str, Any]) -> RenderedRow:
        messages = parse_sft_row(row)
        place = row[REPLY_PLACE]
        prompt, (text,) = self.chat.render(messages[:place], [messages[place]])
        # All replies of a conversation are on one side of --eval_split.
        content = join_columns({"messages": messages})
        return RenderedRow(texts=(prompt, text), messages=messages[:place], content=content)


def choose_builder(*, splits_replies: bool) -> type[SFTBuilder]:
    """The class of rows of conversations, with `--split_replies` or without."""
    return ReplyBuilder if splits_replies else SFTBuilder


def split_replies(conversations: RowSource) -> RowSource:
    """A source with a row of each learned reply; a row that is malformed stays one row.

    All rows are read once, so that their replies are counted.
    """
    rows = conversations.rows(range(len(conversations)))
    starts = [0, *accumulate(len(_split_row(row)) for row in rows)]

    def read_rows(indices: Sequence[int]) -> Iterator[RawRow]:
        places = [(bisect_right(starts, index) - 1, index) for index in indices]
        distinct = sorted({row for row, _ in places})
        wanted_indices = set(indices)
        for number, row in zip(distinct, conversations.rows(distinct), strict=True):
            for index, reply in enumerate(_split_row(row), start=starts[number]):
                if index in wanted_indices:
                    yield reply

    return replace(conversations, num_rows=starts[-1], rows=read_rows)


def _split_row(row: RawRow) -> list[RawRow]:
    """A row of each learned reply of a conversation, or the one row with its problem."""
    if row.value.get(SAMPLED) is not None:
        return [row]
    try:
        messages = parse_sft_row(row.content())
    except MalformedRow as error:
        return [replace(row, problem=error)]
    return [
        replace(row, value={**row.value, REPLY_PLACE: place})
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("is_learned", True)
    ]
