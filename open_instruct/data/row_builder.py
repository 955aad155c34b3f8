"""Build a data set of token ids from raw rows: check, render, tokenise, cut and count them.

A form of rows is a subclass of `RowBuilder`, which renders one row as pieces of text.
`preference_rows.py` has a short example.

Legend for array names: N rows of the data set.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from open_instruct.core.errors import InputError
from open_instruct.core.text import spell_count
from open_instruct.data.chat import ChatFormat
from open_instruct.data.conversations.leading_turns import trim_leading_turns
from open_instruct.data.conversations.messages import find_unread_keys
from open_instruct.data.conversations.rendered_row import ROW_OF_OTHER_SIDE, RenderedRow
from open_instruct.data.conversations.row_keys import TrackedRow
from open_instruct.data.eval_split import Side, SideFilter, join_columns
from open_instruct.data.files.rows import RawRow, RowSource
from open_instruct.data.files.token_files import TokenSource
from open_instruct.data.mixer import MixerEntry, select_rows
from open_instruct.data.report import BadRowLog, DataReport, Progress, ReportProgress
from open_instruct.data.row_counts import END_OF_THOUGHT, RowCounts, count_thoughts
from open_instruct.data.row_store import NOT_KEPT, ON_OTHER_SIDE, ROWS_PER_CHUNK, RowStore
from open_instruct.data.templates.prompt_faults import (
    find_roles_left_out,
    find_token_in_turns,
    find_turn_tokens,
)
from open_instruct.data.token_documents import DocumentReader, refuse_token_files

# The share of rows that may be cut; above it a warning says that the length limit is too low.
MAX_CUT_SHARE = 0.1


class RowBuilder(ABC):
    """Collects the distinct rows of all sources, then repeats them by the amounts of the mixture.

    A subclass renders a row, and says by class variables what its rows are. In a row with one
    document, context and learned pieces alternate. In a row with several documents the first piece
    is their common prompt, and each further piece is one reply to it.

    It may have a static `check(row)`, which raises MalformedRow as far as that needs no tokenizer.
    A subclass that renders such rows says so again: only a class's own `check` is called.
    """

    unit: ClassVar[str]
    """The name of a row of the data set in reports, such as "pair"."""
    row_example: str = ""
    """A row of this form, for the error that refuses rows."""
    docs_page: str = "docs/data.md"
    """The page with other forms, for the same error."""
    columns: ClassVar[tuple[str, ...]] = ()
    """The keys of a row, where they can be guessed among other names."""
    optional_keys: ClassVar[Mapping[str, str]] = {}
    """Keys of a row that only a flag has read, with that flag."""
    documents_per_row: ClassVar[int] = 1
    document_titles: ClassVar[tuple[str, ...]] = ("",)
    """The names of a row's documents in the preview."""
    reads_ends: ClassVar[bool] = False
    """Whether the model is read at the ends of replies alone, see `Document`."""
    ends_per_document: ClassVar[int] = 1
    """How many such ends a plan assumes."""
    token_files_problem: ClassVar[str] = "they are conversations, and this run reads other rows"
    """Why folders of token files are refused; empty where they are read."""

    def __init__(self, chat: ChatFormat, *, max_seq_length: int, on_bad_row: str) -> None:
        self.chat = chat
        self.max_seq_length = max_seq_length
        self.on_bad_row = on_bad_row
        self.bad_rows = BadRowLog()
        self.counts = RowCounts()
        self.side_filter: SideFilter | None = None
        self.store = RowStore(documents_per_row=self.documents_per_row, reads_ends=self.reads_ends)

    @abstractmethod
    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        """The text of one row.

        Raises:
            MalformedRow: with the kind and the reason.
        """

    def cut(self, pieces: list[list[int]]) -> list[list[int]] | None:
        """Cut the token ids of a row's pieces to `max_seq_length`.

        A conversation is cut on the right, so that it ends with the last learned token that fits.

        Returns:
            The pieces that are left; None, counted in `counts.filtered`, if nothing is left to
            learn.
        """
        pieces_left: list[list[int]] = []
        room = self.max_seq_length
        for prompt, reply in zip(pieces[::2], pieces[1::2], strict=True):
            room -= len(prompt)
            if room <= 0:
                break
            pieces_left += [prompt, reply[:room]]
            room -= len(reply)
        return pieces_left

    @classmethod
    def adapt_source(cls, source: RowSource) -> RowSource:
        """The source with its rows in this form; a subclass may make several rows of one."""
        return source

    def finish_source(self, name: str, first: int) -> None:
        """Called once all rows of a source are stored: those from the number `first` on."""
        return

    def describe_limit(self) -> str:
        """The flag that leaves long prompts out, with its value."""
        return f"--max_seq_length {self.max_seq_length}"

    def suggest_remedy(self) -> str:
        """The change of flags that would keep some rows, where the limit leaves none."""
        shortest = spell_count(self.counts.shortest_prompt or 0, "token")
        return f"raise it: the shortest prompt alone has {shortest}"

    def find_cut_warning(self) -> str | None:
        """A warning about rows that were cut; None if there is nothing to warn of."""
        num_truncated = self.counts.num_truncated
        if num_truncated <= MAX_CUT_SHARE * len(self.store):
            return None
        return (
            f"{num_truncated:,} of {spell_count(len(self.store), 'row')} are cut to "
            f"--max_seq_length {self.max_seq_length}, and teach replies that break off: raise it, "
            "or leave such rows out"
        )

    def store_row(self, pieces: Sequence[Sequence[int]], details: bytes) -> None:
        """Put a row behind those that are stored."""
        self.store.add(pieces, details)

    def build(
        self,
        entries: Sequence[MixerEntry],
        sources: Sequence[RowSource],
        *,
        seed: int,
        side: Side | None = None,
        on_progress: ReportProgress | None = None,
    ) -> tuple[dict[str, np.ndarray], DataReport]:
        """Read all sources and return the arrays of the data set, with a report.

        Args:
            entries: how much to take of each source.
            sources: of the same length.
            seed: of the choice of rows.
            side: of `--eval_split`: only its rows are taken. Rows that are held out are taken once,
                however often the mixture repeats them.
            on_progress: not called if the rows are so few that nobody would wait for them.

        Raises:
            InputError: a row is malformed and `on_bad_row` is "error", or nothing is left.
        """
        self.chat.turn_end_token_ids()  # which refuses a tokenizer that writes no such token
        if self.token_files_problem:
            refuse_token_files(sources, self.token_files_problem)
        if self.on_bad_row == "trim":
            sources = [trim_leading_turns(source) for source in sources]
        sources_read = [self.adapt_source(source) for source in sources]
        selections = [
            select_rows(entry, len(source), seed)
            for entry, source in zip(entries, sources_read, strict=True)
        ]
        if side is not None:
            self.side_filter = SideFilter(side)
            if side.is_held_out:
                selections = [np.unique(selection) for selection in selections]
        distinct = [np.unique(selection) for selection in selections]
        progress = Progress(sum(map(len, distinct)), on_progress)
        order: list[np.ndarray] = []
        source_lines: list[str] = []
        for source, selection, rows in zip(sources_read, selections, distinct, strict=True):
            numbers = self._read_source(source, rows, progress)[np.searchsorted(rows, selection)]
            order.append(numbers[numbers >= 0])
            num_taken = int((numbers != ON_OTHER_SIDE).sum())
            source_lines.append(
                f"{source.name}: {num_taken:,} taken of {spell_count(len(source), 'row')}"
            )
        if self._only_counts:
            raise self.bad_rows_error(progress.num_rows)
        if not len(self.store):
            raise self._nothing_left_error(progress.num_rows)
        arrays = self.store.build_arrays(np.concatenate(order))
        warnings = self._list_warnings()
        for source in sources:
            warnings += source.warnings()
        return arrays, self._report(arrays, progress.num_rows, source_lines, warnings)

    def _report(
        self,
        arrays: Mapping[str, np.ndarray],
        num_rows: int,
        source_lines: list[str],
        warnings: list[str],
    ) -> DataReport:
        num_held_out = 0
        if self.side_filter is not None:
            num_rows -= self.side_filter.num_others
            num_held_out = self.side_filter.num_held_out
        return DataReport(
            sources=source_lines,
            num_rows=num_rows,
            bad=dict(self.bad_rows.counts),
            bad_rows=self.bad_rows.lines(),
            filtered=dict(self.counts.filtered),
            num_truncated=self.counts.num_truncated,
            num_kept=len(self.store),
            num_pairs=len(arrays["num_tokens"]),
            num_tokens=int(arrays["num_tokens"].sum()),
            num_held_out=num_held_out,
            warnings=warnings,
            unit=self.unit,
        )

    @property
    def _only_counts(self) -> bool:
        """Whether a bad row has failed the build, so that further rows are only counted."""
        return bool(self.bad_rows.counts) and self.on_bad_row == "error"

    def _read_source(self, source: RowSource, rows: np.ndarray, progress: Progress) -> np.ndarray:
        """Read rows of a source, and return the number of each among the stored rows, int64.

        It is below 0 for a row that is not stored.
        """
        first = len(self.store)
        numbers: list[int] = []
        if isinstance(source, TokenSource):
            documents = self._document_reader.read(source, rows.tolist())
            while numbers_of_chunk := list(islice(documents, ROWS_PER_CHUNK)):
                numbers += numbers_of_chunk
                progress.add(len(numbers_of_chunk))
            return np.array(numbers, dtype=np.int64)
        stream = source.rows(rows.tolist())
        while chunk := list(islice(stream, ROWS_PER_CHUNK)):
            numbers += self._read_chunk(chunk)
            progress.add(len(chunk))
        if len(self.store) > first and not self._only_counts:
            self.finish_source(source.name, first)
        return np.array(numbers, dtype=np.int64)

    def _read_chunk(self, rows: Sequence[RawRow]) -> list[int]:
        rendered = [self.bad_rows.try_read(row, self._render_if_on_side) for row in rows]
        if self._only_counts:
            return [NOT_KEPT] * len(rows)
        texts: list[str] = []
        for rendered_row in rendered:
            if rendered_row is not None:
                texts += rendered_row.texts
        token_ids = iter(self.chat.tokenize(texts) if texts else ())
        numbers = []
        for row, rendered_row in zip(rows, rendered, strict=True):
            number = NOT_KEPT
            if rendered_row is ROW_OF_OTHER_SIDE:
                number = ON_OTHER_SIDE
            elif rendered_row is not None:
                pieces = list(islice(token_ids, len(rendered_row.texts)))
                if rendered_row.token_ids:
                    pieces = list(map(list, rendered_row.token_ids))
                if self._store_if_learned(row, rendered_row, pieces):
                    number = len(self.store) - 1
            numbers.append(number)
        return numbers

    def _render_if_on_side(self, value: Mapping[str, Any]) -> RenderedRow:
        row = TrackedRow(value)
        rendered = self.render(row)
        if self.side_filter is not None:
            content = rendered.content or join_columns(row.columns_read())
            if not self.side_filter.accepts(content):
                return ROW_OF_OTHER_SIDE
        unread_of_messages = find_unread_keys(value, self.chat.reads_reasoning)
        self.counts.unread.update({*row.unread_keys(), *unread_of_messages})
        return rendered

    def _store_if_learned(
        self, row: RawRow, rendered: RenderedRow, pieces: list[list[int]]
    ) -> bool:
        """Store a row, cut to the length limit, unless nothing of it can be learned."""
        last = 1 if self.reads_ends else len(pieces)
        replies = range(1, last, self.store.learned_stride)

        def check_replies(_: Mapping[str, Any]) -> bool:
            for piece in replies:
                self.chat.check_reply(rendered.texts[piece], pieces[piece])
            return True

        if not self.bad_rows.try_read(row, check_replies):
            return False
        self.count_marks(row, rendered, pieces, replies)
        counts = self.counts
        prompt_length = len(pieces[0])
        counts.shortest_prompt = min(prompt_length, counts.shortest_prompt or prompt_length)
        if prompt_length >= self.max_seq_length:
            counts.filtered["prompt_too_long"] += 1
            return False
        pieces_left = self.cut(pieces)
        if pieces_left is None:
            return False
        counts.num_truncated += sum(map(len, pieces_left)) < sum(map(len, pieces))
        self.store_row(pieces_left, rendered.details or array("f", rendered.values).tobytes())
        return True

    def count_marks(
        self, row: RawRow, rendered: RenderedRow, pieces: list[list[int]], replies: range
    ) -> None:
        """Count what the template makes of a row, to be told of.

        It is of the ends of replies, the starts of texts, the ends of thoughts, and turns.
        """
        counts = self.counts
        num_ends = [self.chat.count_ends(pieces[piece]) for piece in replies]
        if rendered.token_ids:  # which no template has written
            counts.num_parts_without_end += num_ends.count(0)
            return
        counts.num_without_end += num_ends.count(0)
        counts.num_with_two_ends += sum(number > 1 for number in num_ends)
        bos = self.chat.tokenizer.bos_token_id
        counts.num_with_two_starts += bos is not None and pieces[0][:2] == [bos, bos]
        counts.left_out.update(set(find_roles_left_out(rendered.messages, "".join(rendered.texts))))
        token = find_token_in_turns(rendered.messages, self._turn_tokens)
        if token is not None:
            counts.with_turn_tokens[token] += 1
        num_thoughts = sum(rendered.texts[piece].count(END_OF_THOUGHT) for piece in replies)
        if num_thoughts:
            counts.num_with_more_thoughts += num_thoughts > count_thoughts(row.value)

    @cached_property
    def _document_reader(self) -> DocumentReader:
        return DocumentReader(
            self.chat,
            self.store,
            self.counts,
            self.side_filter,
            max_seq_length=self.max_seq_length,
        )

    @cached_property
    def _turn_tokens(self) -> tuple[str, ...]:
        render = partial(self.chat.apply, add_generation_prompt=False)
        return find_turn_tokens(self.chat.tokenizer, render)

    def _list_warnings(self) -> list[str]:
        warnings = list(self.chat.warnings)
        warnings += self.counts.list_warnings(self.chat.template.name, self.optional_keys)
        cut_warning = self.find_cut_warning()
        if cut_warning:
            warnings.append(cut_warning)
        return warnings

    def bad_rows_error(self, num_rows: int) -> InputError:
        """The error about the bad rows among `num_rows`."""
        return self.bad_rows.error(
            num_rows, row_example=self.row_example, columns=self.columns, docs_page=self.docs_page
        )

    def _nothing_left_error(self, num_rows: int) -> InputError:
        if self.side_filter is not None and self.side_filter.num_others == num_rows:
            return self.side_filter.empty_side_error()
        filtered = self.counts.filtered
        if not filtered:
            return self.bad_rows_error(num_rows)
        kinds = (filtered + self.bad_rows.counts).items()
        counts = ", ".join(f"{kind} {count:,}" for kind, count in kinds)
        return InputError(
            f"no {self.unit} of {spell_count(num_rows, 'row')} is left at {self.describe_limit()} "
            f"({counts}); {self.suggest_remedy()}.",
            kind="bad_row",
        )
