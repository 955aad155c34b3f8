"""Reads the documents of token files: their bounds are those of the files, their labels the mask's.

Nothing is tokenised, and no token is copied: a data set keeps where the pieces of each document lie
in the mapped files.

Legend for array names: T tokens of a document, E edges between its pieces.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from open_instruct.core.errors import InputError
from open_instruct.core.text import spell_count
from open_instruct.data.chat import ChatFormat
from open_instruct.data.eval_split import SideFilter
from open_instruct.data.files.rows import RowSource
from open_instruct.data.files.token_files import (
    AGAIN,
    JoinedArrays,
    TokenPart,
    TokenSource,
    find_smallest_dtype,
)
from open_instruct.data.row_counts import RowCounts
from open_instruct.data.row_store import NOT_KEPT, ON_OTHER_SIDE, RowStore
from open_instruct.data.tokenizer import load_tokenizer

REMEDY = f"give the tokenizer that it was converted with by --tokenizer_name_or_path, or {AGAIN}"


class DocumentReader:
    """Puts the documents of token files into a store.

    Args:
        chat: of the run, whose tokenizer must be that of the files.
        store: where the documents go.
        counts: of what is cut or left out.
        side_filter: of `--eval_split`.
        max_seq_length: further tokens of a document are cut off.
    """

    def __init__(
        self,
        chat: ChatFormat,
        store: RowStore,
        counts: RowCounts,
        side_filter: SideFilter | None,
        *,
        max_seq_length: int,
    ) -> None:
        self.store = store
        self.counts = counts
        self.side_filter = side_filter
        self.max_seq_length = max_seq_length
        self.tokenizer = chat.tokenizer
        self.turn_ends = chat.turn_end_token_ids()

    def read(self, source: TokenSource, rows: Sequence[int]) -> Iterator[int]:
        """Store the documents of ascending `rows`; gives the number of each among the stored rows.

        :raises InputError: the files were made with another tokenizer, or contradict each other.
        """
        self._check_tokenizer(source)
        wanted_rows = iter(rows)
        row = next(wanted_rows, None)
        first_row = 0
        for part in source.parts:
            file_start = len(self.store.mapped)
            self.store.mapped = JoinedArrays([*self.store.mapped.arrays, part.token_ids_T])
            while row is not None and row < first_row + len(part.bounds_D2):
                start, stop = part.bounds_D2[row - first_row].tolist()
                yield self._store(part, start, stop, file_start)
                row = next(wanted_rows, None)
            first_row += len(part.bounds_D2)

    def _store(self, part: TokenPart, start: int, stop: int, file_start: int) -> int:
        token_ids_T = part.token_ids_T[start:stop]
        edges_E = self._find_edges(part, start, stop)
        self._check_ids(part, start, token_ids_T)
        if self.side_filter is not None:
            content = hashlib.sha256(token_ids_T.astype(np.int32).tobytes()).hexdigest()
            if not self.side_filter.accepts(content):
                return ON_OTHER_SIDE
        if len(edges_E) == 0:
            self.counts.filtered["nothing_learned"] += 1
            return NOT_KEPT
        first_edge = int(edges_E[0])
        self.counts.shortest_prompt = min(first_edge, self.counts.shortest_prompt or first_edge)
        if first_edge >= self.max_seq_length:
            self.counts.filtered["prompt_too_long"] += 1
            return NOT_KEPT
        last_ids = token_ids_T[edges_E[1::2] - 1]
        self.counts.num_parts_without_end += int((~np.isin(last_ids, self.turn_ends)).sum())
        self.counts.num_truncated += int(edges_E[-1]) > self.max_seq_length
        # Without the context behind the last learned part.
        starts_E = edges_E[0::2]
        num_edges = 2 * int((starts_E < self.max_seq_length).sum())
        edges_E = np.minimum(edges_E[:num_edges], self.max_seq_length)
        lengths = np.diff(edges_E, prepend=0).tolist()
        self.store.add_mapped(file_start + start, lengths)
        return len(self.store) - 1

    def _find_edges(self, part: TokenPart, start: int, stop: int) -> np.ndarray:
        """Where context and learned tokens change over, from the document's first token on.

        The first token is context, whatever the mask says: nothing before it predicts it.
        """
        is_learned_T = np.array(part.is_learned_T[start:stop])
        if is_learned_T.max() > 1:
            raise InputError(
                f"the labels mask of {part.path} has {is_learned_T.max()} for a token, where 0 and "
                f"1 are all that it may have: fetch it again, or {AGAIN}",
                kind="bad_row",
            )
        is_learned_T[0] = 0
        edges_E = np.flatnonzero(np.diff(is_learned_T)) + 1
        if len(edges_E) % 2:
            edges_E = np.append(edges_E, stop - start)
        return edges_E

    def _check_ids(self, part: TokenPart, start: int, token_ids_T: np.ndarray) -> None:
        place = int(token_ids_T.argmax())
        if token_ids_T[place] >= len(self.tokenizer):
            raise InputError(
                f"{part.path}: id {token_ids_T[place]} at token {start + place}, and the tokenizer "
                f"has {spell_count(len(self.tokenizer), 'token')}: {REMEDY}",
                kind="conflict",
            )

    def _check_tokenizer(self, source: TokenSource) -> None:
        # Writers choose the dtype by the vocabulary without, or with, the tokens that were added.
        names = [
            np.dtype(find_smallest_dtype(size)).name
            for size in (self.tokenizer.vocab_size, len(self.tokenizer))
        ]
        for part in source.parts:
            if part.token_ids_T.dtype.name not in names and len(part.token_ids_T):
                raise InputError(
                    f"{part.path} has ids of {part.token_ids_T.dtype.name}, and those of this "
                    f"tokenizer are written as {names[-1]}: {REMEDY}",
                    kind="conflict",
                )
        if source.tokenizer_folder is None:
            return
        other = load_tokenizer(str(source.tokenizer_folder), flag=source.name)
        vocabulary = self.tokenizer.get_vocab()
        for token, token_id in sorted(other.get_vocab().items(), key=lambda item: item[1]):
            if vocabulary.get(token) != token_id:
                here = f"the id {vocabulary[token]}" if token in vocabulary else "no such token"
                raise InputError(
                    f"{source.tokenizer_folder}, the tokenizer of {source.name}, has the token "
                    f"{token!r} with the id {token_id}, and that of this run {here}: give that "
                    "folder by --tokenizer_name_or_path",
                    kind="conflict",
                    flag="tokenizer_name_or_path",
                )


def refuse_token_files(sources: Sequence[RowSource], problem: str) -> None:
    """:raises InputError: a source is of token files, which are refused for a `problem`."""
    for source in sources:
        if isinstance(source, TokenSource):
            raise InputError(
                f"{source.name} is a folder of token files: {problem}", kind="conflict"
            )
