"""Raw rows with their origin, and every way in which a preference row can be malformed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.data.files.opening import open_rows
from open_instruct.data.files.rows import BadRow, MalformedRow, RawRow, parse_json_object
from open_instruct.data.preference_rows import parse_preference_row
from open_instruct.errors import InputError

ROWS = [{"n": i, "chosen": [{"role": "user", "content": f"q{i}"}]} for i in range(5)]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def numbers(path: Path | str, indices: list[int], split: str = "train") -> list[tuple[int, int]]:
    rows = list(open_rows(str(path), split).rows(indices))
    assert all(isinstance(row, RawRow) for row in rows)
    return [(row.line, row.value["n"]) for row in rows if isinstance(row, RawRow)]


# --- sources -------------------------------------------------------------------------------------------


def test_jsonl_rows_know_their_line_past_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 0}\r\n\r\n  \n{"n": 1}\n{"n": 2}')
    assert len(open_rows(str(path))) == 3
    assert numbers(path, [0, 1, 2]) == [(1, 0), (4, 1), (5, 2)]
    assert numbers(path, [2]) == [(5, 2)]


@pytest.mark.parametrize(
    ("line", "kind", "reason"),
    [
        (b'{"n": "\xff"}', "not_utf8", "not UTF-8: byte 0xff at byte 8"),
        (b"{'n': 1}", "not_json", "at column 2"),
        (b'{"n": [1, 2],', "not_json", "an object that does not end on its line: .jsonl has one whole object a line"),
        (b'{"n": 1} {"n": 2}', "not_json", "Extra data"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not_json", "not JSON that can be read"),
        (b"[" * 100_000, "not_json", "not JSON that can be read"),
        (b"[1]", "not_object", "a JSON list, not an object"),
        (b"null", "not_object", "a JSON null"),
        (b'"text"', "not_object", "a JSON string"),
    ],
)
def test_jsonl_reports_bad_lines_and_goes_on(tmp_path: Path, line: bytes, kind: str, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 0}\n' + line + b'\n{"n": 2}\n')
    first, bad, last = open_rows(str(path)).rows([0, 1, 2])
    assert isinstance(first, RawRow) and isinstance(last, RawRow) and last.line == 3
    assert isinstance(bad, BadRow)
    assert (bad.file, bad.line, bad.kind) == (str(path), 2, kind)
    assert reason in bad.reason
    assert str(bad) == f"{path}, line 2: {bad.reason}"


@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_a_reported_row(line: bytes) -> None:
    result: object
    try:
        result = parse_json_object(line)
    except MalformedRow as error:
        result = error.kind
    assert isinstance(result, dict) or result in {"not_utf8", "not_json", "not_object"}


def test_fingerprint_follows_content_not_path(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    write_jsonl(one, ROWS)
    write_jsonl(same, ROWS)
    write_jsonl(other, ROWS[:4])
    prints = [open_rows(str(path)).fingerprint for path in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]


def test_parquet_and_arrow_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"n": i} for i in range(3000)]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=700)
    with pyarrow.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    indices = [0, 699, 700, 1023, 1024, 2999]
    for name in ("rows.parquet", "stream.arrow", "file.arrow"):
        source = open_rows(str(tmp_path / name))
        assert len(source) == 3000
        assert numbers(tmp_path / name, indices) == [(i + 1, i) for i in indices]
        assert len(source.fingerprint) == 64


def test_folders_of_the_datasets_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": whole, "test": whole.select([3, 4])}).save_to_disk(tmp_path / "two")
    assert numbers(tmp_path / "one", [1, 3]) == [(2, 1), (4, 3)]
    assert numbers(tmp_path / "two", [0, 1], split="test") == [(1, 3), (2, 4)]
    with pytest.raises(InputError, match=r"--mixer_list_splits: .* has no split 'nope'; it has test, train"):
        open_rows(str(tmp_path / "two"), "nope")


def test_names_go_to_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name: str, configuration: str | None, *, split: str) -> Any:
        asked.append((name, configuration, split))
        if name == "owner/gone":
            raise ConnectionError("no network")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert numbers("owner/set", [4], split="test_prefs") == [(5, 4)]
    assert open_rows("owner/set", "test_prefs").name == "owner/set[test_prefs]"
    assert numbers("owner/set:main", [4]) == [(5, 4)]
    assert (asked[0], asked[-1]) == (("owner/set", None, "test_prefs"), ("owner/set", "main", "train"))
    with pytest.raises(InputError, match=r"owner/gone: there is no such file.*ConnectionError: no network"):
        open_rows("owner/gone")


# --- what the user can get wrong about a source ---------------------------------------------------------


def test_missing_file_shows_near_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "preferences.jsonl", ROWS)
    with pytest.raises(InputError, match=r"^--mixer_list: .*no such file .*\. Did you mean .*/preferences\.jsonl\?"):
        open_rows(str(tmp_path / "preference.jsonl"))
    with pytest.raises(InputError, match="There is no folder"):
        open_rows(str(tmp_path / "nowhere" / "rows.jsonl"))


def test_unknown_kind_of_file_and_wrong_split(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("a,b\n")
    with pytest.raises(InputError, match=r"cannot read '\.txt' files; give one of \.jsonl, \.jsonl\.gz, \.json, \.csv"):
        open_rows(str(tmp_path / "rows.txt"))
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(InputError, match=r"--eval_mixer_list_splits: .* its only split is 'train', not 'test'"):
        open_rows(str(path), "test", flag="--eval_mixer_list")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_damaged_columnar_files(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow")
    for content in (b"", b"not what it says it is, by far"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"{name}.*(damaged|cannot be read)"):
            open_rows(str(tmp_path / name))


def test_jsonl_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    assert numbers(write_jsonl(tmp_path / "rows.jsonl", ROWS), [4]) == [(5, 4)]


# --- preference rows ------------------------------------------------------------------------------------


def turns(*contents: str, roles: str = "") -> list[dict[str, Any]]:
    names = {"s": "system", "u": "user", "a": "assistant"}
    letters = roles or ("ua" * len(contents))[: len(contents)]
    return [{"role": names[letter], "content": text} for letter, text in zip(letters, contents, strict=True)]


GOOD = {"chosen": turns("q", "yes"), "rejected": turns("q", "no")}


def test_a_good_row() -> None:
    pair = parse_preference_row({**GOOD, "score": 3, "prompt": "q"})
    assert pair.prompt == ({"role": "user", "content": "q"},)
    assert (pair.chosen["content"], pair.rejected["content"]) == ("yes", "no")


def test_system_turn_and_several_turns() -> None:
    prompt = ("be kind", "q", "a", "why")
    row = {key: turns(*prompt, reply, roles="suaua") for key, reply in (("chosen", "yes"), ("rejected", "no"))}
    assert len(parse_preference_row(row).prompt) == 4


def both(messages: Any) -> dict[str, Any]:
    return {"chosen": messages, "rejected": turns("q", "no")}


MALFORMED = [
    ({"chosen": turns("q", "yes")}, "missing_key", "no key 'rejected'; the row has 'chosen'"),
    ({}, "missing_key", "no key 'chosen'; the row has no keys"),
    (both("yes"), "missing_key", "'chosen' is a reply alone: no key 'prompt'"),
    (both(7), "not_messages", "'chosen' must be a list of messages, not a number"),
    (both(None), "not_messages", "not null"),
    (both({"role": "user"}), "not_messages", "not an object"),
    (both([]), "not_messages", "'chosen' is an empty list"),
    (both(["q", "yes"]), "bad_message", "'chosen', turn 1: must be an object with 'role' and 'content'"),
    (both([*turns("q"), {"content": "yes"}]), "bad_message", "turn 2: no 'role'"),
    (both([*turns("q"), {"role": "assistant"}]), "bad_message", "turn 2: no 'content'"),
    (both([*turns("q"), {"role": "assistant", "content": None}]), "bad_message", "turn 2: no 'content'"),
    (both([*turns("q"), {"role": "assistant", "content": ["yes"]}]), "bad_message", "must be text, not a list"),
    (both([*turns("q"), {"role": 3, "content": "yes"}]), "bad_message", "'role' must be text, not a number"),
    (
        both([*turns("q"), {"role": "assistant", "content": "yes", "tool_calls": [{"id": 1}]}]),
        "bad_message",
        "'tool_calls' are not supported",
    ),
    (both([*turns("q"), {"role": "bot", "content": "yes"}]), "unknown_role", "'bot'; use system, user, assistant"),
    (both(turns("\ud83d", "yes")), "not_unicode", "turn 1: 'content' has half of a surrogate pair at character 1"),
    (both(turns("q", "  \n\t")), "empty_reply", "the reply in 'chosen' is empty"),
    (both(turns("q", "")), "empty_reply", "the reply in 'chosen' is empty"),
    (both(turns("q", " no\n")), "chosen_equals_rejected", "equals"),
    (both(turns("other", "yes")), "prompts_differ", "the prompts differ at turn 1"),
    (both(turns("q", "a", "q", "yes")), "prompts_differ", "'chosen' has 4 turns, 'rejected' has 2"),
    (both(turns("yes", roles="a")), "missing_key", "'chosen' is a reply alone: no key 'prompt'"),
    ({"prompt": "q"} | both(turns("yes", "or", roles="au")), "not_messages", "'chosen' must be one message, the reply"),
    ({"prompt": turns("q", "a")} | both("yes"), "roles_out_of_order", "turn 3: the role is 'assistant'"),
    (both(turns("q", "yes", roles="uu")), "roles_out_of_order", "turn 2: the role is 'user' where 'assistant'"),
    (both(turns("q", "s", "yes", roles="usa")), "roles_out_of_order", "turn 2: the role is 'system'"),
    (both(turns("s", "yes", roles="sa")), "roles_out_of_order", "turn 2: the role is 'assistant' where 'user'"),
    (both(turns("q", "a", "q")), "roles_out_of_order", "the last turn is 'user'"),
    (both(turns("s", roles="s")), "roles_out_of_order", "the last turn is 'system'"),
]


@pytest.mark.parametrize(("row", "kind", "reason"), MALFORMED)
def test_malformed_rows(row: dict[str, Any], kind: str, reason: str) -> None:
    with pytest.raises(MalformedRow) as caught:
        parse_preference_row(row)
    assert caught.value.kind == kind
    assert reason in caught.value.reason


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from(["user", "assistant", "system"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "chosen", "rejected"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(chosen=JSON_VALUES, rejected=JSON_VALUES)
def test_any_row_is_a_pair_or_malformed(chosen: Any, rejected: Any) -> None:
    try:
        pair = parse_preference_row({"chosen": chosen, "rejected": rejected})
    except MalformedRow:
        return
    assert pair.chosen["content"].strip() and pair.rejected["content"].strip() and pair.chosen != pair.rejected
