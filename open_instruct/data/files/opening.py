"""From a name to its rows: a local file, a folder of files, or a data set that the datasets library
reads.
"""

import hashlib
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from open_instruct.core.errors import InputError
from open_instruct.core.files import near_files
from open_instruct.data.files.arrow_values import row_conversion
from open_instruct.data.files.first_bytes import refuse_list_of_rows, refuse_other_kinds
from open_instruct.data.files.rows import RawRow, RowSource, is_json_lines, json_lines, json_list
from open_instruct.data.files.tables import column_file, text_table

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".csv.gz", ".tsv", ".parquet", ".arrow")
# Endings that no data set on the hub has. A dot alone decides nothing: names such as llama-3.1-tulu
# have one.
_ENDS_AS_A_FILE = re.compile(
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
    if path.is_dir() and not any(
        (path / marker).is_file() for marker in (*_SAVED_TO_DISK, "README.md")
    ):
        return _folder(path, name, split, flag)
    refuse_missing_file(name, flag=flag)
    return _named_rows(name, split, flag)


def refuse_missing_file(name: str, *, flag: str) -> None:
    """:raises InputError: the name is that of a file or folder, and there is none."""
    path = Path(name).expanduser()
    if not path.exists() and looks_like_a_file(name):
        raise InputError(
            f"{flag}: {name}: no such file (a name like this is not looked for on the "
            f"hub).{near_files(path)}",
            kind="missing_file",
        )


def looks_like_a_file(name: str) -> bool:
    """Whether the name means a local file, so that a misspelled path is never looked up on the
    hub.
    """
    path = Path(name).expanduser()
    is_partly_there = len(path.parts) > 1 and path.parent.is_dir()
    return (
        is_partly_there
        or name.startswith((".", "/", "~"))
        or "\\" in name
        or len(path.parts) > 2
        or bool(_ENDS_AS_A_FILE.search(name))
    )


def _open_file(path: Path, name: str, flag: str) -> RowSource:
    suffix = _suffix_of(path)
    if suffix not in SUFFIXES:
        raise InputError(
            (f"{flag}: {name}: cannot read '{suffix}' files; give one of {', '.join(SUFFIXES)}."),
            kind="unreadable_file",
        )
    try:
        if suffix not in (".parquet", ".arrow"):
            refuse_other_kinds(path, name, flag=flag)
        if suffix.startswith(".jsonl"):
            refuse_list_of_rows(path, name, flag=flag)
        if suffix.startswith(".jsonl") or (suffix == ".json" and is_json_lines(path)):
            return json_lines(path, name)
        if suffix == ".json":
            return json_list(path, name, flag)
        return (
            column_file(path, name, flag)
            if suffix in (".parquet", ".arrow")
            else text_table(path, name, flag)
        )
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{flag}: {name} cannot be read: {error}", kind="unreadable_file"
        ) from error


def _suffix_of(path: Path) -> str:
    """The known suffix that a file's name ends with, else its last suffix:

    `.jsonl.gz` of rows.v2.jsonl.gz.
    """
    name = path.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), path.suffix)


def _folder(path: Path, name: str, split: str, flag: str) -> RowSource:
    """The files of a folder, one after the other in the order of their names.

    Files that have a split in their name are of that split, all others of 'train'.
    """
    files = [file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file()]
    files = [file for file in files if not any(part.startswith(".") for part in file.parts)]
    readable = [file for file in files if _suffix_of(file) in SUFFIXES]
    if not readable:
        there = f"it has {', '.join(file.name for file in files[:3])}" if files else "it is empty"
        raise InputError(
            f"{flag}: {name}: no file in this folder can be read ({there}); put {SUFFIXES[0]} "
            "there.",
            kind="missing_file",
        )
    chosen = [file for file in readable if _split_of(file) == split]
    if not chosen:
        raise _no_split(name, split, map(_split_of, readable), flag)
    sources = [_open_file(path / file, str(Path(name) / file), flag) for file in chosen]
    starts = [0, *accumulate(map(len, sources))]

    def rows(indices: Sequence[int]) -> Iterator[RawRow]:
        for source, (start, stop) in zip(sources, pairwise(starts), strict=True):
            own = indices[bisect_left(indices, start) : bisect_left(indices, stop)]
            yield from source.rows([index - start for index in own])

    fingerprint = hashlib.sha256(
        " ".join(each.fingerprint for each in sources).encode()
    ).hexdigest()
    shown = name if split == "train" else f"{name}[{split}]"
    return RowSource(name=shown, fingerprint=fingerprint, num_rows=starts[-1], rows=rows)


def _split_of(file: Path) -> str:
    words = set(re.split(r"[^a-z]+", str(file).lower()))
    return next((split for split, names in _SPLITS.items() if words & set(names)), "train")


def _no_split(name: str, split: str, splits: Iterable[str], flag: str) -> InputError:
    return InputError(
        (f"{flag}_splits: {name} has no split {split!r}; it has {', '.join(sorted(set(splits)))}."),
        kind="bad_value",
    )


def _named_rows(name: str, split: str, flag: str) -> RowSource:
    """One split of what the datasets library finds under a name, or under a folder (`save_to_disk`
    or plain files).

    A name may say which configuration: `openai/gsm8k:main`.
    """
    import datasets

    path = Path(name).expanduser()
    repository, _, configuration = (str(path), "", "") if path.is_dir() else name.partition(":")
    try:
        if any((path / marker).is_file() for marker in _SAVED_TO_DISK):
            dataset = datasets.load_from_disk(str(path))
        else:
            dataset = datasets.load_dataset(repository, configuration or None, split=split)
    # The library raises many kinds of errors: its own and those of downloads.
    except Exception as error:
        where = "the folder" if path.is_dir() else "there is no such file, and as a data set's name"
        near = near_files(path) if path.parent.is_dir() and not path.is_dir() else ""
        raise InputError(
            f"{flag}: {name}: {where} cannot be loaded (split {split!r}): {type(error).__name__}: "
            f"{error}{near}",
            kind="unreadable_file",
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise _no_split(name, split, dataset, flag)
        dataset = dataset[split]
    shown = f"{name}[{split}]"
    unformatted = dataset.with_format(None)
    convert = row_conversion(dataset.features.arrow_schema, decodes_json=False)

    def rows(indices: Sequence[int]) -> Iterator[RawRow]:
        for index, value in zip(indices, unformatted.select(indices), strict=True):
            yield RawRow(file=shown, line=index + 1, value=convert(value))

    return RowSource(
        name=shown, fingerprint=str(dataset._fingerprint), num_rows=len(dataset), rows=rows
    )
