"""Folders of token ids that an SFT conversion for OLMo-core wrote: opened, checked, mapped.

For each part such a folder has three files: `token_ids_part_0000.npy`, the ids of all documents end
to end; `labels_mask_part_0000.npy`, a byte for each id, 1 where it is learned; and
`token_ids_part_0000.csv.gz`, a line `start,end` for each document. The arrays are raw: what
`numpy.memmap` writes, without the head of an .npy file.

Legend for array names: T tokens of a part, D documents of a part.
"""

import gzip
import hashlib
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from open_instruct.core.errors import InputError
from open_instruct.core.text import spell_count
from open_instruct.data.files.rows import RawRow, RowSource

TOKEN_IDS = "token_ids_part_"
LABELS_MASK = "labels_mask_part_"
TOKENIZER_FOLDER = "tokenizer"
PARTIAL_FILE = "_tokens.partial.bin"  # which the conversion removes when all is written
HEAD_OF_NPY = b"\x93NUMPY"
DTYPES = (np.uint8, np.uint16, np.uint32, np.uint64)
AGAIN = "convert the rows again"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenPart:
    """One file of token ids, with what belongs to it.

    Attributes:
        path: of the ids, for messages.
        token_ids_T: unsigned, mapped from the file.
        is_learned_T: uint8, mapped: 1 where a token is learned.
        bounds_D2: int64; where each document starts and stops.
        has_more_columns: whether lines say more of a document than its bounds.
    """

    path: Path
    token_ids_T: np.ndarray
    is_learned_T: np.ndarray
    bounds_D2: np.ndarray
    has_more_columns: bool

    @property
    def bounds_path(self) -> Path:
        return self.path.with_suffix(".csv.gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSource(RowSource):
    """The documents of a folder of token files, which are read from its mapped parts alone.

    `tokenizer_folder` is that of the tokenizer which the conversion wrote beside them, if it did.
    """

    parts: tuple[TokenPart, ...]
    tokenizer_folder: Path | None


class JoinedArrays:
    """Arrays that are addressed as if they lay end to end; a slice is within one of them."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.starts = [0, *accumulate(map(len, arrays))]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        index = bisect_right(self.starts, part.start) - 1
        start = self.starts[index]
        return self.arrays[index][part.start - start : part.stop - start]


def list_token_arrays(sources: Sequence[RowSource]) -> list[np.ndarray]:
    """The mapped token ids of all folders of token files among `sources`, in their order."""
    return [
        part.token_ids_T
        for source in sources
        if isinstance(source, TokenSource)
        for part in source.parts
    ]


def is_token_folder(name: str) -> bool:
    """Whether a name is of a folder of token files."""
    path = Path(name).expanduser()
    return path.is_dir() and any(path.glob(f"{TOKEN_IDS}*.npy"))


def open_token_folder(name: str, *, flag: str = "--mixer_list") -> TokenSource:
    """Open a folder of token files; nothing is read but the lines that bound documents.

    Raises:
        InputError: a file is missing, or of another size or form than its part needs.
    """
    folder = Path(name).expanduser()
    where = f"{flag}: {folder}"
    if (folder / PARTIAL_FILE).exists():
        raise InputError(
            f"{where} holds {PARTIAL_FILE}: its conversion did not end; run it again with --resume",
            kind="unreadable_file",
        )
    paths = sorted(folder.glob(f"{TOKEN_IDS}*.npy"))
    parts = tuple(_open_part(path, flag) for path in paths)
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        # The content would be read as a whole at each start; who writes a file changes its time.
        if file.is_file():
            state = file.stat()
            digest.update(f"{file.name}\n{state.st_size}\n{state.st_mtime_ns}\n".encode())
    tokenizer_folder = folder / TOKENIZER_FOLDER

    def read_no_rows(_: Sequence[int]) -> Iterator[RawRow]:
        raise TypeError("documents of token files are read from their parts")

    return TokenSource(
        name=name,
        fingerprint=digest.hexdigest(),
        num_rows=sum(len(part.bounds_D2) for part in parts),
        rows=read_no_rows,
        warnings=lambda: _list_warnings(parts),
        parts=parts,
        tokenizer_folder=tokenizer_folder if tokenizer_folder.is_dir() else None,
    )


def _list_warnings(parts: Sequence[TokenPart]) -> list[str]:
    warnings = []
    for part in parts:
        if part.has_more_columns:
            warnings.append(f"not read: the columns behind start and stop of {part.bounds_path}")
        num_between = len(part.token_ids_T) - int(np.diff(part.bounds_D2).sum())
        if num_between:
            warnings.append(
                f"{spell_count(num_between, 'token')} of {part.path} belong to no document of "
                f"{part.bounds_path.name}"
            )
    return warnings


def _open_part(path: Path, flag: str) -> TokenPart:
    mask_path = path.with_name(path.name.replace(TOKEN_IDS, LABELS_MASK))
    bounds_path = path.with_suffix(".csv.gz")
    for file, content in ((mask_path, "what is learned"), (bounds_path, "where documents end")):
        if not file.is_file():
            raise InputError(
                f"{flag}: {file}: no such file; it says {content} of {path.name}: fetch the whole "
                f"folder, or {AGAIN}",
                kind="missing_file",
            )
    for file in (path, mask_path):
        with file.open("rb") as opened:
            if opened.read(len(HEAD_OF_NPY)) == HEAD_OF_NPY:
                raise InputError(
                    f"{flag}: {file} has the head of an .npy file, and OLMo-core's have none: "
                    "write it by `array.tofile`",
                    kind="unreadable_file",
                )
    num_tokens = mask_path.stat().st_size
    dtype = _find_dtype(path, num_tokens, flag)
    if num_tokens == 0:
        token_ids_T = np.empty(0, dtype=dtype)
        is_learned_T = np.empty(0, dtype=np.uint8)
    else:
        token_ids_T = np.memmap(path, mode="r", dtype=dtype)
        is_learned_T = np.memmap(mask_path, mode="r", dtype=np.uint8)
    bounds_D2, has_more_columns = _read_bounds(bounds_path, num_tokens, flag)
    return TokenPart(
        path=path,
        token_ids_T=token_ids_T,
        is_learned_T=is_learned_T,
        bounds_D2=bounds_D2,
        has_more_columns=has_more_columns,
    )


def _find_dtype(path: Path, num_tokens: int, flag: str) -> type[np.unsignedinteger]:
    """The dtype that makes as many ids of a file as its mask has labels.

    :raises InputError: there is none.
    """
    num_bytes = path.stat().st_size
    for dtype in DTYPES:
        if num_bytes == num_tokens * np.dtype(dtype).itemsize:
            return dtype
    raise InputError(
        f"{flag}: {path} has {num_bytes:,} bytes, and its labels mask has {num_tokens:,} labels, "
        f"for which ids of 1, 2, 4 or 8 bytes are needed: fetch both files again, or {AGAIN}",
        kind="conflict",
    )


def find_smallest_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest unsigned dtype that holds the ids of a vocabulary."""
    return next(dtype for dtype in DTYPES if vocab_size - 1 <= np.iinfo(dtype).max)


def _read_bounds(path: Path, num_tokens: int, flag: str) -> tuple[np.ndarray, bool]:
    """The first two columns of each line, `start,end`, and whether there are more.

    Raises:
        InputError: they are not ranges of the part's tokens, one behind the other.
    """
    bounds: list[tuple[int, int]] = []
    has_more_columns = False
    last_stop = 0
    try:
        with gzip.open(path, mode="rt", encoding="ascii") as file:
            for line in file:
                start_text, stop_text, *others = line.split(",")
                has_more_columns |= bool(others)
                start = int(start_text)
                stop = int(stop_text)
                if not last_stop <= start < stop <= num_tokens:
                    raise ValueError(line)
                bounds.append((start, stop))
                last_stop = stop
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{flag}: {path} cannot be read: {error}", kind="unreadable_file"
        ) from None
    except ValueError:
        raise InputError(
            f"{flag}: {path}, line {len(bounds) + 1}: not `start,end` of a document behind the one "
            f"before it, within {num_tokens:,} tokens: fetch it again, or {AGAIN}",
            kind="bad_row",
        ) from None
    return np.array(bounds, dtype=np.int64).reshape(-1, 2), has_more_columns
