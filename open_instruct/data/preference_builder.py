"""From raw rows to flat arrays of tokenised pairs: check, render, tokenise, cut, count.

Legend for array names: N pairs of the data set, T tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from open_instruct.data.chat import ChatFormat
from open_instruct.data.mixer import MixerEntry, select_rows
from open_instruct.data.preference_rows import PreferencePair, parse_preference_row
from open_instruct.data.report import BadRowLog, DataReport
from open_instruct.data.rows import BadRow, MalformedRow, RawRow, RowSource
from open_instruct.errors import InputError

_PAIRS_AT_ONCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class _RenderedPair:
    index: int  # of the row among the distinct rows of its source
    row: RawRow
    pair: PreferencePair
    texts: tuple[str, str, str]  # prompt, chosen reply, rejected reply


class PreferenceBuilder:
    """Gathers the distinct pairs of all sources, then repeats them as the mixture says."""

    def __init__(self, chat: ChatFormat, *, max_seq_length: int, on_bad_row: str) -> None:
        self.chat = chat
        self.max_seq_length = max_seq_length
        self.on_bad_row = on_bad_row
        self.token_ids = array("i")
        self.bounds: list[tuple[int, int, int, int]] = []
        self.keys = bytearray()
        self.bad = BadRowLog()
        self.filtered: Counter[str] = Counter()
        self.num_truncated = 0
        self.num_without_end = 0
        self.shortest_prompt: int | None = None

    def build(
        self,
        entries: Sequence[MixerEntry],
        sources: Sequence[RowSource],
        *,
        seed: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> tuple[dict[str, np.ndarray], DataReport]:
        """All sources in turn, into the arrays that `PreferenceDataset` is made of.

        Raises:
            InputError: a row is malformed and `on_bad_row` is "error", or no pair is left.
        """
        selected = [select_rows(entry, len(source), seed) for entry, source in zip(entries, sources, strict=True)]
        distinct = [np.unique(indices) for indices in selected]
        num_rows = sum(map(len, distinct))
        pair_of_N: list[np.ndarray] = []
        num_done = 0
        for source, indices, rows in zip(sources, selected, distinct, strict=True):
            pair_of_row = np.full(len(rows), -1, dtype=np.int64)
            stream = enumerate(source.rows(rows.tolist()))
            while chunk := list(islice(stream, _PAIRS_AT_ONCE)):
                for index, pair in self._add(chunk):
                    pair_of_row[index] = pair
                num_done += len(chunk)
                if on_progress is not None:
                    on_progress(num_done, num_rows)
            pairs = pair_of_row[np.searchsorted(rows, indices)]
            pair_of_N.append(pairs[pairs >= 0])
        if self.bad.counts and self.on_bad_row == "error":
            raise self.bad.error(num_rows)
        if not self.bounds:
            raise self._nothing_left(num_rows)

        order_N = np.concatenate(pair_of_N)
        bounds_N4 = np.array(self.bounds, dtype=np.int64)[order_N]
        arrays = {
            "token_ids_T": np.frombuffer(self.token_ids, dtype=np.int32),
            "bounds_N4": bounds_N4,
            "keys_N32": np.frombuffer(bytes(self.keys), dtype=np.uint8).reshape(-1, 32)[order_N],
        }
        warnings = [entry.warning for entry in entries if entry.warning]
        if self.num_without_end:
            warnings.append(
                f"{self.chat.template.name} chat template ends {self.num_without_end:,} replies without an "
                "end-of-turn token, so the model will not learn where a reply stops"
            )
        return arrays, DataReport(
            sources=tuple(
                (source.name, len(source), len(indices)) for source, indices in zip(sources, selected, strict=True)
            ),
            num_rows=num_rows,
            bad=dict(self.bad.counts),
            bad_rows=tuple(map(str, self.bad.first)),
            filtered=dict(self.filtered),
            num_truncated=self.num_truncated,
            num_kept=len(self.bounds),
            num_pairs=len(order_N),
            # The prompt is kept once for both conversations of a pair.
            num_tokens=int((bounds_N4[:, 3] + bounds_N4[:, 1] - 2 * bounds_N4[:, 0]).sum()),
            warnings=tuple(warnings),
        )

    def _add(self, rows: Sequence[tuple[int, RawRow | BadRow]]) -> Iterator[tuple[int, int]]:
        """Takes rows in; yields (index of the row, index of its pair) of those that stay."""
        rendered = [result for index, row in rows if (result := self._render(index, row)) is not None]
        if not rendered or (self.bad.counts and self.on_bad_row == "error"):
            return  # after a bad row the rest is read only to say how many there are
        ids = self.chat.tokenize([text for item in rendered for text in item.texts])
        for i, item in enumerate(rendered):
            prompt, chosen, rejected = ids[3 * i : 3 * i + 3]
            try:
                self.chat.check_reply(item.pair.chosen, chosen)
                self.chat.check_reply(item.pair.rejected, rejected)
            except MalformedRow as error:
                self._add_bad(item.row, error)
                continue
            self.num_without_end += sum(not self.chat.ends_turn(text) for text in item.texts[1:])
            if self._append(prompt, chosen, rejected):
                yield item.index, len(self.bounds) - 1

    def _render(self, index: int, row: RawRow | BadRow) -> _RenderedPair | None:
        if isinstance(row, BadRow):
            self.bad.add(row)
            return None
        try:
            pair = parse_preference_row(row.value)
            prompt, (chosen, rejected) = self.chat.render(pair.prompt, (pair.chosen, pair.rejected))
        except MalformedRow as error:
            self._add_bad(row, error)
            return None
        return _RenderedPair(index=index, row=row, pair=pair, texts=(prompt, chosen, rejected))

    def _add_bad(self, row: RawRow, error: MalformedRow) -> None:
        self.bad.add(BadRow(file=row.file, line=row.line, kind=error.kind, reason=error.reason))

    def _append(self, prompt: list[int], chosen: list[int], rejected: list[int]) -> bool:
        """Cuts the replies on the right and keeps the pair, or counts why not."""
        self.shortest_prompt = min(len(prompt), self.shortest_prompt or len(prompt))
        room = self.max_seq_length - len(prompt)
        if room <= 0:
            self.filtered["prompt_too_long"] += 1
            return False
        was_cut = len(chosen) > room or len(rejected) > room
        chosen, rejected = chosen[:room], rejected[:room]
        if chosen == rejected:
            self.filtered["same_tokens"] += 1
            return False
        self.num_truncated += was_cut
        start = len(self.token_ids)
        tokens = array("i", [*prompt, *chosen, *rejected])
        self.token_ids.extend(tokens)
        stops = start + len(prompt), start + len(prompt) + len(chosen), start + len(tokens)
        self.bounds.append((start, *stops))
        lengths = array("i", [len(prompt), len(chosen), len(rejected)])
        self.keys += hashlib.sha256(lengths.tobytes() + tokens.tobytes()).digest()
        return True

    def _nothing_left(self, num_rows: int) -> InputError:
        if not self.filtered:
            return self.bad.error(num_rows)
        shortest = self.shortest_prompt or 0
        remedy = (
            f"raise --max_seq_length: the shortest prompt alone has {shortest:,} tokens"
            if shortest >= self.max_seq_length
            else "raise --max_seq_length, so that the replies reach the place where they differ"
        )
        counts = ", ".join(f"{kind} {count:,}" for kind, count in (self.filtered + self.bad.counts).items())
        return InputError(
            f"no preference pair of {num_rows:,} rows is left at --max_seq_length {self.max_seq_length} "
            f"({counts}); {remedy}."
        )
