"""Kinds of files beside .jsonl and .parquet, folders of them, and what is taken for a name on the hub."""

from __future__ import annotations

import csv
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.data.files import opening
from open_instruct.data.files.lists import json_list
from open_instruct.data.files.names import looks_like_a_file
from open_instruct.data.files.opening import open_rows
from open_instruct.data.files.rows import BadRow, RawRow
from open_instruct.errors import InputError
from tests.unit.mutations import mutated_bytes

ROWS: list[dict[str, Any]] = [
    {"prompt": f'q{i} "[{{,}}]" \\ é\n', "chosen": [{"role": "user", "content": "x"}], "n": i} for i in range(5)
]
HARD_TEXT = st.text(alphabet='"\\[]{},: \nab\u00e9', max_size=12)
VALUES = st.recursive(
    HARD_TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HARD_TEXT, inner, max_size=3),
    max_leaves=8,
)


def values(path: Path, indices: list[int] | None = None, split: str = "train") -> list[dict[str, Any]]:
    source = open_rows(str(path), split)
    rows = list(source.rows(range(len(source)) if indices is None else indices))
    assert all(isinstance(row, RawRow) for row in rows), rows
    return [row.value for row in rows if isinstance(row, RawRow)]


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


# --- .json ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2, ensure_ascii=False),
        "\ufeff" + json.dumps(ROWS),
        json.dumps({"version": "[1]", "about": {"data": [1]}, "data": ROWS, "more": [3]}, indent=1),
        json.dumps({"type": "text", "instances": ROWS}),
        LINES,
        "\n" + LINES,
    ],
    ids=["list", "indented", "byte order mark", "data", "instances", "lines", "blank line"],
)
def test_json_files(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "rows.json", text)
    assert values(path) == ROWS
    assert values(path, [1, 4]) == [ROWS[1], ROWS[4]]


@given(rows=st.lists(st.dictionaries(HARD_TEXT, VALUES, max_size=3), max_size=5), indent=st.sampled_from([None, 1]))
def test_any_list_of_objects(tmp_path_factory: pytest.TempPathFactory, rows: list[Any], indent: int | None) -> None:
    path = write(tmp_path_factory.getbasetemp() / "any.json", json.dumps(rows, indent=indent, ensure_ascii=False))
    assert values(path) == rows


def test_items_that_are_no_rows_are_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    source = open_rows(str(write(tmp_path / "rows.json", '[{"n": 0}, 5, {"n": 1, "n": 2}, {"n" 3}, {"n": 4}, ]')))
    first, *bad, last, empty = source.rows(range(6))
    assert isinstance(first, RawRow) and isinstance(last, RawRow) and last.value == {"n": 4} and last.line == 5
    assert [(row.line, row.kind) for row in bad if isinstance(row, BadRow)] == [
        *((2, "not_object"), (3, "not_json"), (4, "not_json"))
    ]
    assert isinstance(empty, BadRow) and empty.kind == "not_json"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no JSON list"),
        ("5", "holds no JSON list"),
        ('{"a": 1,\n "b": [{}]}', "is an object without a list of rows"),
        ('{"data": [{}], "rows": [{}]}', "has lists of rows as 'data' and 'rows'"),
        ('[{"a": 1}', "is cut short"),
        ('[{"a": "1}', "has a text without an end"),
        ("[{}] [{}]", "goes on behind its end"),
    ],
)
def test_json_files_that_are_no_list(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError, match=rf"--mixer_list: .*rows\.json {told}.*; give a list of rows"):
        open_rows(str(write(tmp_path / "rows.json", text)))


def test_any_bytes_of_a_json_file_are_read_or_refused(tmp_path: Path) -> None:
    whole = json.dumps({"data": ROWS}).encode()
    path, refused = tmp_path / "rows.json", 0
    for seed in range(300):
        write(path, mutated_bytes(whole, random.Random(seed)))
        try:
            source = json_list(path, "rows.json", "--mixer_list")
            assert all(isinstance(row, RawRow | BadRow) for row in source.rows(range(len(source))))
        except InputError:
            refused += 1
    assert 0 < refused < 300


# --- tables ---------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": 'a "b", [c]'}]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t"), ("d.csv.gz", ",")])
def test_tables(tmp_path: Path, name: str, delimiter: str) -> None:
    path = tmp_path / name
    opened: Any = gzip.open if name.endswith("gz") else open
    with opened(path, "wt", newline="", encoding="utf-8-sig") as file:
        table = csv.writer(file, delimiter=delimiter)
        table.writerow(["prompt", "chosen", "rejected"])
        table.writerow(["two\nlines", json.dumps(MESSAGES), repr(MESSAGES)])
        table.writerow([])
        table.writerow(['say "hi", please', "[1, 2]", "[not JSON"])
        table.writerow(["", "x" * 200_000, '{"a": 1}'])
        table.writerow(["[" * 20_000, "[{}]", "['q']"])
    assert values(path) == [
        {"prompt": "two\nlines", "chosen": MESSAGES, "rejected": MESSAGES},
        {"prompt": 'say "hi", please', "chosen": "[1, 2]", "rejected": "[not JSON"},
        {"prompt": "", "chosen": "x" * 200_000, "rejected": '{"a": 1}'},
        {"prompt": "[" * 20_000, "chosen": "[{}]", "rejected": "['q']"},
    ]
    assert [row.line for row in open_rows(str(path)).rows([0, 1, 2])] == [2, 5, 6]
    assert values(path, [2])[0]["prompt"] == ""


def test_rows_of_a_table_that_cannot_be_used(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", b"prompt,chosen\nq,yes\nq,yes,no\nq\n\xff,yes\nq,last\n")
    first, long, short, not_text, last = open_rows(str(path)).rows(range(5))
    assert isinstance(first, RawRow) and isinstance(last, RawRow) and last.line == 6
    assert isinstance(long, BadRow) and long.reason.startswith("3 cells under 2 column names (prompt, chosen)")
    assert isinstance(short, BadRow) and short.line == 4
    assert isinstance(not_text, BadRow) and "not UTF-8" in not_text.reason


@pytest.mark.parametrize("header", ["", "a,a\n", "a,,b\n1,2,3\n"])
def test_a_table_needs_names(tmp_path: Path, header: str) -> None:
    with pytest.raises(InputError, match=r"rows\.csv must begin with a line of column names"):
        open_rows(str(write(tmp_path / "rows.csv", header)))


# --- packed lines ---------------------------------------------------------------------------------------


def test_packed_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl.gz", gzip.compress(LINES.encode()))
    assert values(path) == ROWS
    assert values(path, [0, 3]) == [ROWS[0], ROWS[3]]
    assert open_rows(str(path)).fingerprint == open_rows(str(write(tmp_path / "rows.jsonl", LINES))).fingerprint
    for damaged in (path.read_bytes()[:-20], b"not packed at all", b"\x1f\x8b\x08\x00" + b"\xff" * 40):
        with pytest.raises(InputError, match=r"rows\.jsonl\.gz cannot be read"):
            open_rows(str(write(path, damaged)))


# --- folders --------------------------------------------------------------------------------------------


def test_a_folder_of_files(tmp_path: Path) -> None:
    write(tmp_path / "b.json", json.dumps(ROWS[2:3]))
    write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    write(tmp_path / "more" / "c.csv", "prompt,n\nq,3\n")
    write(tmp_path / "test-00000.jsonl", json.dumps(ROWS[4]))
    write(tmp_path / ".hidden" / "x.jsonl", "{}")
    write(tmp_path / "notes.txt", "not rows")
    source = open_rows(str(tmp_path))
    assert len(source) == 4
    assert values(tmp_path) == [*ROWS[:3], {"prompt": "q", "n": "3"}]
    assert [Path(row.file).name for row in source.rows([1, 2, 3])] == ["a.jsonl", "b.json", "c.csv"]
    assert [row.line for row in source.rows([1, 2, 3])] == [2, 1, 2]
    assert values(tmp_path, [0], split="test") == ROWS[4:]
    with pytest.raises(InputError, match=r"--mixer_list_splits: .* has no split 'validation'; it has test, train"):
        open_rows(str(tmp_path), "validation")
    before = source.fingerprint
    write(tmp_path / "b.json", json.dumps(ROWS[3:4]))
    assert open_rows(str(tmp_path)).fingerprint != before


def test_a_folder_without_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file in this folder can be read \\(it is empty\\)"):
        open_rows(str(tmp_path))
    write(tmp_path / "model.safetensors", "")
    with pytest.raises(InputError, match=r"it has model\.safetensors"):
        open_rows(str(tmp_path))


# --- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("rows.json", "rows.csv", "rows.jsonl.gz", "rows.jsonl.zst", "rows.txt", "data.zip", "data/files/rows.JSONL"),
        *("./owner/set", "/owner/set", "~/set", "../set", "a/b/c", "here/set", r"data\rows"),
    ],
)
def test_names_that_are_never_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(opening, "NamedRows", lambda *_, **__: pytest.fail("asked the hub"))
    (tmp_path / "here").mkdir()
    with pytest.raises(InputError, match=r"no such file \(a name like this is not looked for on the hub\)"):
        open_rows(name)


@pytest.mark.parametrize("name", ["owner/set", "squad", "owner/llama-3.1-tulu-3-8b", "owner/set_v1.5", "a/qwen2.5"])
def test_names_that_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert not looks_like_a_file(name)
