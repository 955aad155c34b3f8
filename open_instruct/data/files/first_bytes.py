"""Refuse a file whose first bytes show that it is of another kind than its name says."""

from codecs import BOM_UTF8
from pathlib import Path

from open_instruct.core.errors import InputError
from open_instruct.data.files.rows import open_unpacked

# By how files of each kind begin: what it is, and what would be read.
KINDS = {
    b"\x1f\x8b": ("packed by gzip", "give it a name that ends in .gz"),
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "unpack it with `zstd -d`"),
    b"PK\x03\x04": ("a zip archive (an .xlsx is one)", "unpack it, or save the table as CSV"),
    b"PAR1": ("a Parquet file", "give it a name that ends in .parquet"),
    b"ARROW1": ("an Arrow file", "give it a name that ends in .arrow"),
    b"\xff\xfe": ("text in UTF-16", "save it as UTF-8, as with `iconv -f UTF-16 -t UTF-8`"),
    b"\xfe\xff": ("text in UTF-16", "save it as UTF-8, as with `iconv -f UTF-16 -t UTF-8`"),
}


def refuse_list_of_rows(path: Path, name: str, *, flag: str) -> None:
    """Refuse a file that is called .jsonl and is one JSON list, on one line or on many.

    Raises:
        InputError: it is one.
    """
    with open_unpacked(path) as file:
        lines = (line.strip() for line in file if line.strip())
        first = next(lines, b"").removeprefix(BOM_UTF8)
        if not first.startswith(b"["):
            return
        is_one_list = not first.endswith(b"]") or next(lines, None) is None
    if is_one_list:
        ending = ".json.gz" if path.suffix.lower() == ".gz" else ".json"
        remedy = f"give it a name that ends in {ending}"
        raise InputError(
            f"{flag}: {name} is one JSON list: {remedy}", kind="unreadable_file", remedy=remedy
        )


def refuse_other_kinds(path: Path, name: str, *, flag: str) -> None:
    """Refuse a file of text that is none.

    Raises:
        InputError: says what it is.
        OSError: it cannot be read.
    """
    with open_unpacked(path) as file:
        first = file.read(max(map(len, KINDS)))
    for beginning, (kind, remedy) in KINDS.items():
        if first.startswith(beginning):
            raise InputError(
                f"{flag}: {name} is {kind}, which its name does not say: {remedy}",
                kind="unreadable_file",
                remedy=remedy,
            )
