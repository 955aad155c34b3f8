"""Rows of KTO: single replies with a label, and for each row the reply of another one.

A pair of replies is two rows. Legend: R rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from open_instruct.data.files.rows import MalformedRow, RawRow, RowSource, kind_of
from open_instruct.data.messages import Message, check_is_learned, conversation_of
from open_instruct.data.preference_rows import parse_preference_row
from open_instruct.data.row_builder import RenderedRow, RowBuilder
from open_instruct.errors import InputError
from open_instruct.wording import counted


def parse_labelled_row(row: Mapping[str, Any]) -> tuple[tuple[Message, ...], bool]:
    """The conversation of a row, which ends with the labelled reply, and whether the reply is desirable.

    Raises:
        MalformedRow: with the kind and the reason; docs/kto.md lists them.
    """
    messages = conversation_of(row)
    check_is_learned(messages[-1], "the row")
    if "label" not in row:
        raise MalformedRow("missing_key", f"no key 'label'; the row has {', '.join(map(repr, row))}")
    label = row["label"]
    if isinstance(label, str):  # tables hold text only
        label = {"true": True, "1": True, "false": False, "0": False}.get(label.strip().lower(), label)
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        shown = f"{label!r:.40}" if isinstance(label, str | int | float) else kind_of(label)
        raise MalformedRow("bad_label", f"'label' must be true or false (or 1 or 0), not {shown}")
    return messages, bool(label)


class UnpairedBuilder(RowBuilder):
    """Builds rows of two pieces, the prompt and the reply; the label is the row's number for the loss."""

    unit = "row"
    wanted = '{"prompt": "text", "completion": "text", "label": true}, or lists of messages in place of the texts'
    columns = ("prompt", "completion", "label")
    page = "docs/kto.md"
    check = staticmethod(parse_labelled_row)

    @classmethod
    def rows_in(cls, source: RowSource) -> RowSource:
        """The source; if its first readable row is a preference pair, every pair gives two rows."""
        first = next((row.value for row in source.rows(range(len(source))) if row.problem is None), {})
        return _BothReplies(source) if "chosen" in first and "label" not in first else source

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        messages, label = parse_labelled_row(row)
        prompt, (text,) = self.chat.render(messages[:-1], messages[-1:])
        return RenderedRow(texts=(prompt, text), values=(float(label),))

    def cut(self, pieces: list[list[int]]) -> list[list[int]] | None:
        """The reply is cut on the right, the prompt never."""
        prompt, reply = pieces
        return [prompt, reply[: self.max_seq_length - len(prompt)]]


class MismatchedBuilder(UnpairedBuilder):
    """As `UnpairedBuilder`, with a third piece: the reply of another row of the source, see `mismatched_replies`."""

    documents_per_row = 2
    check = staticmethod(parse_labelled_row)
    titles = ("reply", "a reply of another row, for z0")

    def end_source(self, name: str, first: int) -> None:
        rows = self._taken_back(first)
        prompts: dict[bytes, int] = {}
        replies: dict[bytes, int] = {}
        numbers = [
            (prompts.setdefault(prompt.tobytes(), len(prompts)), replies.setdefault(reply.tobytes(), len(replies)))
            for prompt, reply, _ in rows
        ]
        if len(replies) == 1:
            raise InputError(
                f"{name}: {counted(len(rows), 'row')}, all with the same reply, but z0 of --loss_type kto needs "
                "another one for each prompt; add rows with other replies, or use --loss_type apo_zero_unpaired"
            )
        distinct = [array("i", reply) for reply in replies]
        for (prompt, reply, details), number in zip(rows, mismatched_replies(numbers), strict=True):
            room = self.max_seq_length - len(prompt)
            others = (distinct[(number + step) % len(distinct)][:room] for step in range(len(distinct)))
            # Replies that differ only behind the cut are equal here; where none differs, it is the row's own.
            other = next((each for each in others if each != reply), reply)
            self.keep([prompt, reply, other], details)

    def _taken_back(self, first: int) -> list[tuple[array[int], array[int], bytes]]:
        """Remove the rows from `first` on, and return the prompt, the reply and the details of each."""
        start = len(self.token_ids) - sum(sum(row.lengths) for row in self.kept[first:])
        token_ids = iter(self.token_ids[start:])
        rows = [
            (array("i", islice(token_ids, prompt)), array("i", islice(token_ids, reply)), details)
            for (prompt, reply), details in self.kept[first:]
        ]
        del self.token_ids[start:], self.kept[first:]
        return rows


def mismatched_replies(rows: Sequence[tuple[int, int]]) -> list[int]:
    """For each row, given the numbers of its prompt and its reply, the number of a reply that does not belong to it.

    Distinct replies, two at least, are numbered from 0 as they first come. Each row takes the next one after its own,
    after the last the first, that came with another prompt; where all have come with its prompt, the next one.
    """
    prompt_of_reply = {reply: prompt for prompt, reply in reversed(rows)}  # of several prompts the first
    num_replies = len(prompt_of_reply)
    # The first after each reply that came with another prompt than it; the second round sees past the end.
    leaps = [0] * num_replies
    for reply in [*reversed(range(num_replies))] * 2:
        after = (reply + 1) % num_replies
        leaps[reply] = after if prompt_of_reply[after] != prompt_of_reply[reply] else leaps[after]
    chosen = []
    for prompt, reply in rows:
        after = (reply + 1) % num_replies
        other = leaps[after] if prompt_of_reply[after] == prompt else after
        chosen.append(after if other == reply or prompt_of_reply[other] == prompt else other)
    return chosen


class _BothReplies(RowSource):
    """A source of preference pairs as twice as many rows: each chosen reply is desirable, each rejected one is not."""

    def __init__(self, pairs: RowSource) -> None:
        super().__init__(pairs.name, pairs.fingerprint, 2 * len(pairs))
        self._pairs = pairs

    def rows(self, indices: Sequence[int]) -> Iterator[RawRow]:
        wanted = set(indices)
        pairs = sorted({index // 2 for index in indices})
        for pair, row in zip(pairs, self._pairs.rows(pairs), strict=True):
            for offset, each in enumerate(_both_rows(row)):
                if 2 * pair + offset in wanted:
                    yield each


def _both_rows(row: RawRow) -> tuple[RawRow, ...]:
    try:
        pair = parse_preference_row(row.content())
    except MalformedRow as error:
        return (replace(row, problem=error),) * 2
    return tuple(
        replace(row, value={"messages": [*pair.prompt, reply], "label": label})
        for reply, label in ((pair.chosen, True), (pair.rejected, False))
    )
