"""Open rows by a name: of a local file, a folder of files, or a data set of the hub."""

import hashlib
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from open_instruct.core.errors import InputError
from open_instruct.core.files import near_files
from open_instruct.data.files.arrow_values import build_row_conversion
from open_instruct.data.files.first_bytes import refuse_list_of_rows, refuse_other_kinds
from open_instruct.data.files.rows import (
    RawRow,
    RowSource,
    is_json_lines,
    open_json_lines,
    open_json_list,
)
from open_instruct.data.files.tables import open_column_file, open_text_table
from open_instruct.data.files.token_files import is_token_folder

JSON_SUFFIXES = (".json", ".json.gz")
SUFFIXES = (
    *(".jsonl", ".jsonl.gz", *JSON_SUFFIXES),
    *(".csv", ".csv.gz", ".tsv", ".parquet", ".arrow"),
)
# Endings that no data set on the hub has. A dot alone decides nothing: names such as llama-3.1-tulu
# have one.
_FILE_ENDING = re.compile(
    r"\.(jsonl?|ndjson|csv|tsv|parquet|arrow|feather|txt|md|xlsx?|ya?ml|html|pkl|pickle|pt|npy|sqlite|db)"
    r"(\.(gz|zst|bz2|xz|zip))?$|\.(gz|zst|bz2|xz|zip|tar|tgz)$",
    re.IGNORECASE,
)
# Files that `save_to_disk` of the datasets library writes into a folder.
_SAVED_TO_DISK = ("state.json", "dataset_dict.json")
# Words in the names of files that are of another split than "train".
_SPLITS = {
    "test": ("test", "testing"),
    "validation": ("validation", "valid", "val", "dev"),
}


def open_rows(name: str, split: str = "train", *, flag: str = "--mixer_list") -> RowSource:
    """The rows of a local file, of a folder of such files, or of a data set by name.

    Raises:
        InputError: there is no such file, folder, data set or split; it cannot be read; or the
            package that reads it is not installed.
    """
    path = Path(name).expanduser()
    if path.exists() and not path.is_dir():
        if split != "train":
            raise InputError(
                f"{flag}_splits: {name} is a file, its only split is 'train', not {split!r}.",
                kind="bad_value",
            )
        return _open_file(path, name, flag)
    markers = (*_SAVED_TO_DISK, "README.md")
    if is_token_folder(name):
        raise InputError(
            f"{flag}: {name} is a folder of token files, and rows of text are needed; `sft` and "
            "`distill` read it by --mixer_list.",
            kind="unreadable_file",
        )
    if path.is_dir() and not any((path / marker).is_file() for marker in markers):
        return _open_folder(path, name, split, flag)
    refuse_missing_file(name, flag=flag)
    return _open_dataset(name, split, flag)


def refuse_missing_file(name: str, *, flag: str) -> None:
    """Refuse the name of a file or folder that is not there.

    Raises:
        InputError: there is none, and the name cannot be one of the hub's.
    """
    path = Path(name).expanduser()
    if not path.exists() and looks_like_a_file(name):
        raise InputError(
            f"{flag}: {name}: no such file (a name like this is not looked for on the "
            f"hub).{near_files(path)}",
            kind="missing_file",
        )


def looks_like_a_file(name: str) -> bool:
    """Whether a name means a local file: a misspelled path is never looked up on the hub."""
    path = Path(name).expanduser()
    is_partly_there = len(path.parts) > 1 and path.parent.is_dir()
    return (
        is_partly_there
        or name.startswith((".", "/", "~"))
        or "\\" in name
        or len(path.parts) > 2
        or bool(_FILE_ENDING.search(name))
    )


def _open_file(path: Path, name: str, flag: str) -> RowSource:
    suffix = _find_suffix(path)
    if suffix not in SUFFIXES:
        raise InputError(
            f"{flag}: {name}: cannot read '{suffix}' files; give one of {', '.join(SUFFIXES)}.",
            kind="unreadable_file",
        )
    try:
        if suffix not in (".parquet", ".arrow"):
            refuse_other_kinds(path, name, flag=flag)
        if suffix.startswith(".jsonl"):
            refuse_list_of_rows(path, name, flag=flag)
        if suffix.startswith(".jsonl") or (suffix in JSON_SUFFIXES and is_json_lines(path)):
            return open_json_lines(path, name)
        if suffix in JSON_SUFFIXES:
            return open_json_list(path, name, flag)
        if suffix in (".parquet", ".arrow"):
            return open_column_file(path, name, flag)
        return open_text_table(path, name, flag)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{flag}: {name} cannot be read: {error}", kind="unreadable_file"
        ) from error


def _find_suffix(path: Path) -> str:
    """The known suffix of a file's name, else its last one: `.jsonl.gz` of rows.v2.jsonl.gz."""
    name = path.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), path.suffix)


def _open_folder(
    path: Path,
    name: str,
    split: str,
    flag: str,
) -> RowSource:
    """The files of a folder, one after the other in the order of their names.

    Files that have a split in their name are of that split, all others of 'train'.
    """
    files = [file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file()]
    files = [file for file in files if not any(part.startswith(".") for part in file.parts)]
    readable = [file for file in files if _find_suffix(file) in SUFFIXES]
    if not readable:
        content = "it is empty"
        if files:
            content = f"it has {', '.join(file.name for file in files[:3])}"
        raise InputError(
            f"{flag}: {name}: no file in this folder can be read ({content}); put {SUFFIXES[0]} "
            "there.",
            kind="missing_file",
        )
    split_files = [file for file in readable if _find_split(file) == split]
    if not split_files:
        raise _missing_split_error(name, split, map(_find_split, readable), flag)
    sources = [_open_file(path / file, str(Path(name) / file), flag) for file in split_files]
    starts = [0, *accumulate(map(len, sources))]

    def rows(indices: Sequence[int]) -> Iterator[RawRow]:
        for source, (start, stop) in zip(sources, pairwise(starts), strict=True):
            in_source = indices[bisect_left(indices, start) : bisect_left(indices, stop)]
            yield from source.rows([index - start for index in in_source])

    fingerprints = " ".join(source.fingerprint for source in sources)
    fingerprint = hashlib.sha256(fingerprints.encode()).hexdigest()
    description = name if split == "train" else f"{name}[{split}]"
    return RowSource(
        name=description,
        fingerprint=fingerprint,
        num_rows=starts[-1],
        rows=rows,
    )


def _find_split(file: Path) -> str:
    words = set(re.split(r"[^a-z]+", str(file).lower()))
    for split, names in _SPLITS.items():
        if words & set(names):
            return split
    return "train"


def _missing_split_error(
    name: str,
    split: str,
    splits: Iterable[str],
    flag: str,
) -> InputError:
    return InputError(
        f"{flag}_splits: {name} has no split {split!r}; it has {', '.join(sorted(set(splits)))}.",
        kind="bad_value",
    )


def _open_dataset(name: str, split: str, flag: str) -> RowSource:
    """One split of what the datasets library finds under a name, or in a folder.

    The folder is one of `save_to_disk`, or has a README.md. A name may say which configuration:
    `openai/gsm8k:main`.
    """
    import datasets

    path = Path(name).expanduser()
    is_folder = path.is_dir()
    try:
        if any((path / marker).is_file() for marker in _SAVED_TO_DISK):
            dataset = datasets.load_from_disk(str(path))
        elif is_folder:
            dataset = datasets.load_dataset(str(path), None, split=split)
        else:
            repository, _, configuration = name.partition(":")
            dataset = datasets.load_dataset(repository, configuration or None, split=split)
    # The library raises many kinds of errors: its own and those of downloads.
    except Exception as error:
        where = "the folder" if is_folder else "there is no such file, and as a data set's name"
        near = near_files(path) if path.parent.is_dir() and not is_folder else ""
        raise InputError(
            f"{flag}: {name}: {where} cannot be loaded (split {split!r}): {type(error).__name__}: "
            f"{error}{near}",
            kind="unreadable_file",
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise _missing_split_error(name, split, dataset, flag)
        dataset = dataset[split]
    description = f"{name}[{split}]"
    unformatted = dataset.with_format(None)
    convert = build_row_conversion(dataset.features.arrow_schema, decodes_json=False)

    def rows(indices: Sequence[int]) -> Iterator[RawRow]:
        for index, value in zip(indices, unformatted.select(indices), strict=True):
            yield RawRow(file=description, line=index + 1, value=convert(value))

    return RowSource(
        name=description,
        fingerprint=str(dataset._fingerprint),
        num_rows=len(dataset),
        rows=rows,
    )
