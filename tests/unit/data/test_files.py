"""Files and folders of rows, the rows in them that cannot be read, and what is taken for a name on
the hub.
"""

import csv
import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import Table, ipc, parquet

from open_instruct.core.errors import InputError
from open_instruct.data.files import tables
from open_instruct.data.files.opening import looks_like_a_file, open_rows
from open_instruct.data.files.rows import MalformedRow, RawRow, open_json_list, parse_json_object
from tests.refusals import refused
from tests.unit.mutations import mutated_bytes
from tests.unit.token_data import write_rows

ROWS: list[dict[str, Any]] = [
    {"prompt": f'q{i} "[{{,}}]" \\ é\n', "chosen": [{"role": "user", "content": "x"}], "n": i}
    for i in range(5)
]
HARD_TEXT = st.text(alphabet='"\\[]{},: \nab\u00e9', max_size=12)
VALUES = st.recursive(
    HARD_TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HARD_TEXT, inner, max_size=3),
    max_leaves=8,
)


def values(
    path: Path | str, indices: list[int] | None = None, split: str = "train"
) -> list[dict[str, Any]]:
    source = open_rows(str(path), split)
    rows = list(source.rows(range(len(source)) if indices is None else indices))
    assert all(row.problem is None for row in rows), rows
    return [row.value for row in rows]


def outcome(row: RawRow) -> Any:
    """The content of a row, or the line and the kind of a bad one."""
    return row.value if row.problem is None else (row.line, row.problem.kind)


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


# --- .jsonl
# ---------------------------------------------------------------------------------------------


def test_jsonl_rows_know_their_line_past_blank_lines_and_a_byte_order_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)  # not needed
    source = open_rows(
        str(write(tmp_path / "rows.jsonl", b'\xef\xbb\xbf{"n": 0}\r\n\r\n  \n{"n": 1}\n{"n": 2}'))
    )
    assert len(source) == 3
    rows = list(source.rows([0, 1, 2]))
    assert [row.line for row in rows] == [1, 4, 5] and list(map(outcome, rows)) == [
        {"n": i} for i in range(3)
    ]
    assert list(source.rows([2])) == rows[2:]


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    odd = [f"a{mark}b" for mark in "\x0b\x0c\x1c\x85\u2028\u2029"]
    rows = [{"prompt": text, "n": str(i)} for i, text in enumerate(odd)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    assert values(write(tmp_path / "rows.jsonl", "\n".join(lines))) == [
        json.loads(line) for line in lines
    ]
    assert values(write(tmp_path / "rows.json", json.dumps(rows, ensure_ascii=False))) == rows
    cells = "".join(f"{row['prompt']},{row['n']}\n" for row in rows)
    assert values(write(tmp_path / "rows.csv", f"prompt,n\n{cells}")) == rows


@pytest.mark.parametrize(
    ("line", "kind", "reason"),
    [
        (b'{"n": "\xff"}', "not_utf8", "not UTF-8: byte 0xff at byte 8"),
        (b"{'n': 1}", "not_json", "at column 2"),
        (
            b'{"n": [1, 2],',
            "not_json",
            "an object that does not end on its line: .jsonl has one whole object a line",
        ),
        (b'{"n": 1} {"n": 2}', "not_json", "Extra data"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not_json", "not JSON that can be read"),
        (b"[" * 100_000, "not_json", "not JSON that can be read"),
        (b"[1]", "not_object", "a JSON list, not an object"),
        (b"null", "not_object", "a JSON null"),
        (b'{"n": 1, "n": 2}', "not_json", "'n' is there twice"),
        (b'{"n": {"a": 1, "a": 1}}', "not_json", "'a' is there twice"),
    ],
)
def test_jsonl_reports_bad_lines_and_goes_on(
    tmp_path: Path, line: bytes, kind: str, reason: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 0}\n' + line + b'\n{"n": 2}\n')
    rows = list(open_rows(str(path)).rows([0, 1, 2]))
    assert list(map(outcome, rows)) == [{"n": 0}, (2, kind), {"n": 2}]
    problem = rows[1].problem
    assert str(rows[1]) == f"{path}, line 2" and reason in str(problem)
    # Else each bad row of a chunk would hold its text, however long.
    assert (
        problem is not None
        and problem.__traceback__ is problem.__cause__ is problem.__context__ is None
    )


@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_a_reported_row(line: bytes) -> None:
    result: object
    try:
        result = parse_json_object(line)
    except MalformedRow as error:
        result = error.kind
    assert isinstance(result, dict) or result in {"not_utf8", "not_json", "not_object"}


def test_packed_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl.gz", gzip.compress(LINES.encode()))
    assert values(path) == ROWS
    assert values(path, [0, 3]) == [ROWS[0], ROWS[3]]
    fingerprint = open_rows(str(path)).fingerprint
    assert fingerprint == open_rows(str(write(tmp_path / "b.jsonl", LINES))).fingerprint, (
        "it follows the content"
    )
    assert fingerprint != open_rows(str(write_rows(tmp_path / "c.jsonl", *ROWS[:4]))).fingerprint
    for damaged in (
        path.read_bytes()[:-20],
        b"not packed at all",
        b"\x1f\x8b\x08\x00" + b"\xff" * 40,
    ):
        with refused("unreadable_file", "mixer_list", "rows.jsonl"):
            open_rows(str(write(path, damaged)))


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("rows.jsonl", gzip.compress(b"{}"), ".gz"),
        ("rows.jsonl", b'[{"n": 0}, {"n": 1}]\n', ".json"),
        ("rows.jsonl", b'[\n{"n": 0}\n]\n', ".json"),
        ("rows.csv.gz", b"PK\x03\x04" + bytes(9), ".gz"),
        ("rows.jsonl", '{"n": 1}'.encode("utf-16"), "iconv"),
        ("rows.csv", b"\xfe\xff" + "n\n1\n".encode("utf-16-be"), "iconv"),
        ("rows.csv", b"PK\x03\x04" + bytes(9), "CSV"),
        ("rows.jsonl", b"PAR1" + bytes(9), ".parquet"),
        ("rows.jsonl.gz", gzip.compress(b"\xff\xfe{\x00"), "iconv"),
        ("rows.jsonl.gz", gzip.compress(b'[{"n": 0}, {"n": 1}]\n'), ".json.gz"),
        ("rows.jsonl.gz", gzip.compress(b'\xef\xbb\xbf[{"n": 0},\n{"n": 1}]\n'), ".json.gz"),
    ],
    ids=range(11),  # what gzip packs has the time in it
)
def test_file_of_another_kind_is_refused_by_its_first_bytes(
    tmp_path: Path, name: str, content: bytes, remedy: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with refused("unreadable_file", "mixer_list", name, remedy):
        open_rows(str(path))


# --- .json
# ----------------------------------------------------------------------------------------------


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
        "\ufeff" + LINES,
    ],
    ids=[
        "list",
        "indented",
        "byte order mark",
        "data",
        "instances",
        "lines",
        "blank line",
        "marked lines",
    ],
)
def test_json_files(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "rows.json", text)
    assert values(path) == ROWS
    assert values(path, [1, 4]) == [ROWS[1], ROWS[4]]
    assert values(write(tmp_path / "rows.json.gz", gzip.compress(text.encode()))) == ROWS


@given(
    rows=st.lists(st.dictionaries(HARD_TEXT, VALUES, max_size=3), max_size=5),
    indent=st.sampled_from([None, 1]),
)
def test_any_list_of_objects(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], indent: int | None
) -> None:
    path = write(
        tmp_path_factory.getbasetemp() / "any.json",
        json.dumps(rows, indent=indent, ensure_ascii=False),
    )
    assert values(path) == rows


def test_lines_of_which_the_first_has_a_key_twice(tmp_path: Path) -> None:
    source = open_rows(str(write(tmp_path / "rows.json", '{"n": 0, "n": 1}\n{"n": 2}\n')))
    assert list(map(outcome, source.rows([0, 1]))) == [(1, "not_json"), {"n": 2}]


def test_items_that_are_no_rows_are_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    source = open_rows(str(write(tmp_path / "rows.json", '[{"n": 0}, 5, {"n": 1}, null]')))
    assert list(map(outcome, source.rows(range(4)))) == [
        {"n": 0},
        (2, "not_object"),
        {"n": 1},
        (4, "not_object"),
    ]
    assert list(map(outcome, source.rows([2]))) == [{"n": 1}]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is not JSON: Expecting value at column 1"),
        ("5", "holds no list of rows"),
        ('{"a": 1,\n "b": [{}]}', "holds no list of rows"),
        ('{"data": [{}], "rows": [{}]}', "has lists of rows as 'data' and 'rows'"),
        ('[{"a": 1}', "is not JSON: Expecting ',' delimiter at column 10"),
        ('{"data": [{"a": 1}', "is not JSON: Expecting ',' delimiter at column 19"),
        (
            '[{"a": 1},\n {"a": "1}',
            "is not JSON: Unterminated string starting at at line 2, column 8",
        ),
        ("[{}] [{}]", "is not JSON: Extra data at column 6"),
        ('[{"n": 1},\n {"n" 2}]', "is not JSON: Expecting ':' delimiter at line 2, column 7"),
        (
            '[{"n": 1}, {"m": 5, "n": 2, "n": 3}]',
            "'n' is there twice in the object {'m': 5, 'n': 3}",
        ),
        (b'[{"n": "\xff"}]', "is not UTF-8: byte 0xff at byte 9"),
    ],
)
def test_json_files_that_are_no_list(tmp_path: Path, text: str | bytes, told: str) -> None:
    with refused("unreadable_file", "mixer_list", "rows.json", told):
        open_rows(str(write(tmp_path / "rows.json", text)))


def test_any_bytes_of_a_json_file_are_read_or_refused(tmp_path: Path) -> None:
    whole = json.dumps({"data": ROWS}).encode()
    path, refused = tmp_path / "rows.json", 0
    for seed in range(300):
        write(path, mutated_bytes(whole, random.Random(seed)))
        try:
            source = open_json_list(path, "rows.json", "--mixer_list")
            assert all(isinstance(row, RawRow) for row in source.rows(range(len(source))))
        except InputError:
            refused += 1
    assert 0 < refused < 300


# --- tables
# ---------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": 'a "b", [c]'}]


@pytest.mark.parametrize(
    ("name", "delimiter"), [("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t"), ("d.csv.gz", ",")]
)
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
    rows = list(open_rows(str(path)).rows(range(5)))
    good = {"prompt": "q", "chosen": "yes"}
    bad = [(line, "not_readable") for line in (3, 4, 5)]
    assert list(map(outcome, rows)) == [good, *bad, good | {"chosen": "last"}]
    reasons = [row.problem.reason for row in rows if row.problem is not None]
    assert (
        reasons[0].startswith("3 cells under 2 column names (prompt, chosen)")
        and "not UTF-8" in reasons[2]
    )


@pytest.mark.parametrize("header", ["", "a,a\n", "a,,b\n1,2,3\n"])
def test_table_needs_names(tmp_path: Path, header: str) -> None:
    with refused("bad_row", "mixer_list", "rows.csv"):
        open_rows(str(write(tmp_path / "rows.csv", header)))


# --- .parquet and .arrow
# --------------------------------------------------------------------------------


def write_columns(path: Path, table: Table) -> Path:
    """As the suffix says; "file.arrow" is Arrow's random-access format, any other .arrow its
    stream.
    """
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=700)
        return path
    new = ipc.new_file if path.name == "file.arrow" else ipc.new_stream
    with new(path, table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["rows.parquet", "stream.arrow", "file.arrow"])
def test_columnar_files(tmp_path: Path, name: str) -> None:
    path = write_columns(tmp_path / name, Table.from_pylist([{"n": i} for i in range(3000)]))
    source = open_rows(str(path))
    assert len(source) == 3000 and len(source.fingerprint) == 64
    indices = [0, 699, 700, 1023, 1024, 2999]
    rows = list(source.rows(indices))
    assert [row.line for row in rows] == [i + 1 for i in indices]
    assert list(map(outcome, rows)) == [{"n": i} for i in indices]
    for content in (b"", b"not what it says it is, by far"):
        with refused("unreadable_file", "mixer_list", f"{name}"):
            open_rows(str(write(path, content)))


QUESTIONS = [{"n": i, "prompt": f"question {i}"} for i in range(40)]


def test_text_in_a_parquet_file_that_is_not_utf8_is_one_bad_row(tmp_path: Path) -> None:
    parquet.write_table(
        Table.from_pylist(QUESTIONS),
        tmp_path / "rows.parquet",
        compression="none",
        use_dictionary=False,
    )
    data = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(data.replace(b"question 7", b"question \xff"))
    rows = list(open_rows(str(tmp_path / "rows.parquet")).rows(range(40)))
    assert list(map(outcome, rows)) == [*QUESTIONS[:7], (8, "not_readable"), *QUESTIONS[8:]]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_any_bytes_of_a_columnar_file_are_read_or_refused(tmp_path: Path, kind: str) -> None:
    path = write_columns(tmp_path / f"rows.{kind}", Table.from_pylist(QUESTIONS))
    whole, refused = path.read_bytes(), 0
    for seed in range(100):
        path.unlink()
        path.write_bytes(mutated_bytes(whole, random.Random(seed)))
        try:
            source = open_rows(str(path))
            for row in source.rows(range(min(len(source), 40))):
                assert isinstance(row, RawRow)
        except InputError:
            refused += 1
    assert refused > 0


def one_text_of_many_rows(path: Path, *, num_rows: int, num_bytes: int) -> None:
    """A small file: every second row has the same large text, which is in there once."""
    which = pyarrow.array([0, 1] * (num_rows // 2), pyarrow.int32())
    cells = pyarrow.DictionaryArray.from_arrays(which, ["x" * num_bytes, "short"])
    if path.suffix == ".parquet":
        table = Table.from_arrays([cells.dictionary_decode()], ["prompt"])
        parquet.write_table(table, path, dictionary_pagesize_limit=2 * num_bytes)
    else:
        table = Table.from_arrays([cells], ["prompt"])
        with ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_text_that_many_rows_have_is_unpacked_for_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path, num_bytes, num_rows = tmp_path / f"rows.{kind}", 2**20, 200
    monkeypatch.setattr(tables, "_BYTES_PER_BATCH", 2**23)
    monkeypatch.setattr(tables, "_MAX_ROW_BYTES", 2**19)
    one_text_of_many_rows(path, num_rows=num_rows, num_bytes=num_bytes)
    assert path.stat().st_size < 2 * num_bytes
    before, most = pyarrow.total_allocated_bytes(), 0
    rows = []
    for row in open_rows(str(path)).rows(range(num_rows)):
        rows.append(row)
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert most < 2**25
    expected = [
        each
        for line in range(1, num_rows, 2)
        for each in ((line, "not_readable"), {"prompt": "short"})
    ]
    assert list(map(outcome, rows)) == expected and "more than 0 MiB" in str(rows[0].problem)


# --- folders
# --------------------------------------------------------------------------------------------


def test_folder_of_files(tmp_path: Path) -> None:
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
    with refused("bad_value", "mixer_list_splits", "'validation'"):
        open_rows(str(tmp_path), "validation")
    before = source.fingerprint
    write(tmp_path / "b.json", json.dumps(ROWS[3:4]))
    assert open_rows(str(tmp_path)).fingerprint != before


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_columns_of_one_file_say_nothing_of_the_next(tmp_path: Path, kind: str) -> None:
    tables = [[{"n": i, "system": None, "tools": []} for i in range(2)]]
    tables += [[{"n": 2, "system": "s", "tools": ["f"]}], [{"n": "3", "more": 4}]]
    for number, rows in enumerate(tables):
        path = tmp_path / f"part-{number}.{kind}"
        if kind == "jsonl":
            write(path, "\n".join(map(json.dumps, rows)))
        else:
            write_columns(path, Table.from_pylist(rows))
    assert values(tmp_path) == [row for rows in tables for row in rows]


def test_folder_without_rows(tmp_path: Path) -> None:
    with refused("missing_file", "mixer_list"):
        open_rows(str(tmp_path))
    write(tmp_path / "model.safetensors", "")
    with refused("missing_file", "mixer_list", "model.safetensors"):
        open_rows(str(tmp_path))


def test_folders_of_the_datasets_library(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": whole, "test": whole.select([3, 4])}).save_to_disk(
        tmp_path / "two"
    )
    assert values(tmp_path / "one", [1, 3]) == [ROWS[1], ROWS[3]]
    assert values(tmp_path / "two", split="test") == ROWS[3:]
    with refused("bad_value", "mixer_list_splits", "'nope'"):
        open_rows(str(tmp_path / "two"), "nope")


def test_names_go_to_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, configuration: str | None, *, split: str) -> Any:
        asked.append((name, configuration, split))
        if name == "owner/gone":
            raise ConnectionError("no network")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert values("owner/set", split="test_prefs") == ROWS
    (row,) = open_rows("owner/set", "test_prefs").rows([4])
    assert (row.file, row.line) == ("owner/set[test_prefs]", 5)
    assert values("owner/set:main", [4]) == ROWS[4:]
    assert (asked[0], asked[-1]) == (
        ("owner/set", None, "test_prefs"),
        ("owner/set", "main", "train"),
    )
    with refused("unreadable_file", "mixer_list", "owner/gone"):
        open_rows("owner/gone")


# --- names
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *(
            "rows.json",
            "rows.csv",
            "rows.jsonl.gz",
            "rows.jsonl.zst",
            "rows.txt",
            "data.zip",
            "data/files/rows.JSONL",
        ),
        *("./owner/set", "/owner/set", "~/set", "../set", "a/b/c", "here/set", r"data\rows"),
    ],
)
def test_names_that_are_never_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # would fail if the hub were asked
    (tmp_path / "here").mkdir()
    with refused("missing_file", "mixer_list"):
        open_rows(name)


@pytest.mark.parametrize(
    "name", ["owner/set", "squad", "owner/llama-3.1-tulu-3-8b", "owner/set_v1.5", "a/qwen2.5"]
)
def test_names_that_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert not looks_like_a_file(name)


def test_refused_names_come_with_what_would_work(tmp_path: Path) -> None:
    path = write(tmp_path / "preferences.jsonl", LINES)
    with refused("missing_file", "mixer_list", "/preferences.jsonl"):
        open_rows(str(tmp_path / "preference.jsonl"))
    with refused("missing_file", "mixer_list"):
        open_rows(str(tmp_path / "nowhere" / "rows.jsonl"))
    with refused("unreadable_file", "mixer_list", "'.txt'"):
        open_rows(str(write(tmp_path / "rows.txt", "a,b")))
    with refused("bad_value", "eval_mixer_list_splits", "'train'", "'test'"):
        open_rows(str(path), "test", flag="--eval_mixer_list")
