"""From files of preference pairs to the tokenised data set, its report and its cache."""

import hashlib
import json
import logging
from array import array
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from open_instruct.core.errors import InputError
from open_instruct.data.files.array_file import find_cache_folder, read_arrays, write_arrays
from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.data.report import DataReport
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from scripts.demo_data.pairs import write_synthetic_preferences
from tests.refusals import refused
from tests.unit.token_data import byte_tokenizer, load_rows, marked, pair, turns, write_rows

EOS = "<|eos|>"
Load = Callable[..., tuple[TokenDataset, DataReport]]
HEAD = 2 + len("\n\n\n")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def load(tokenizer: Any, tmp_path: Path) -> Load:
    given: dict[str, Any] = {
        "tokenizer": tokenizer,
        "template": "tulu",
        "cache_dir": tmp_path / "cache",
    }
    return partial(
        load_rows, partial(load_token_dataset, PreferenceBuilder), max_seq_length=512, **given
    )


def numbered(path: Path, count: int) -> Path:
    return write_rows(path, *(pair(f"q{i}", f"yes {i}", f"no {i}") for i in range(count)))


# --- tokenised pairs
# ------------------------------------------------------------------------------------


def test_pair_by_hand(load: Load, tokenizer: Any, tmp_path: Path) -> None:
    dataset, report = load(write_rows(tmp_path / "rows.jsonl", pair("hi", "hello", "no")), "1.0")
    chosen, rejected = dataset[0]
    prompt = "<|user|>\nhi\n<|assistant|>\n"
    assert (
        marked(tokenizer, chosen) == f"{prompt}[hello{EOS}]"
        and marked(tokenizer, rejected) == f"{prompt}[no{EOS}]"
    )
    assert (len(chosen), len(rejected)) == (HEAD + 8, HEAD + 5)
    assert (dataset.label_lengths().tolist(), dataset.num_label_tokens.tolist()) == ([[6, 3]], [9])
    assert dataset.prompt_lengths.tolist() == [HEAD + 2]
    assert dataset.num_tokens.tolist() == [report.num_tokens] == [2 * HEAD + 13]


def test_keys_cover_ids_and_spans_and_nothing_else(load: Load, tmp_path: Path) -> None:
    rows = [
        pair("q", "yes", "no"),
        pair("q", "no", "yes"),
        pair("q", "yes", "no"),
        pair("other", "yes", "no"),
    ]
    dataset, _ = load(write_rows(tmp_path / "rows.jsonl", *rows), "1.0")
    keys = [dataset.key(i) for i in range(4)]
    assert keys[0] == keys[2] and len(set(keys)) == 3
    first, second = dataset[0]
    start = first.responses[0].start
    chosen, rejected = first.token_ids[start:], second.token_ids[start:]
    content = array(
        "i", [start, len(chosen), len(rejected), *first.token_ids[:start], *chosen, *rejected]
    )
    assert keys[0] == hashlib.sha256(content.tobytes()).hexdigest()
    again, _ = load(tmp_path / "rows.jsonl", "1.0", template="simple_chat")
    assert again.key(0) != keys[0]
    assert again.fingerprint != dataset.fingerprint
    assert list(dataset) == [dataset[row] for row in range(4)] and dataset[-1] == dataset[3]
    with pytest.raises(IndexError):
        dataset[4]


# --- mixtures
# -------------------------------------------------------------------------------------------


def test_mixture_in_order_with_repeats(load: Load, tmp_path: Path) -> None:
    one, two = numbered(tmp_path / "one.jsonl", 4), numbered(tmp_path / "two.jsonl", 6)
    dataset, report = load(one, "2.5", two, "3")
    assert len(dataset) == report.num_pairs == 13
    assert [dataset.key(i) for i in range(4)] == [dataset.key(i) for i in range(4, 8)]
    assert report.sources == [f"{one}: 10 taken of 4 rows", f"{two}: 3 taken of 6 rows"]
    assert report.num_rows == report.num_kept == 7
    assert report.num_tokens == dataset.num_tokens.sum()
    distinct = {i: sum(map(len, dataset[i])) for i in [*range(4), 10, 11, 12]}
    assert len(dataset.token_ids_T) < sum(distinct.values()), "repeats and prompts are stored once"


def test_change_of_the_mixture_keeps_the_keys_of_rows(load: Load, tmp_path: Path) -> None:
    one, two = (
        numbered(tmp_path / "one.jsonl", 40),
        write_rows(tmp_path / "two.jsonl", pair("other", "a", "b")),
    )
    half, _ = load(one, "0.5")
    more, _ = load(two, "1.0", one, "0.75")
    assert {half.key(i) for i in range(len(half))} < {more.key(i) for i in range(len(more))}


# --- truncation and filtering
# ---------------------------------------------------------------------------


def test_replies_are_cut_on_the_right_and_prompts_never(
    load: Load, tokenizer: Any, tmp_path: Path
) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl",
        pair("hi", "abcdefgh", "no"),  # cut
        pair("hi", "abcde, and so", "abcde, or so"),  # the same after the cut
        pair("hi", "yes", "no"),  # whole
        pair("a question that takes all the room there is", "yes", "no"),  # no room for a reply
        pair("hey", "yes", "no"),  # whole: fits to the last token
        pair("hiiiii", "no", "on"),  # room for one token
        pair("hiiiiii", "no", "on"),  # room for none
    )
    room = HEAD + 2 + 5
    dataset, report = load(path, "1.0", max_seq_length=room)
    replies = [
        tuple(marked(tokenizer, document).split("[")[1] for document in documents)
        for documents in dataset
    ]
    whole = (f"yes{EOS}]", f"no{EOS}]")
    assert replies == [("abcde]", f"no{EOS}]"), whole, whole, ("n]", "o]")]
    assert max(len(document) for documents in dataset for document in documents) <= room
    assert report.filtered == {"same_tokens": 1, "prompt_too_long": 2}
    assert (report.num_truncated, report.num_kept) == (2, 4)
    assert (
        report.num_rows
        == sum(report.bad.values()) + sum(report.filtered.values()) + report.num_kept
        == 7
    )


def test_everything_filtered_says_what_would_work(load: Load, tmp_path: Path) -> None:
    rows = [pair("hi", "same start", "same end"), pair("longer", "same start", "same end")]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    with refused("bad_row", "max_seq_length", "_length", f"{HEAD + 2}"):
        load(path, "1.0", max_seq_length=HEAD)
    with refused("bad_row", "max_seq_length", "same_tokens", "2"):
        load(path, "1.0", max_seq_length=HEAD + 7)


# --- bad rows
# -------------------------------------------------------------------------------------------

BAD_KINDS = (
    "not_json",
    "not_utf8",
    "not_object",
    "empty_reply",
    "chosen_equals_rejected",
    "not_messages",
)


@pytest.fixture
def bad_file(tmp_path: Path) -> Path:
    """Two good rows, with a row of each kind in `BAD_KINDS` and one of prompts that differ between
    them.
    """
    return write_rows(
        tmp_path / "bad.jsonl",
        pair("q", "yes", "no"),
        b"not json",
        b'{"chosen": "\xff"}',
        b"[]",
        pair("q", "  ", "no"),
        pair("q", "same", "same"),
        {"chosen": []},
        {"chosen": turns("a", "b"), "rejected": turns("x", "c")},
        pair("q", "no", "yes"),
    )


def test_bad_rows_stop_with_the_first_few_and_the_count(
    load: Load, bad_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        load(bad_file, "1.0")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(
        "7 of 9 rows cannot be used (not_json 1, not_utf8 1, not_object 1, empty_reply 1"
    )
    assert [line.split(": ")[0].strip() for line in lines[1:6]] == [
        f"{bad_file}, line {i}" for i in range(2, 7)
    ]
    assert lines[6].strip() == "... and 2 more"
    assert lines[7].startswith('found   {"chosen": [{') and '"content": "  "' in lines[7]
    assert lines[8].startswith('wanted  {"prompt": "text", "chosen": "text"')
    assert "docs/data.md" in lines[9] and "--on_bad_row skip" in lines[10] and len(lines) == 11
    assert not (tmp_path / "cache").exists()


def test_same_reason_is_given_once(load: Load, tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl",
        *({"text": f"Hello {i} " + "o" * 99, "n": i} for i in range(30)),
        b"[]",
    )
    with pytest.raises(InputError) as caught:
        load(path, "1.0", on_bad_row="skip")
    lines = str(caught.value).splitlines()
    assert lines[0] == "none of the 31 rows can be used (missing_key 30, not_object 1):"
    assert (
        lines[1].strip()
        == f"{path}, line 1: no key 'chosen'; the row has 'text', 'n' (and so 29 rows more)"
    )
    assert lines[2].strip().startswith(f"{path}, line 31: the row is a JSON list")
    assert lines[3] == f'found   {{"text": "Hello 0 {"o" * 32}…", "n": 0}}'
    assert "--columns" in lines[-2] and len(lines) == 7


def test_columns_by_other_names(load: Load, tmp_path: Path) -> None:
    plain = write_rows(
        tmp_path / "plain.jsonl", {"prompt": "hi", "chosen": "yes", "rejected": "no"}
    )
    swapped = {"question": "hi", "chosen": "no", "rejected": "yes", "prompt": "not this"}
    other = write_rows(tmp_path / "other.jsonl", swapped)
    dataset, report = load(plain, "1.0")
    renamed, its_report = load(
        other, "1.0", columns=["prompt=question", "chosen=rejected", "rejected=chosen"]
    )
    assert list(renamed) == list(dataset)
    assert report.warnings == its_report.warnings == []
    _, report = load(plain, "1.0", columns=["system=persona"])
    assert report.warnings == [
        f"--columns system=persona: no row of {plain} has a column 'persona'"
    ]
    with refused("bad_row", "columns", "'chosen'", "'prompt'", "'rejected'"):
        load(plain, "1.0", columns=["better=chosen"])


def test_bad_rows_can_be_skipped_and_counted(load: Load, bad_file: Path) -> None:
    dataset, report = load(bad_file, "1.0", on_bad_row="skip", max_seq_length=HEAD + 2)
    assert len(dataset) == report.num_kept == 2
    assert report.bad == dict.fromkeys((*BAD_KINDS, "prompts_differ"), 1)
    assert len(report.bad_rows) == 5
    assert DataReport(**json.loads(json.dumps(asdict(report)))) == report
    assert (
        report.num_truncated == 2
        and "2 rows with a reply cut to --max_seq_length" in report.lines()
    )
    assert f"kept in {report.cache_file}" in report.lines()
    text = "\n".join(report.lines())
    assert "7 rows skipped as malformed" in text and "line 2: not JSON" in text
    with refused("bad_row", "columns", "7", "9"):
        load(bad_file, "1.0")  # what was skipped before is no excuse now


def test_rows_that_the_template_refuses_are_bad_rows(
    load: Load, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = (
        "{{ raise_exception('no system turn') if messages[0]['role'] == 'system' }}{% for m in "
        "messages %}"
    )
    fine = (
        "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{{ '<assistant>' if "
        "add_generation_prompt }}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", strict + fine)
    system = {"role": "system", "content": "be kind"}
    foreign = {key: [system, *messages] for key, messages in pair("q", "yes", "no").items()}
    rows = [pair("q", "yes", "no"), foreign, *({**foreign, "n": i} for i in range(3))]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    with refused("bad_row", "on_bad_row", "2") as caught:
        load(path, "1.0", template=None)
    assert str(caught.value).splitlines()[1].endswith("no system turn (and so 3 rows more)")
    assert "wanted" not in str(caught.value), "the form of these rows is right"
    dataset, report = load(path, "1.0", template=None, on_bad_row="skip")
    assert (len(dataset), report.bad) == (1, {"template": 4})
    assert any("without an end-of-turn token" in warning for warning in report.warnings)


def test_rows_that_are_mostly_cut_are_a_warning(load: Load, tmp_path: Path) -> None:
    """Once, with the remedy, also where they are read from the cache; a few long ones are not."""
    rows = [pair("hi", "yes", f"no {i}" + "!" * (30 if i < 2 else 0)) for i in range(20)]
    path, room = write_rows(tmp_path / "rows.jsonl", *rows), HEAD + 2 + 5
    expected = (
        f"20 of 20 rows are cut to --max_seq_length {room - 2}, and teach replies that break "
        "off: raise it, or "
    )
    for _ in range(2):
        (warning,) = load(path, "1.0", max_seq_length=room - 2)[1].warnings
        assert warning == f"{expected}leave such rows out"
    _, report = load(path, "1.0", max_seq_length=room)
    assert report.num_truncated == 12 and report.warnings[0].startswith("12 of 20 rows are cut")
    _, report = load(path, "1.0", max_seq_length=room + 20)
    assert (report.num_truncated, report.warnings) == (2, [])


def test_progress_counts_distinct_rows_where_they_are_many(load: Load, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    one, two = numbered(tmp_path / "one.jsonl", 700), numbered(tmp_path / "two.jsonl", 5)
    load(one, "2.0", two, "1.0", on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(512, 705), (700, 705), (705, 705)]
    load(two, "2.0", on_progress=lambda done, total: pytest.fail("nobody waits for so few"))


# --- the cache
# ------------------------------------------------------------------------------------------


def test_second_load_reads_the_file(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = numbered(tmp_path / "rows.jsonl", 9)
    first, report = load(path, "1.5")
    monkeypatch.setattr(PreferenceBuilder, "build", None)  # would fail if it were built again
    second, again = load(path, "1.5")
    assert list(first) == list(second) and first.fingerprint == second.fingerprint
    assert again.from_cache and not report.from_cache
    assert (again.num_pairs, again.num_tokens, again.cache_file) == (
        14,
        report.num_tokens,
        report.cache_file,
    )
    assert list((tmp_path / "cache" / "pairs").iterdir()) == [Path(report.cache_file)]


def test_everything_that_matters_is_in_the_cache_key(
    load: Load, tokenizer: Any, tmp_path: Path
) -> None:
    path = numbered(tmp_path / "rows.jsonl", 9)
    bigger = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), eos_token=EOS
    )
    bigger.add_tokens(["yes"])
    changes: list[dict[str, Any]] = [
        *(
            {},
            {"seed": 1},
            {"max_seq_length": 64},
            {"template": "simple_chat"},
            {"on_bad_row": "skip"},
        ),
        {"tokenizer": bigger},
    ]
    files = [load(path, "0.5", **change)[1].cache_file for change in changes]
    files += [load(path, amount)[1].cache_file for amount in ("1.0", "1", "9")]
    numbered(path, 10)
    files.append(load(path, "0.5")[1].cache_file)
    assert len(set(files)) == len(files)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data + b"more",
        lambda data: b"\x02\0\0\0\0\0\0\0{}",
    ],
    ids=[
        "half",
        "one byte short",
        "empty",
        "one bit flipped",
        "header length",
        "too long",
        "no header",
    ],
)
def test_damaged_cache_file_is_built_again(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    rows = numbered(tmp_path / "rows.jsonl", 9)
    first, report = load(rows, "1.0")
    expected = list(first)
    path = Path(report.cache_file)
    whole = path.read_bytes()
    path.unlink()  # `first` is not mapped from it, but be sure
    path.write_bytes(damage(whole))
    with pytest.raises(ValueError, match="is damaged: "):
        read_arrays(path)
    with caplog.at_level(logging.WARNING):
        second, again = load(rows, "1.0")
    assert "damaged" in caplog.text
    assert list(second) == expected and not again.from_cache
    assert path.read_bytes() == whole


def test_crash_while_writing_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "a.safetensors"
    write_arrays(path, {"x": np.arange(5)}, {"note": "first"})

    def no_rename(self: Path, target: Path) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Path, "replace", no_rename)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        write_arrays(path, {"x": np.arange(6)}, {"note": "second"})
    arrays, metadata = read_arrays(path)
    assert arrays["x"].tolist() == [0, 1, 2, 3, 4] and metadata == {"note": "first"}
    assert list(path.parent.iterdir()) == [path]


def test_arrays_are_read_only_views_of_plain_safetensors(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "a": np.arange(6).reshape(2, 3),
        "b": np.arange(3, dtype=np.int32),
        "c": np.ones((2, 32), np.uint8),
    }
    path = tmp_path / "a.safetensors"
    write_arrays(path, arrays, {})
    ours, theirs = read_arrays(path)[0], load_file(path)
    for name, array_ in arrays.items():
        assert ours[name].dtype == array_.dtype
        assert (ours[name] == array_).all() and (theirs[name] == array_).all()
        assert not ours[name].flags.writeable


def test_unwritable_cache_and_where_it_is(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with refused("unreadable_file", "cache_dir", "cannot write"):
        load(numbered(tmp_path / "rows.jsonl", 2), "1.0", cache_dir=tmp_path / "file")
    assert find_cache_folder("given") == Path("given")
    monkeypatch.setenv("OPEN_INSTRUCT_CACHE", "/from/environment")
    assert find_cache_folder(None) == Path("/from/environment")
    monkeypatch.delenv("OPEN_INSTRUCT_CACHE")
    assert find_cache_folder(None) == Path.home() / ".cache" / "open_instruct"


# --- made pairs
# -----------------------------------------------------------------------------------------


def test_synthetic_pairs_are_valid_varied_and_disjoint(load: Load, tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    write_synthetic_preferences(
        train, num_rows=600, seed=1, holdout_path=held_out, num_holdout_rows=100
    )
    dataset, report = load(train, "1.0", held_out, "1.0", max_seq_length=4096)
    assert len(dataset) == 700 and report.num_truncated == 0
    lines = train.read_text().splitlines() + held_out.read_text().splitlines()
    assert len({json.loads(line)["chosen"][-2]["content"] for line in lines}) == 700
    low, high = np.percentile(dataset.num_tokens, [10, 90])
    assert high > 3 * low
    chosen_lengths, rejected_lengths = dataset.label_lengths().T
    longer = (chosen_lengths > rejected_lengths).mean()
    assert 0.3 < longer < 0.8, "length must not give the answer away"


def test_synthetic_pairs_depend_on_the_arguments_alone(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_synthetic_preferences(tmp_path / name, num_rows=20, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c
