"""A data set of token ids as flat arrays, built once and then mapped from the cache.

Legend for array names: N rows of the data set, T tokens, E edges between pieces, D documents of a
row, C bytes.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from open_instruct.core.records import Document, Span
from open_instruct.data.chat import ChatFormat
from open_instruct.data.eval_split import Side
from open_instruct.data.files.array_file import find_cache_folder, read_arrays, write_arrays
from open_instruct.data.files.rows import RowSource
from open_instruct.data.files.token_files import JoinedArrays, list_token_arrays
from open_instruct.data.mixer import MixerEntry
from open_instruct.data.report import DataReport, ReportProgress
from open_instruct.data.row_builder import RowBuilder

log = logging.getLogger(__name__)

# Part of the cache key: raise it when the code makes other arrays of the same rows, or reports them
# otherwise.
CACHE_VERSION = 12


@dataclass(eq=False, kw_only=True)
class TokenDataset:
    """Tokenised rows in mixture order, as arrays that can be mapped from a file.

    Repeated rows share their tokens. A row is a run of pieces. In a row with one document, context
    and learned pieces alternate. In a row with several documents (D) the first piece is their
    common prompt, and each further piece is one reply to it.

    Attributes:
        token_ids_T: int32; the pieces of every distinct row. Or files of token ids that are mapped
            as they are, with an array of the tokens of other rows behind them.
        edges_E: int64; for each distinct row, where its pieces start in `token_ids_T`, and where
            the last one stops.
        details_C: uint8; the details of each distinct row, stored beside its tokens.
        bounds_N4: int64; where row n's edges start and stop in `edges_E`, and its details in
            `details_C`.
        num_tokens: int64 (N,); tokens that the documents of each row have.
        num_label_tokens: int64 (N,); the learned ones among them.
        prompt_lengths: int64 (N,); tokens of each row's first piece.
        keys_N32: uint8; sha256 of each row: its token ids, the edges of its pieces, its details.
    """

    token_ids_T: np.ndarray | JoinedArrays
    edges_E: np.ndarray
    details_C: np.ndarray
    bounds_N4: np.ndarray
    num_tokens: np.ndarray
    num_label_tokens: np.ndarray
    keys_N32: np.ndarray
    documents_per_row: int
    reads_ends: bool = False

    def __post_init__(self) -> None:
        assert self.keys_N32.shape == (len(self.bounds_N4), 32)
        first_N = self.bounds_N4[:, 0]
        self.prompt_lengths = self.edges_E[first_N + 1] - self.edges_E[first_N]

    def __len__(self) -> int:
        return len(self.keys_N32)

    def __getitem__(self, index: int) -> tuple[Document, ...]:
        """The documents of a row: one, or the prompt with each of its replies."""
        first, stop = self.bounds_N4[range(len(self))[index], :2].tolist()
        row_start, *edges = self.edges_E[first:stop].tolist()
        token_ids = tuple(self.token_ids_T[row_start : edges[-1]].tolist())
        edges = [edge - row_start for edge in edges]
        if self.documents_per_row == 1:
            # The row of a prompt has no reply.
            responses = zip(edges[::2], edges[1::2], strict=False)
            return (self._build_document(token_ids, responses),)
        prompt = token_ids[: edges[0]]
        documents = []
        for start, stop in pairwise(edges):
            reply = token_ids[start:stop]
            response = (len(prompt), len(prompt) + len(reply))
            documents.append(self._build_document(prompt + reply, [response]))
        return tuple(documents)

    def _build_document(
        self, token_ids: tuple[int, ...], responses: Iterable[tuple[int, int]]
    ) -> Document:
        spans = tuple(Span(start=start, stop=stop) for start, stop in responses)
        return Document(token_ids=token_ids, responses=spans, reads_ends=self.reads_ends)

    def num_common_tokens(self, index: int) -> int:
        """The tokens that all documents of row `index` begin with.

        They are the prompt's, and those that all replies begin with.
        """
        first, stop = self.bounds_N4[index, :2].tolist()
        (prompt_start, prompt_stop), *replies = pairwise(self.edges_E[first:stop].tolist())
        shortest = min(stop - start for start, stop in replies)
        first_reply, *others = (self.token_ids_T[start : start + shortest] for start, _ in replies)
        is_common = np.all([first_reply == other for other in others], axis=0)
        return prompt_stop - prompt_start + int(np.cumprod(is_common).sum())

    def find_largest_id(self) -> int:
        """The largest token id, for which all tokens are read."""
        if isinstance(self.token_ids_T, JoinedArrays):
            return max(int(array.max(initial=0)) for array in self.token_ids_T.arrays)
        return int(self.token_ids_T.max(initial=0))

    def label_lengths(self) -> np.ndarray:
        """The number of learned tokens of each document: int64 (N, D).

        Not for rows of which only the ends are read.
        """
        assert not self.reads_ends
        if self.documents_per_row == 1:
            return self.num_label_tokens[:, None]
        first_N = self.bounds_N4[:, 0]
        num_edges = self.documents_per_row + 1
        edges = [self.edges_E[first_N + 1 + number] for number in range(num_edges)]
        return np.diff(np.stack(edges, axis=1), axis=1)

    def values(self, index: int) -> np.ndarray:
        """The numbers of row `index` for the loss, float32; most forms of rows have none."""
        return np.frombuffer(self.details(index), dtype=np.float32)

    def details(self, index: int) -> bytes:
        """The bytes stored beside the tokens of row `index`."""
        start, stop = self.bounds_N4[index, 2:].tolist()
        return self.details_C[start:stop].tobytes()

    def key(self, index: int) -> str:
        """Hex hash of row `index`: equal rows, and only they, share it."""
        return self.keys_N32[index].tobytes().hex()

    @property
    def fingerprint(self) -> str:
        """Hash of all keys in their order."""
        return hashlib.sha256(np.ascontiguousarray(self.keys_N32).data).hexdigest()


def load_token_dataset(
    make_builder: Callable[..., RowBuilder],
    *,
    entries: Sequence[MixerEntry],
    chat: ChatFormat,
    on_bad_row: Literal["error", "skip", "trim"],
    seed: int,
    cache_dir: str | Path | None,
    columns: Sequence[str] = (),
    side: Side | None = None,
    facts: Mapping[str, Any] | None = None,
    on_progress: ReportProgress | None = None,
    **builder_arguments: Any,
) -> tuple[TokenDataset, DataReport]:
    """The tokenised mixture, from the cache where the same mixture was built before.

    Ranks are not coordinated here: one rank calls it first, then, past a barrier, the others, which
    find the file.

    Args:
        make_builder: the class that builds the rows.
        columns: words such as `messages=conversations`: the key of a row, and the column that has
            it.
        side: of `--eval_split`, whose rows are wanted; None without that flag.
        facts: other values that the arrays depend on, as JSON.
        builder_arguments: of `make_builder`, such as `max_seq_length`, as JSON.

    Raises:
        InputError: see `open_rows`; a row is malformed and `on_bad_row` is "error"; or nothing is
            left.
        RunError: the disk is full.
    """
    builder = make_builder(chat, on_bad_row=on_bad_row, **builder_arguments)
    sources = [entry.open(columns) for entry in entries]
    identity = {
        "version": CACHE_VERSION,
        "form": type(builder).__name__,
        "mixture": _list_mixture(entries, sources),
        "columns": sorted(columns),
        "chat": chat.fingerprint,
        "on_bad_row": on_bad_row,
        "seed": seed,
        "own": {**builder_arguments, **(facts or {})},
    }
    if side is not None:
        identity["side"] = asdict(side)
    text = json.dumps(identity, sort_keys=True)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    folder = find_cache_folder(cache_dir) / f"{builder.unit}s"
    path = folder / f"{digest[:32]}.safetensors"
    cache_entry = _read_cached(path)
    if cache_entry is None:
        cache_entry = builder.build(entries, sources, seed=seed, side=side, on_progress=on_progress)
        write_arrays(path, cache_entry[0], {"report": asdict(cache_entry[1])})
    arrays, report = cache_entry
    dataset = make_token_dataset(builder, arrays, sources)
    return dataset, replace(report, cache_file=str(path))


def make_token_dataset(
    builder: RowBuilder, arrays: Mapping[str, np.ndarray], sources: Sequence[RowSource]
) -> TokenDataset:
    """The data set of the arrays that `builder` has made of `sources`, whose files it maps."""
    others = dict(arrays)
    token_ids_T: np.ndarray | JoinedArrays = others.pop("token_ids_T")
    mapped = list_token_arrays(sources)
    if mapped:
        token_ids_T = JoinedArrays([*mapped, arrays["token_ids_T"]])
    return TokenDataset(
        token_ids_T=token_ids_T,
        documents_per_row=builder.documents_per_row,
        reads_ends=builder.reads_ends,
        **others,
    )


def _list_mixture(
    entries: Sequence[MixerEntry], sources: Sequence[RowSource]
) -> list[tuple[str, ...]]:
    return [
        (source.fingerprint, source.name, entry.split, repr(entry.amount))
        for source, entry in zip(sources, entries, strict=True)
    ]


def _read_cached(path: Path) -> tuple[dict[str, np.ndarray], DataReport] | None:
    """The arrays in a file and their report; None if it is missing, damaged or out of date."""
    try:
        arrays, metadata = read_arrays(path)
        return arrays, replace(DataReport(**metadata["report"]), from_cache=True)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        log.warning("%s: %s; building it again", path, error)
        return None
