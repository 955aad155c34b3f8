"""Rows of single replies, each labelled as desirable or not, as KTO learns from them.

A pair of replies is two rows. For z0 of KTO's loss each row gets a second reply, which does not
belong to its prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.text import spell_count
from open_instruct.data.conversations.messages import Message, check_is_learned
from open_instruct.data.conversations.rendered_row import RenderedRow
from open_instruct.data.conversations.row_forms import find_conversation
from open_instruct.data.conversations.row_keys import missing_key_error
from open_instruct.data.eval_split import join_columns
from open_instruct.data.files.rows import MalformedRow, RawRow, RowSource, name_json_type
from open_instruct.data.preference_rows import parse_preference_row
from open_instruct.data.row_builder import RowBuilder


def parse_labelled_row(row: Mapping[str, Any]) -> tuple[tuple[Message, ...], bool]:
    """The conversation of a row, which ends with the labelled reply, and whether the reply is
    desirable.

    Raises:
        MalformedRow: with the kind and the reason; docs/kto.md lists them.
    """
    messages = find_conversation(row)
    check_is_learned(messages[-1], "the row")
    if "label" not in row:
        raise missing_key_error(row, "label")
    label = row["label"]
    if isinstance(label, str):  # tables hold text only
        label = {
            "true": True,
            "1": True,
            "false": False,
            "0": False,
        }.get(label.strip().lower(), label)
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        description = (
            f"{label!r:.40}" if isinstance(label, str | int | float) else name_json_type(label)
        )
        raise MalformedRow(
            "bad_label", f"'label' must be true or false (or 1 or 0), not {description}"
        )
    return messages, bool(label)


class UnpairedBuilder(RowBuilder):
    """Builds rows of two pieces, the prompt and the reply, with the label as the row's number."""

    unit = "row"
    row_example = (
        '{"prompt": "text", "completion": "text", "label": true}, or lists of messages in place '
        "of the texts"
    )
    columns = ("prompt", "completion", "label")
    docs_page = "docs/kto.md"
    check = staticmethod(parse_labelled_row)

    @classmethod
    def adapt_source(cls, source: RowSource) -> RowSource:
        """The source; if its first readable row is a preference pair, every pair gives two rows."""
        readable = (row.value for row in source.rows(range(len(source))) if row.problem is None)
        first = next(readable, {})
        if "chosen" in first and "label" not in first:
            return _split_pairs(source)
        return source

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        messages, label = parse_labelled_row(row)
        prompt, (text,) = self.chat.render(messages[:-1], messages[-1:])
        # Both replies to a prompt are on one side of --eval_split.
        content = join_columns({"messages": messages[:-1]})
        return RenderedRow(
            texts=(prompt, text), messages=messages, values=(float(label),), content=content
        )


class MismatchedBuilder(UnpairedBuilder):
    """As `UnpairedBuilder`, with a third piece: the reply of another row of the source.

    `choose_other_replies` says which.
    """

    documents_per_row = 2
    document_titles = ("reply", "a reply of another row, for z0")

    def finish_source(self, name: str, first: int) -> None:
        rows = self.store.pop_rows(first)
        prompts: dict[bytes, int] = {}
        replies: dict[bytes, int] = {}
        numbers = []
        for (prompt, reply), _ in rows:
            prompt_number = prompts.setdefault(prompt.tobytes(), len(prompts))
            reply_number = replies.setdefault(reply.tobytes(), len(replies))
            numbers.append((prompt_number, reply_number))
        if len(replies) == 1:
            raise InputError(
                f"{name}: {spell_count(len(rows), 'row')}, all with the same reply, but z0 of "
                "--loss_type kto needs another one for each prompt; add rows with other replies, "
                "or use --loss_type apo_zero_unpaired",
                kind="bad_row",
            )
        distinct = [array("i", reply) for reply in replies]
        others = choose_other_replies(numbers)
        for ((prompt, reply), details), number in zip(rows, others, strict=True):
            room = self.max_seq_length - len(prompt)
            self.store_row([prompt, reply, _find_other(distinct, number, reply, room)], details)


def _find_other(
    distinct: Sequence[array[int]],
    start: int,
    reply: array[int],
    room: int,
) -> array[int]:
    """The first reply from number `start` on that differs from `reply`, cut to `room` tokens.

    Replies that differ only behind the cut are equal here; where none differs, it is `reply`.
    """
    for step in range(len(distinct)):
        other = distinct[(start + step) % len(distinct)][:room]
        if other != reply:
            return other
    return reply


def choose_other_replies(rows: Sequence[tuple[int, int]]) -> list[int]:
    """For each row, given the numbers of its prompt and its reply, the number of a reply that does
    not belong to it.

    Distinct replies, two at least, are numbered from 0 as they first come. Each row takes the next
    one after its own, after the last the first, that came with another prompt; where all have come
    with its prompt, the next one.
    """
    first_prompts = {reply: prompt for prompt, reply in reversed(rows)}
    next_foreign = _find_next_foreign(first_prompts)
    others = []
    for prompt, reply in rows:
        following = (reply + 1) % len(first_prompts)
        other = following
        if first_prompts[following] == prompt:
            other = next_foreign[following]
        is_foreign = other != reply and first_prompts[other] != prompt
        others.append(other if is_foreign else following)
    return others


def _find_next_foreign(first_prompts: Mapping[int, int]) -> list[int]:
    """For each reply, the first one after it that came with another prompt than it did; any number
    where all came with one prompt.
    """
    num_replies = len(first_prompts)
    other_replies = [0] * num_replies
    # From the last to the first, twice, as the second round sees past the end.
    for reply in [*reversed(range(num_replies))] * 2:
        following = (reply + 1) % num_replies
        if first_prompts[following] == first_prompts[reply]:
            other_replies[reply] = other_replies[following]
        else:
            other_replies[reply] = following
    return other_replies


def _split_pairs(pairs: RowSource) -> RowSource:
    """A source of preference pairs as twice as many rows: chosen replies, and undesirable ones."""

    def rows(indices: Sequence[int]) -> Iterator[RawRow]:
        wanted_indices = set(indices)
        pair_indices = sorted({index // 2 for index in indices})
        for pair, row in zip(pair_indices, pairs.rows(pair_indices), strict=True):
            for offset, each in enumerate(_split_pair(row)):
                if 2 * pair + offset in wanted_indices:
                    yield each

    return replace(pairs, num_rows=2 * len(pairs), rows=rows)


def _split_pair(row: RawRow) -> tuple[RawRow, ...]:
    try:
        chosen, rejected = parse_preference_row(row.content())
    except MalformedRow as error:
        return (replace(row, problem=error),) * 2
    return tuple(
        replace(row, value={"messages": list(messages), "label": label})
        for messages, label in ((chosen, True), (rejected, False))
    )
