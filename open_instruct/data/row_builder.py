"""From raw rows of any form to flat arrays of tokens: check, render, tokenise, cut, count.

Legend for array names: N rows of the data set, T tokens.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any, ClassVar

import numpy as np

from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.rows import BadRow, MalformedRow, RawRow, ReadRow, RowSource
from open_instruct.data.messages import unread_of_messages
from open_instruct.data.mixer import MixerEntry, select_rows
from open_instruct.data.report import BadRowLog, DataReport
from open_instruct.errors import InputError
from open_instruct.wording import counted

_ROWS_AT_ONCE = 512
_MOST_KEYS = 8  # named in a warning
MOST_CUT = 0.1  # of the rows; above this share a warning says that the length limit is too low


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedRow:
    """A row as pieces of text that are tokenised apart; `RowBuilder` says which of them are learned.

    `details` are bytes that are kept beside the tokens; `values` are numbers for the loss of the row.

    Example: `RenderedRow(texts=("User: Hi\nAssistant:", "Hello<eos>"))`.
    """

    texts: tuple[str, ...]
    details: bytes = b""
    values: tuple[float, ...] = ()


class RowBuilder(ABC):
    """Collects the distinct rows of all sources, then repeats them by the amounts of the mixture.

    A subclass renders a row and cuts its tokens. In a row with one document, context and learned pieces alternate. In a
    row with several documents the first piece is their common prompt, and each further piece is one reply to it.
    """

    unit: ClassVar[str]  # the name of a kept row in reports, such as "pair"
    # For the message that refuses rows: an example of this form, and the page of the docs with others.
    wanted: str = ""
    columns: ClassVar[tuple[str, ...]] = ()  # the keys of a row, where they can be guessed among other names
    page: str = "docs/data.md"
    documents_per_row: ClassVar[int] = 1
    titles: ClassVar[tuple[str, ...]] = ("",)  # of the documents of a row, for the preview
    reads_ends: ClassVar[bool] = False  # see `Document`
    too_long: ClassVar[str] = "prompt_too_long"

    def __init__(self, chat: ChatFormat, *, max_seq_length: int, on_bad_row: str) -> None:
        if max_seq_length < 2:
            raise InputError(
                f"--max_seq_length {max_seq_length} leaves no room for a prompt and a reply; use 2 or more."
            )
        self.chat = chat
        self.max_seq_length = max_seq_length
        self.on_bad_row = on_bad_row
        self.token_ids = array("i")
        self.edges: list[list[int]] = []  # for each kept row: starts of its pieces in token_ids, stop of the last
        self.details = bytearray()
        self.details_edges = [0]  # starts of the details of each kept row, stop of the last
        self.keys = bytearray()
        self.bad = BadRowLog()
        self.unread: Counter[str] = Counter()  # by key that nothing reads: the number of rows with a value there
        self.filtered: Counter[str] = Counter()
        self.num_truncated = 0
        self.num_without_end = 0
        self.shortest_prompt: int | None = None

    @abstractmethod
    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        """The text of one row.

        Raises:
            MalformedRow: with the kind and the reason.
        """

    @abstractmethod
    def cut(self, pieces: list[list[int]]) -> list[list[int]] | None:
        """The token ids to keep of a row's pieces; None, counted in `filtered`, if nothing is left to learn."""

    @classmethod
    def rows_in(cls, source: RowSource) -> RowSource:
        """The rows of a source in this builder's form."""
        return source

    @staticmethod
    def check(row: Mapping[str, Any]) -> object:
        """Check the parts of a row that need no tokenizer; the result is not used.

        Called only for a class that defines it itself, since a subclass may render other rows.

        Raises:
            MalformedRow: with the kind and the reason.
        """
        return row

    def end_source(self, name: str, first: int) -> None:
        """Called after the last row of a source of which rows were kept: those from the number `first` on."""
        return

    def limit(self) -> str:
        """The flag that leaves long prompts out, with its value."""
        return f"--max_seq_length {self.max_seq_length}"

    def remedy(self) -> str:
        """What to change when nothing is left."""
        return f"raise --max_seq_length: the shortest prompt alone has {counted(self.shortest_prompt or 0, 'token')}"

    def cut_warning(self) -> str | None:
        """A warning about rows that were cut; None if there is nothing to warn of."""
        num_kept = len(self.edges)
        if self.num_truncated <= MOST_CUT * num_kept:
            return None
        return (
            f"{self.num_truncated:,} of {counted(num_kept, 'row')} are cut to --max_seq_length {self.max_seq_length}, "
            "and teach replies that break off: raise it, or leave such rows out"
        )

    def build(
        self,
        entries: Sequence[MixerEntry],
        sources: Sequence[RowSource],
        *,
        seed: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> tuple[dict[str, np.ndarray], DataReport]:
        """Read all sources and return the arrays of the data set.

        Raises:
            InputError: a row is malformed and `on_bad_row` is "error", or nothing is left.
        """
        sources = [self.rows_in(source) for source in sources]
        selected = [select_rows(entry, len(source), seed) for entry, source in zip(entries, sources, strict=True)]
        distinct = [np.unique(indices) for indices in selected]
        num_rows = sum(map(len, distinct))
        kept_of_N: list[np.ndarray] = []
        num_done = 0
        for source, indices, rows in zip(sources, selected, distinct, strict=True):
            kept_of_row = np.full(len(rows), -1, dtype=np.int64)
            first = len(self.edges)
            stream = enumerate(source.rows(rows.tolist()))
            while chunk := list(islice(stream, _ROWS_AT_ONCE)):
                for index, place in self._add(chunk):
                    kept_of_row[index] = place
                num_done += len(chunk)
                if on_progress is not None:
                    on_progress(num_done, num_rows)
            if len(self.edges) > first and not self._only_counts:
                self.end_source(source.name, first)
            kept = kept_of_row[np.searchsorted(rows, indices)]
            kept_of_N.append(kept[kept >= 0])
        if self._only_counts:
            raise self.refusal(num_rows)
        if not self.edges:
            raise self._nothing_left(num_rows)

        order_N = np.concatenate(kept_of_N)
        arrays = self._arrays(order_N)
        warnings: list[str] = []
        if self.num_without_end:
            warnings.append(
                f"{self.chat.template.name} chat template ends {counted(self.num_without_end, 'reply')} without an "
                "end-of-turn token, so the model will not learn where a reply stops"
            )
        if self.unread:
            keys = ", ".join(f"{key!r}" for key, _ in self.unread.most_common(_MOST_KEYS))
            more = f" and {len(self.unread) - _MOST_KEYS} more" if len(self.unread) > _MOST_KEYS else ""
            warnings.append(f"{keys}{more} of {counted(max(self.unread.values()), 'row')}: nothing reads what is there")
        if warning := self.cut_warning():
            warnings.append(warning)
        return arrays, DataReport(
            sources=tuple(
                (source.name, len(source), len(indices)) for source, indices in zip(sources, selected, strict=True)
            ),
            num_rows=num_rows,
            bad=dict(self.bad.counts),
            bad_rows=tuple(self.bad.lines()),
            filtered=dict(self.filtered),
            num_truncated=self.num_truncated,
            num_kept=len(self.edges),
            num_pairs=len(order_N),
            num_tokens=int(arrays["num_tokens"].sum()),
            warnings=tuple(warnings),
            unit=self.unit,
        )

    @property
    def _only_counts(self) -> bool:
        """Whether a bad row has made the build fail, so that further rows are read only to be counted."""
        return bool(self.bad.counts) and self.on_bad_row == "error"

    def _add(self, rows: Sequence[tuple[int, RawRow | BadRow]]) -> Iterator[tuple[int, int]]:
        """Add rows; yield (index of the row, its index among the kept rows) for each row that is kept."""
        rendered: list[tuple[int, RawRow, RenderedRow]] = []
        for index, row in rows:
            if isinstance(row, BadRow):
                self.bad.add(row)
                continue
            try:
                read = ReadRow(row.value)
                rendered.append((index, row, self.render(read)))
                self.unread.update({*read.unread(), *unread_of_messages(row.value, self.chat.reads_reasoning)})
            except MalformedRow as error:
                self._add_bad(row, error)
        if not rendered or self._only_counts:
            return
        ids = iter(self.chat.tokenize([text for _, _, item in rendered for text in item.texts]))
        for index, row, item in rendered:
            pieces = list(islice(ids, len(item.texts)))
            learned = range(1, 1 if self.reads_ends else len(pieces), self._pieces_a_reply)
            try:
                for piece in learned:
                    self.chat.check_reply(item.texts[piece], pieces[piece])
            except MalformedRow as error:
                self._add_bad(row, error)
                continue
            self.num_without_end += sum(not self.chat.ends_turn(item.texts[piece]) for piece in learned)
            self.shortest_prompt = min(len(pieces[0]), self.shortest_prompt or len(pieces[0]))
            if len(pieces[0]) >= self.max_seq_length:
                self.filtered[self.too_long] += 1
            elif (kept := self.cut(pieces)) is not None:
                self.num_truncated += sum(map(len, kept)) < sum(map(len, pieces))
                self._keep(kept, item.details or array("f", item.values).tobytes())
                yield index, len(self.edges) - 1

    @property
    def _pieces_a_reply(self) -> int:
        """The step between learned pieces: 1 behind a common prompt, 2 where context and replies alternate."""
        return 1 if self.documents_per_row > 1 else 2

    def _arrays(self, order_N: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of a `TokenDataset` of the kept rows in the order `order_N`."""
        stops = np.array(list(accumulate(map(len, self.edges), initial=0)), dtype=np.int64)
        details = np.array(self.details_edges, dtype=np.int64)
        first = 1 if self.documents_per_row > 1 else 0
        num_tokens = [
            edges[-1] - edges[0] + (self.documents_per_row - 1) * (edges[first] - edges[0]) for edges in self.edges
        ]
        step = self._pieces_a_reply
        replies = [list(zip(edges[1::step], edges[2::step], strict=False)) for edges in self.edges]
        num_labels = [
            len(spans) if self.reads_ends else sum(stop - start for start, stop in spans) for spans in replies
        ]
        return {
            "token_ids_T": np.frombuffer(self.token_ids, dtype=np.int32),
            "edges_E": np.fromiter(chain.from_iterable(self.edges), dtype=np.int64),
            "details_C": np.frombuffer(bytes(self.details), dtype=np.uint8),
            "bounds_N4": np.stack([stops[:-1], stops[1:], details[:-1], details[1:]], axis=1)[order_N],
            "num_tokens": np.array(num_tokens, dtype=np.int64)[order_N],
            "num_label_tokens": np.array(num_labels, dtype=np.int64)[order_N],
            "keys_N32": np.frombuffer(bytes(self.keys), dtype=np.uint8).reshape(-1, 32)[order_N],
        }

    def _add_bad(self, row: RawRow, error: MalformedRow) -> None:
        self.bad.add(error.at(row.file, row.line), row.value)

    def refusal(self, num_rows: int) -> InputError:
        """The error about the bad rows among `num_rows`."""
        return self.bad.error(num_rows, wanted=self.wanted, columns=self.columns, page=self.page)

    def _keep(self, pieces: Sequence[Sequence[int]], details: bytes) -> None:
        lengths, tokens = array("i", map(len, pieces)), array("i", chain.from_iterable(pieces))
        self.edges.append(list(accumulate(lengths, initial=len(self.token_ids))))
        self.token_ids.extend(tokens)
        self.details += details
        self.details_edges.append(len(self.details))
        self.keys += hashlib.sha256(lengths.tobytes() + tokens.tobytes() + details).digest()

    def _nothing_left(self, num_rows: int) -> InputError:
        if not self.filtered:
            return self.refusal(num_rows)
        counts = ", ".join(f"{kind} {count:,}" for kind, count in (self.filtered + self.bad.counts).items())
        return InputError(
            f"no {self.unit} of {counted(num_rows, 'row')} is left at {self.limit()} ({counts}); {self.remedy()}."
        )
