"""Rows are the same whichever kind of file they are in: tables have no keys that the rows never
had.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from open_instruct.data.files.opening import open_rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]], new: Callable[..., Any]) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table)
    return path


def write_hub_copy(folder: Path, rows: list[dict[str, Any]], suffix: str) -> Path:
    (write_jsonl if suffix == "jsonl" else write_parquet)(folder / f"train.{suffix}", rows)
    (folder / "README.md").write_text("# rows\n")
    return folder


def write_to_disk(folder: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    return folder


KINDS: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "jsonl": lambda folder, rows: write_jsonl(folder / "rows.jsonl", rows),
    "parquet": lambda folder, rows: write_parquet(folder / "rows.parquet", rows),
    "arrow_stream": lambda folder, rows: write_arrow(folder / "stream.arrow", rows, ipc.new_stream),
    "arrow_file": lambda folder, rows: write_arrow(folder / "file.arrow", rows, ipc.new_file),
    "folder": lambda folder, rows: write_parquet(folder / "parts" / "rows.parquet", rows).parent,
    "hub_copy": lambda folder, rows: write_hub_copy(folder / "hub", rows, "jsonl"),
    "hub_copy_of_parquet": lambda folder, rows: write_hub_copy(folder / "tables", rows, "parquet"),
    "save_to_disk": lambda folder, rows: write_to_disk(folder / "disk", rows),
}


def read(path: Path) -> list[dict[str, Any]]:
    source = open_rows(str(path))
    return [row.content() for row in source.rows(range(len(source)))]


def schema(name: str, **properties: str) -> dict[str, Any]:
    typed = {key: {"type": kind} for key, kind in properties.items()}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": typed}},
    }


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


# Columns that only one row has are null in the others; what is within them is not there.
ROWS: dict[str, list[dict[str, Any]]] = {
    "tools": [
        {"tools": [schema("add", a="integer", b="integer")]},
        {"tools": [schema("rain", city="string")]},
    ],
    "arguments": [
        {"messages": [{"role": "assistant", "tool_calls": [call("add", a=2, b=3)]}]},
        {"messages": [{"role": "assistant", "tool_calls": [call("rain", city="Rome")]}]},
    ],
    "no_arguments": [{"calls": [call("now")]}, {"calls": [call("rain", city="Rome")]}],
    "some_messages_alone": [
        {
            "messages": [
                {"role": "user", "content": "Rain?"},
                {"role": "tool", "content": "no", "name": "rain"},
            ]
        }
    ],
    "deep": [
        {"x": {"a": {"b": [{"c": {"d": 1}}]}}},
        {"x": {"a": {"b": [{"c": {"e": "x"}}], "f": []}}},
    ],
    "lists_of_lists": [{"x": [[{"a": 1}], []]}, {"x": [[{"b": 2}]]}],
    "null_within_lists": [
        {"x": {"enum": ["a", None], "of": [None, {"a": 1}]}},
        {"x": {"enum": [None], "of": []}},
    ],
    "plain": [{"a": 1, "b": "x", "c": [1, 2]}, {"a": 2, "b": "", "c": []}],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ROWS)
def test_rows_have_the_keys_that_they_were_written_with(
    tmp_path: Path, form: str, kind: str
) -> None:
    assert read(KINDS[kind](tmp_path, ROWS[form])) == ROWS[form]


@pytest.mark.parametrize("kind", KINDS)
def test_columns_stay_where_they_are_null(tmp_path: Path, kind: str) -> None:
    rows = [{"a": None, "b": {"c": 1}}, {"a": {"d": 1}, "b": None}]
    assert read(KINDS[kind](tmp_path, rows)) == rows


class TestObjectsAsText:
    """The datasets library keeps objects of which Arrow has no type as JSON text."""

    ROWS = (
        {"messages": [{"role": "assistant", "tool_calls": [call("add", a=2, b=None)]}]},
        {"messages": [{"role": "assistant", "tool_calls": [call("add", a="two")]}]},
    )

    @pytest.mark.parametrize("kind", ["hub", "rows.parquet", "disk", "part.arrow"])
    def test_objects_with_values_of_several_types_are_read(self, tmp_path: Path, kind: str) -> None:
        write_hub_copy(tmp_path / "hub", list(self.ROWS), "jsonl")
        written = datasets.load_dataset(
            str(tmp_path / "hub"), split="train", cache_dir=str(tmp_path / "cache")
        )
        written.to_parquet(str(tmp_path / "rows.parquet"))
        written.save_to_disk(str(tmp_path / "disk"))
        (tmp_path / "part.arrow").write_bytes(
            next((tmp_path / "disk").glob("*.arrow")).read_bytes()
        )
        assert read(tmp_path / kind) == list(self.ROWS)

    @pytest.mark.parametrize("text", ["{", '{"a": 1, "a": 2}'])
    def test_text_that_is_no_json_is_one_bad_row(self, tmp_path: Path, text: str) -> None:
        column = pa.ExtensionArray.from_storage(pa.json_(), pa.array([text, '{"a": 1}']))
        parquet.write_table(pa.table({"x": column}), tmp_path / "rows.parquet")
        bad, good = open_rows(str(tmp_path / "rows.parquet")).rows([0, 1])
        assert (bad.problem is not None and bad.problem.kind) == "not_json"
        assert good.value == {"x": {"a": 1}}


def test_maps_are_objects(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.struct([("a", pa.int64()), ("b", pa.string())]))
    column = pa.array(
        [[("x", {"a": 1})], None, [("y", None)], [("z", {"a": 1}), ("z", {"a": 2})]], type=kind
    )
    parquet.write_table(pa.table({"m": column}), tmp_path / "rows.parquet")
    *rows, twice = open_rows(str(tmp_path / "rows.parquet")).rows(range(4))
    assert [row.value for row in rows] == [{"m": {"x": {"a": 1}}}, {"m": None}, {"m": {"y": None}}]
    assert twice.problem is not None and twice.problem.kind == "not_readable"
