"""Raw rows of any form made into flat arrays of tokens: checked, rendered, tokenised, cut and
counted.

Legend for array names: N rows of the data set, T tokens.
"""

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any, ClassVar, NamedTuple

import numpy as np

from open_instruct.core.errors import InputError
from open_instruct.core.text import counted
from open_instruct.data.chat import ChatFormat
from open_instruct.data.conversations.messages import REASONING, find_unread_keys
from open_instruct.data.conversations.row_keys import TrackedRow
from open_instruct.data.eval_split import Divider, Side, row_content
from open_instruct.data.files.rows import RawRow, RowSource
from open_instruct.data.mixer import MixerEntry, select_rows
from open_instruct.data.report import BadRowLog, DataReport

_ROWS_AT_ONCE = 512
_MOST_KEYS = 8  # named in a warning
END_OF_THOUGHT = "</think>"
MOST_CUT = 0.1  # of the rows; above this share a warning says that the length limit is too low


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedRow:
    """A row as pieces of text that are tokenised apart; `RowBuilder` says which of them are
    learned.

    `details` are bytes that are kept beside the tokens; `values` are numbers for the loss of the
    row; `content` is what `--eval_split` decides by, where that is not all columns that were read.

    Example: `RenderedRow(texts=("User: Hi\nAssistant:", "Hello<eos>"))`.
    """

    texts: tuple[str, ...]
    details: bytes = b""
    values: tuple[float, ...] = ()
    content: str = ""


ELSEWHERE = RenderedRow(texts=())
"""In place of a row of the other side of `--eval_split`."""
NOT_KEPT, ON_OTHER_SIDE = -1, -2  # in place of the number of a kept row


class KeptRow(NamedTuple):
    """A row of the data set, whose tokens lie in `RowBuilder.token_ids`."""

    lengths: tuple[int, ...]  # the number of tokens of each piece
    details: bytes


class RowBuilder(ABC):
    """Collects the distinct rows of all sources, then repeats them by the amounts of the mixture.

    A subclass renders a row. In a row with one document, context and learned pieces alternate. In a
    row with several documents the first piece is their common prompt, and each further piece is one
    reply to it.

    It may have a static `check(row)`, which raises MalformedRow as far as that needs no tokenizer.
    A subclass that renders such rows says so again: only a class's own `check` is called.
    """

    unit: ClassVar[str]  # the name of a kept row in reports, such as "pair"
    # For the message that refuses rows: an example of this form, and the page of the docs with
    # others.
    wanted: str = ""
    # The keys of a row, where they can be guessed among other names.
    columns: ClassVar[tuple[str, ...]] = ()
    page: str = "docs/data.md"
    documents_per_row: ClassVar[int] = 1
    titles: ClassVar[tuple[str, ...]] = ("",)  # of the documents of a row, for the preview
    reads_ends: ClassVar[bool] = False  # see `Document`
    # Keys of a row that only a flag has read, with that flag.
    read_with: ClassVar[Mapping[str, str]] = {}
    ends_per_document: ClassVar[int] = 1  # how many of these plans assume

    def __init__(self, chat: ChatFormat, *, max_seq_length: int, on_bad_row: str) -> None:
        self.chat = chat
        self.max_seq_length = max_seq_length
        self.on_bad_row = on_bad_row
        self.token_ids = array("i")  # of all kept rows, end to end
        self.kept: list[KeptRow] = []
        self.bad = BadRowLog()
        self.divider: Divider | None = None
        # By key that nothing reads: the number of rows with a value there.
        self.unread: Counter[str] = Counter()
        self.filtered: Counter[str] = Counter()
        self.num_truncated = 0
        self.num_without_end = 0
        self.num_with_two_ends = 0
        self.num_with_more_thoughts = 0
        self.num_with_two_starts = 0
        self.shortest_prompt: int | None = None

    @abstractmethod
    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        """The text of one row.

        Raises:
            MalformedRow: with the kind and the reason.
        """

    def cut(self, pieces: list[list[int]]) -> list[list[int]] | None:
        """The token ids to keep of a row's pieces; None, counted in `filtered`, if nothing is left
        to learn.

        A conversation is cut on the right, so that it ends with the last learned token that fits.
        """
        kept: list[list[int]] = []
        room = self.max_seq_length
        for prompt, reply in zip(pieces[::2], pieces[1::2], strict=True):
            room -= len(prompt)
            if room <= 0:
                break
            kept += [prompt, reply[:room]]
            room -= len(reply)
        return kept

    @classmethod
    def rows_in(cls, source: RowSource) -> RowSource:
        """The rows of a source in this builder's form."""
        return source

    def end_source(self, name: str, first: int) -> None:
        """Called after the last row of a source of which rows were kept: those from the number
        `first` on.
        """
        return

    def limit(self) -> str:
        """The flag that leaves long prompts out, with its value."""
        return f"--max_seq_length {self.max_seq_length}"

    def remedy(self) -> str:
        """The change of flags that would keep some rows, where none is left at `limit`."""
        return (
            f"raise it: the shortest prompt alone has {counted(self.shortest_prompt or 0, 'token')}"
        )

    def cut_warning(self) -> str | None:
        """A warning about rows that were cut; None if there is nothing to warn of."""
        if self.num_truncated <= MOST_CUT * len(self.kept):
            return None
        return (
            f"{self.num_truncated:,} of {counted(len(self.kept), 'row')} are cut to "
            f"--max_seq_length {self.max_seq_length}, and teach replies that break off: raise it, "
            "or leave such rows out"
        )

    def build(
        self,
        entries: Sequence[MixerEntry],
        sources: Sequence[RowSource],
        *,
        seed: int,
        side: Side | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> tuple[dict[str, np.ndarray], DataReport]:
        """Read all sources and return the arrays of the data set, with `side` of the rows of that
        side alone.

        Rows that are held out are taken once, however often the mixture repeats them.

        `on_progress(done, total)` counts rows, unless they are so few that nobody would wait for
        them.

        Raises:
            InputError: a row is malformed and `on_bad_row` is "error", or nothing is left.
        """
        self.chat.turn_end_token_ids()  # which refuses a tokenizer that writes no such token
        forms = [self.rows_in(source) for source in sources]
        selected = [
            select_rows(entry, len(form), seed) for entry, form in zip(entries, forms, strict=True)
        ]
        distinct = [np.unique(indices) for indices in selected]
        if side is not None:
            self.divider = Divider(side)
            selected = distinct if side.is_held_out else selected
        num_rows = sum(map(len, distinct))
        if num_rows <= _ROWS_AT_ONCE:
            on_progress = None
        order: list[np.ndarray] = []
        num_taken: list[int] = []
        num_done = 0
        for form, indices, rows in zip(forms, selected, distinct, strict=True):
            places: list[int] = []
            first = len(self.kept)
            stream = form.rows(rows.tolist())
            while chunk := list(islice(stream, _ROWS_AT_ONCE)):
                places += self._add(chunk)
                num_done += len(chunk)
                if on_progress is not None:
                    on_progress(num_done, num_rows)
            if len(self.kept) > first and not self._only_counts:
                self.end_source(form.name, first)
            taken = np.array(places, dtype=np.int64)[np.searchsorted(rows, indices)]
            order.append(taken[taken >= 0])
            num_taken.append(int((taken != ON_OTHER_SIDE).sum()))
        if self._only_counts:
            raise self.refusal(num_rows)
        if not self.kept:
            raise self._nothing_left(num_rows)
        num_rows -= self.divider.num_others if self.divider is not None else 0
        arrays = self._arrays(np.concatenate(order))
        sentences = [
            f"{form.name}: {num:,} taken of {counted(len(form), 'row')}"
            for form, num in zip(forms, num_taken, strict=True)
        ]
        warnings = self._warnings() + [
            warning for source in sources for warning in source.warnings()
        ]
        return arrays, self._report(arrays, sources=sentences, num_rows=num_rows, warnings=warnings)

    def _report(
        self,
        arrays: Mapping[str, np.ndarray],
        *,
        sources: list[str],
        num_rows: int,
        warnings: list[str],
    ) -> DataReport:
        return DataReport(
            sources=sources,
            num_rows=num_rows,
            bad=dict(self.bad.counts),
            bad_rows=self.bad.lines(),
            filtered=dict(self.filtered),
            num_truncated=self.num_truncated,
            num_kept=len(self.kept),
            num_pairs=len(arrays["num_tokens"]),
            num_tokens=int(arrays["num_tokens"].sum()),
            num_held_out=self.divider.num_held_out if self.divider is not None else 0,
            warnings=warnings,
            unit=self.unit,
        )

    @property
    def _only_counts(self) -> bool:
        """Whether a bad row has made the build fail, so that further rows are read only to be
        counted.
        """
        return bool(self.bad.counts) and self.on_bad_row == "error"

    def _add(self, rows: Sequence[RawRow]) -> list[int]:
        """Add rows; returns the place of each among the kept rows, below 0 of one that is not
        kept.
        """
        rendered = [self.bad.reading(row, self._rendered) for row in rows]
        if self._only_counts:
            return [NOT_KEPT] * len(rows)
        texts = [text for item in rendered if item is not None for text in item.texts]
        ids = iter(self.chat.tokenize(texts) if texts else ())
        places = []
        for row, item in zip(rows, rendered, strict=True):
            if item is ELSEWHERE:
                places.append(ON_OTHER_SIDE)
                continue
            is_kept = item is not None and self._is_kept(
                row, item, list(islice(ids, len(item.texts)))
            )
            places.append(len(self.kept) - 1 if is_kept else NOT_KEPT)
        return places

    def _rendered(self, value: Mapping[str, Any]) -> RenderedRow:
        read = TrackedRow(value)
        rendered = self.render(read)
        if self.divider is not None and not self.divider.takes(
            rendered.content or row_content(read.columns_read())
        ):
            return ELSEWHERE
        self.unread.update(
            {*read.unread_keys(), *find_unread_keys(value, self.chat.reads_reasoning)}
        )
        return rendered

    def _is_kept(self, row: RawRow, item: RenderedRow, pieces: list[list[int]]) -> bool:
        """Keep a row, cut to the length limit, unless nothing of it can be learned."""
        replies = range(1, 1 if self.reads_ends else len(pieces), self._pieces_a_reply)

        def check(_: Mapping[str, Any]) -> bool:
            for piece in replies:
                self.chat.check_reply(item.texts[piece], pieces[piece])
            return True

        if not self.bad.reading(row, check):
            return False
        num_ends = [self.chat.num_ends(pieces[piece]) for piece in replies]
        self.num_without_end += num_ends.count(0)
        self.num_with_two_ends += sum(each > 1 for each in num_ends)
        bos = self.chat.tokenizer.bos_token_id
        self.num_with_two_starts += bos is not None and pieces[0][:2] == [bos, bos]
        num_thoughts = sum(item.texts[piece].count(END_OF_THOUGHT) for piece in replies)
        if num_thoughts:
            self.num_with_more_thoughts += num_thoughts > _count_thoughts(row.value)
        self.shortest_prompt = min(len(pieces[0]), self.shortest_prompt or len(pieces[0]))
        if len(pieces[0]) >= self.max_seq_length:
            self.filtered["prompt_too_long"] += 1
            return False
        kept = self.cut(pieces)
        if kept is None:
            return False
        self.num_truncated += sum(map(len, kept)) < sum(map(len, pieces))
        self.keep(kept, item.details or array("f", item.values).tobytes())
        return True

    def keep(self, pieces: Sequence[Sequence[int]], details: bytes) -> None:
        """Put a row behind those that are kept."""
        self.token_ids.extend(chain.from_iterable(pieces))
        self.kept.append(KeptRow(lengths=tuple(map(len, pieces)), details=details))

    @property
    def _pieces_a_reply(self) -> int:
        """The step between learned pieces: 1 behind a common prompt, 2 where context and replies
        alternate.
        """
        return 1 if self.documents_per_row > 1 else 2

    def _arrays(self, order_N: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of a `TokenDataset` of the kept rows in the order `order_N`."""
        edges = array("q")
        bounds = array("q")
        num_tokens = array("q")
        num_labels = array("q")
        details = bytearray()
        keys = bytearray()
        start = 0
        for lengths, own in self.kept:
            token_ids = self.token_ids[start : start + sum(lengths)]
            keys += hashlib.sha256(
                array("i", lengths).tobytes() + token_ids.tobytes() + own
            ).digest()
            bounds.extend(
                (len(edges), len(edges) + len(lengths) + 1, len(details), len(details) + len(own))
            )
            edges.extend(accumulate(lengths, initial=start))
            details += own
            start += len(token_ids)
            num_tokens.append(len(token_ids) + (self.documents_per_row - 1) * lengths[0])
            replies = lengths[1 :: self._pieces_a_reply]
            num_labels.append(len(replies) if self.reads_ends else sum(replies))
        return {
            "token_ids_T": np.frombuffer(self.token_ids, dtype=np.int32),
            "edges_E": np.frombuffer(edges, dtype=np.int64),
            "details_C": np.frombuffer(bytes(details), dtype=np.uint8),
            "bounds_N4": np.frombuffer(bounds, dtype=np.int64).reshape(-1, 4)[order_N],
            "num_tokens": np.frombuffer(num_tokens, dtype=np.int64)[order_N],
            "num_label_tokens": np.frombuffer(num_labels, dtype=np.int64)[order_N],
            "keys_N32": np.frombuffer(bytes(keys), dtype=np.uint8).reshape(-1, 32)[order_N],
        }

    def _warnings(self) -> list[str]:
        """Warnings about the rows that are kept."""
        warnings = list(self.chat.warnings)
        if self.num_with_two_ends:
            warnings.append(
                f"{self.chat.template.name} chat template adds an end token behind that of "
                f"{counted(self.num_with_two_ends, 'reply')}, and both are learned: leave it out "
                "of the rows"
            )
        if self.num_with_two_starts:
            warnings.append(
                f"{self.chat.template.name} chat template and "
                f"{counted(self.num_with_two_starts, 'row')} each begin with the bos token, and "
                "it is there twice: leave it out of the rows"
            )
        if self.num_with_more_thoughts:
            warnings.append(
                f"{self.chat.template.name} chat template writes more {END_OF_THOUGHT} than "
                f"{counted(self.num_with_more_thoughts, 'row')} has in its replies, and each is "
                "learned: an empty thought, or a second end of one that the row has"
            )
        if self.num_without_end:
            warnings.append(
                f"{self.chat.template.name} chat template ends "
                f"{counted(self.num_without_end, 'reply')} without an end-of-turn token, so the "
                "model will not learn where a reply stops"
            )
        if unread := [key for key, _ in self.unread.most_common() if key not in self.read_with]:
            keys = ", ".join(map(repr, unread[:_MOST_KEYS]))
            more = f" and {len(unread) - _MOST_KEYS} more" if len(unread) > _MOST_KEYS else ""
            warnings.append(
                f"not read by this run: {keys}{more} of {counted(self.unread[unread[0]], 'row')}"
            )
        warnings += [
            f"{key!r} is read with {flag} only"
            for key, flag in self.read_with.items()
            if key in self.unread
        ]
        if warning := self.cut_warning():
            warnings.append(warning)
        return warnings

    def refusal(self, num_rows: int) -> InputError:
        """The error about the bad rows among `num_rows`."""
        return self.bad.error(num_rows, wanted=self.wanted, columns=self.columns, page=self.page)

    def _nothing_left(self, num_rows: int) -> InputError:
        if self.divider is not None and self.divider.num_others == num_rows:
            return self.divider.refusal()
        if not self.filtered:
            return self.refusal(num_rows)
        counts = ", ".join(
            f"{kind} {count:,}" for kind, count in (self.filtered + self.bad.counts).items()
        )
        return InputError(
            f"no {self.unit} of {counted(num_rows, 'row')} is left at {self.limit()} ({counts}); "
            f"{self.remedy()}.",
            kind="bad_row",
        )


def _count_thoughts(row: Any) -> int:
    """The thoughts that a row has: those that end in its texts, and those that stand apart from
    them.
    """
    if isinstance(row, str):
        return row.count(END_OF_THOUGHT)
    if isinstance(row, Mapping):
        return bool(row.get(REASONING)) + sum(map(_count_thoughts, row.values()))
    return sum(map(_count_thoughts, row)) if isinstance(row, list | tuple) else 0
