"""Data sets of token ids as flat arrays, built once and then mapped from the cache.

Legend for array names: N rows of the data set, T tokens, E edges between pieces, D documents of a
row, C bytes.
"""

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from open_instruct.core.errors import InputError, RunError
from open_instruct.core.records import Document, Span
from open_instruct.data.chat import ChatFormat
from open_instruct.data.eval_split import Side
from open_instruct.data.mixer import MixerEntry
from open_instruct.data.report import DataReport
from open_instruct.data.row_builder import RowBuilder

log = logging.getLogger(__name__)

# Part of the cache key: raise it when the code makes other arrays of the same rows, or reports them
# otherwise.
CACHE_VERSION = 12
# All metadata of a file is one JSON text: safetensors writes several entries in no fixed order, and
# equal arrays should be equal bytes.
_METADATA = "open_instruct"
_CHECKSUM = "sha256"


@dataclass(eq=False, kw_only=True)
class TokenDataset:
    """Tokenised rows in mixture order, as arrays that can be mapped from a file. Repeated rows
    share their tokens.

    A row is a run of pieces. In a row with one document, context and learned pieces alternate. In a
    row with several documents (D) the first piece is their common prompt, and each further piece is
    one reply to it.

    Attributes:
        token_ids_T: int32; the pieces of every distinct row.
        edges_E: int64; for each distinct row, where its pieces start in `token_ids_T`, and where
            the last one stops.
        details_C: uint8; the details of each distinct row, kept beside its tokens.
        bounds_N4: int64; where row n's edges start and stop in `edges_E`, and its details in
            `details_C`.
        num_tokens: int64 (N,); tokens that the documents of each row have.
        num_label_tokens: int64 (N,); the learned ones among them.
        prompt_lengths: int64 (N,); tokens of each row's first piece.
        keys_N32: uint8; sha256 of each row: its token ids, the edges of its pieces, its details.
    """

    token_ids_T: np.ndarray
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
        start, *edges = self.edges_E[first:stop].tolist()
        token_ids = tuple(self.token_ids_T[start : edges[-1]].tolist())
        edges = [edge - start for edge in edges]
        if self.documents_per_row == 1:
            spans = zip(edges[::2], edges[1::2], strict=False)
            responses = tuple(Span(start=a, stop=b) for a, b in spans)
            return (Document(token_ids=token_ids, responses=responses, reads_ends=self.reads_ends),)
        prompt = token_ids[: edges[0]]
        return tuple(
            Document(
                token_ids=prompt + token_ids[reply_start:reply_stop],
                responses=(Span(start=len(prompt), stop=len(prompt) + reply_stop - reply_start),),
                reads_ends=self.reads_ends,
            )
            for reply_start, reply_stop in pairwise(edges)
        )

    def num_common_tokens(self, index: int) -> int:
        """The tokens that all documents of row `index` begin with: their prompt, and what all
        replies begin with.
        """
        first, stop = self.bounds_N4[index, :2].tolist()
        (prompt_start, prompt_stop), *replies = pairwise(self.edges_E[first:stop].tolist())
        shortest = min(stop - start for start, stop in replies)
        one, *others = (self.token_ids_T[start : start + shortest] for start, _ in replies)
        is_common = np.all([one == other for other in others], axis=0)
        return prompt_stop - prompt_start + int(np.cumprod(is_common).sum())

    def label_lengths(self) -> np.ndarray:
        """The number of learned tokens of each document: int64 (N, D).

        Not for rows of which only the ends are read.
        """
        assert not self.reads_ends
        if self.documents_per_row == 1:
            return self.num_label_tokens[:, None]
        first_N = self.bounds_N4[:, 0]
        edges = [
            self.edges_E[first_N + 1 + document] for document in range(self.documents_per_row + 1)
        ]
        return np.diff(np.stack(edges, axis=1), axis=1)

    def values(self, index: int) -> np.ndarray:
        """The numbers of row `index` for the loss, float32; most forms of rows have none."""
        return np.frombuffer(self.details(index), dtype=np.float32)

    def details(self, index: int) -> bytes:
        """The bytes kept beside the tokens of row `index`."""
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
    builder_of: Callable[..., RowBuilder],
    *,
    entries: Sequence[MixerEntry],
    chat: ChatFormat,
    on_bad_row: Literal["error", "skip"],
    seed: int,
    cache_dir: str | Path | None,
    columns: Sequence[str] = (),
    side: Side | None = None,
    facts: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **own: Any,
) -> tuple[TokenDataset, DataReport]:
    """The tokenised mixture, from the cache where the same mixture was built before.

    `side` is that of `--eval_split` whose rows are wanted, None without that. `columns` are words
    such as `messages=conversations`: the key of a row, and the column that has it. `builder_of` is
    the class that builds the rows; `own` are its arguments, such as `max_seq_length`, as JSON;
    `facts` are other values that the arrays depend on, as JSON. Ranks are not coordinated here: one
    rank calls it first, then, past a barrier, the others, which find the file. `on_progress(done,
    total)` counts distinct rows while they are tokenised.

    Raises:
        InputError: see `open_rows`; a row is malformed and `on_bad_row` is "error"; or nothing is
            left.
        RunError: the disk is full.
    """
    builder = builder_of(chat, on_bad_row=on_bad_row, **own)
    sources = [entry.open(columns) for entry in entries]
    identity = {
        "version": CACHE_VERSION,
        "form": type(builder).__name__,
        "mixture": [
            (source.fingerprint, source.name, entry.split, repr(entry.amount))
            for source, entry in zip(sources, entries, strict=True)
        ],
        "columns": sorted(columns),
        "chat": chat.fingerprint,
        "on_bad_row": on_bad_row,
        "seed": seed,
        "own": {**own, **(facts or {})},
    }
    if side is not None:
        identity["side"] = asdict(side)
    digest = hashlib.sha256(
        json.dumps(identity, sort_keys=True).encode("utf-8", "surrogatepass")
    ).hexdigest()
    path = cache_root(cache_dir) / f"{builder.unit}s" / f"{digest[:32]}.safetensors"
    kept = _kept(path)
    if kept is None:
        arrays, report = builder.build(
            entries, sources, seed=seed, side=side, on_progress=on_progress
        )
        write_arrays(path, arrays, {"report": asdict(report)})
    else:
        arrays, report = kept
    dataset = TokenDataset(
        documents_per_row=builder.documents_per_row, reads_ends=builder.reads_ends, **arrays
    )
    return dataset, replace(report, cache_file=str(path))


def _kept(path: Path) -> tuple[dict[str, np.ndarray], DataReport] | None:
    """The arrays in the file `path` and their report;

    None if it is not there, damaged or of another version.
    """
    try:
        arrays, metadata = read_arrays(path)
        return arrays, replace(DataReport(**metadata["report"]), from_cache=True)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        log.warning("%s: %s; building it again", path, error)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFact:
    """Something that a saved place in the data depends on, and how a run that differs in it is
    refused.

    Example: `PlaceFact(key="seed", value=3, flag="seed", problem="--seed was 1, is 3", remedy="give
    --seed 1")`.
    """

    key: str
    """Its name in the saved place."""
    value: Any
    """What it is in this run."""
    flag: str
    problem: str
    remedy: str


def rows_fact(
    fingerprint: str, *, key: str = "data_fingerprint", flag: str, limit: str
) -> PlaceFact:
    """The fact that the rows of a mixer list are those of the checkpoint;

    `limit` is the flag that cuts them.
    """
    return PlaceFact(
        key=key,
        value=fingerprint,
        flag=flag,
        problem=(
            f"the rows of --{flag}, as they are tokenised, are not those that the checkpoint was "
            "written with"
        ),
        remedy=f"give the same rows, template and {limit}",
    )


def seed_fact(saved: Mapping[str, Any], seed: int) -> PlaceFact:
    """The fact that rows come in the checkpoint's order."""
    before = saved.get("seed")
    return PlaceFact(
        key="seed",
        value=seed,
        flag="seed",
        problem=f"the checkpoint was written with --seed {before}, this run has {seed}",
        remedy=f"give --seed {before}",
    )


def check_saved_place(saved: Mapping[str, Any], *facts: PlaceFact) -> None:
    """Refuse a saved place that would mean other rows in this run.

    Args:
        saved: the place, from the checkpoint; a fact that it lacks, as one of an older version may,
            is passed over.
        facts: what the place depends on.

    Raises:
        InputError: a fact differs; the message is of the first.
    """
    for fact in facts:
        if saved.get(fact.key, fact.value) != fact.value:
            remedy = (
                f"{fact.remedy}, or start afresh with another --output_dir or "
                "--overwrite_output_dir"
            )
            raise InputError(
                f"{fact.problem}: {remedy}", kind="other_run", flag=fact.flag, remedy=remedy
            )


def cache_root(cache_dir: str | Path | None) -> Path:
    """The folder of all cached data: the one given, else $OPEN_INSTRUCT_CACHE, else
    ~/.cache/open_instruct.
    """
    return Path(
        cache_dir or os.environ.get("OPEN_INSTRUCT_CACHE") or "~/.cache/open_instruct"
    ).expanduser()


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Writes beside `path` and renames, so that a reader, or a crash, never meets half a file.
    `metadata` is of JSON.

    Raises:
        InputError: the folder cannot be made or written to.
        RunError: the disk is full.
    """
    from safetensors.numpy import save_file

    partial = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except OSError as error:
        raise InputError(
            f"--cache_dir: cannot write to {path.parent}: {error}; give another folder.",
            kind="unreadable_file",
        ) from error
    try:
        content = json.dumps({**metadata, _CHECKSUM: _checksum(arrays)})
        save_file(dict(arrays), partial, metadata={_METADATA: content})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except Exception as error:
        raise RunError(
            f"writing {path} failed: {error}; free some space, or give another --cache_dir."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and metadata as written; the arrays are read-only views of the mapped file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is cut short, or its content is not what was written.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:  # numpy's would read all of it into memory
            metadata: dict[str, Any] = json.loads(file.metadata()[_METADATA])
            arrays: dict[str, np.ndarray] = {
                name: file.get_tensor(name).numpy() for name in file.offset_keys()
            }
        for array in arrays.values():
            array.flags.writeable = False
        if metadata.pop(_CHECKSUM) != _checksum(arrays):
            raise ValueError("its checksum does not match")
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return arrays, metadata


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()
