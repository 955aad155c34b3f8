"""From files of preference pairs to the tokenised data set, its report and its cache."""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from open_instruct.data.cache import DamagedFile, cache_root, read_arrays, write_arrays
from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.data.report import DataReport
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.errors import InputError
from open_instruct.toys.synthetic import write_synthetic_preferences

EOS = "<|endoftext|>"
Load = Callable[..., tuple[TokenDataset, DataReport]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes are tokens, so that lengths can be counted by hand."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=257,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([""], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)


@pytest.fixture
def load(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Load:
    def load(*mixer_list: str | Path, **changes: Any) -> tuple[TokenDataset, DataReport]:
        arguments: dict[str, Any] = {
            "mixer_list": list(map(str, mixer_list)),
            "splits": ["train"],
            "tokenizer": tokenizer,
            "chat_template_name": "tulu",
            "max_seq_length": 512,
            "on_bad_row": "error",
            "seed": 0,
            "cache_dir": tmp_path / "cache",
        }
        return load_token_dataset(PreferenceBuilder, **(arguments | changes))

    return load


def row(question: str, chosen: str, rejected: str) -> dict[str, Any]:
    asked = {"role": "user", "content": question}
    return {
        key: [asked, {"role": "assistant", "content": reply}]
        for key, reply in (("chosen", chosen), ("rejected", rejected))
    }


def write(path: Path, *lines: dict[str, Any] | bytes) -> Path:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def numbered(path: Path, count: int) -> Path:
    return write(path, *(row(f"q{i}", f"yes {i}", f"no {i}") for i in range(count)))


HEAD = len("<|user|>\n") + len("\n<|assistant|>\n")


# --- tokenised pairs ------------------------------------------------------------------------------------


def test_a_pair_by_hand(load: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    dataset, report = load(write(tmp_path / "rows.jsonl", row("hi", "hello", "no")), "1.0")
    chosen, rejected = dataset[0]
    prompt = "<|user|>\nhi\n<|assistant|>\n"
    assert tokenizer.decode(list(chosen.token_ids)) == f"{prompt}hello{EOS}"
    assert tokenizer.decode(list(rejected.token_ids)) == f"{prompt}no{EOS}"
    assert chosen.responses[0].start == rejected.responses[0].start == HEAD + 2
    assert (len(chosen.responses[0]), len(rejected.responses[0])) == (6, 3)
    assert (len(chosen), len(rejected)) == (HEAD + 8, HEAD + 5)
    assert (dataset.label_lengths().tolist(), dataset.num_label_tokens.tolist()) == ([[6, 3]], [9])
    assert dataset.prompt_lengths.tolist() == [HEAD + 2]
    assert dataset.num_tokens.tolist() == [2 * HEAD + 13]
    assert report.num_tokens == 2 * HEAD + 13


def test_keys_cover_ids_and_spans_and_nothing_else(load: Load, tmp_path: Path) -> None:
    rows = [row("q", "yes", "no"), row("q", "no", "yes"), row("q", "yes", "no"), row("other", "yes", "no")]
    dataset, _ = load(write(tmp_path / "rows.jsonl", *rows), "1.0")
    keys = [dataset.key(i) for i in range(4)]
    assert keys[0] == keys[2] and len(set(keys)) == 3
    first, second = dataset[0]
    start = first.responses[0].start
    chosen, rejected = first.token_ids[start:], second.token_ids[start:]
    content = array("i", [start, len(chosen), len(rejected), *first.token_ids[:start], *chosen, *rejected])
    assert keys[0] == hashlib.sha256(content.tobytes()).hexdigest()
    again, _ = load(tmp_path / "rows.jsonl", "1.0", chat_template_name="simple_chat")
    assert again.key(0) != keys[0]
    assert again.fingerprint != dataset.fingerprint


def test_it_is_a_sequence(load: Load, tmp_path: Path) -> None:
    dataset, _ = load(numbered(tmp_path / "rows.jsonl", 3), "1.0")
    assert len(dataset) == 3
    assert list(dataset) == [dataset[0], dataset[1], dataset[2]]
    assert dataset[-1] == dataset[2]
    with pytest.raises(IndexError):
        dataset[3]


# --- mixtures -------------------------------------------------------------------------------------------


def test_mixture_in_order_with_repeats(load: Load, tmp_path: Path) -> None:
    one, two = numbered(tmp_path / "one.jsonl", 4), numbered(tmp_path / "two.jsonl", 6)
    dataset, report = load(one, "2.5", two, "3")
    assert len(dataset) == report.num_pairs == 13
    assert [dataset.key(i) for i in range(4)] == [dataset.key(i) for i in range(4, 8)]
    assert report.sources == ((str(one), 4, 10), (str(two), 6, 3))
    assert report.num_rows == report.num_kept == 7
    assert report.num_tokens == dataset.num_tokens.sum()
    distinct = {i: sum(map(len, dataset[i])) for i in [*range(4), 10, 11, 12]}
    assert len(dataset.token_ids_T) < sum(distinct.values()), "repeats and prompts are stored once"


def test_a_change_of_the_mixture_keeps_the_keys_of_rows(load: Load, tmp_path: Path) -> None:
    one, two = numbered(tmp_path / "one.jsonl", 40), write(tmp_path / "two.jsonl", row("other", "a", "b"))
    half, _ = load(one, "0.5")
    more, _ = load(two, "1.0", one, "0.75")
    assert {half.key(i) for i in range(len(half))} < {more.key(i) for i in range(len(more))}


# --- truncation and filtering ---------------------------------------------------------------------------


def test_replies_are_cut_on_the_right_and_prompts_never(
    load: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "rows.jsonl",
        row("hi", "abcdefgh", "no"),  # cut
        row("hi", "abcde, and so", "abcde, or so"),  # the same after the cut
        row("hi", "yes", "no"),  # whole
        row("a question that takes all the room there is", "yes", "no"),  # no room for a reply
        row("hey", "yes", "no"),  # whole: fits to the last token
        row("hiiiii", "no", "on"),  # room for one token
        row("hiiiiii", "no", "on"),  # room for none
    )
    room = HEAD + 2 + 5
    dataset, report = load(path, "1.0", max_seq_length=room)
    replies = [
        tuple(tokenizer.decode(list(document.token_ids[document.responses[0].start :])) for document in pair)
        for pair in dataset
    ]
    assert replies == [("abcde", f"no{EOS}"), (f"yes{EOS}", f"no{EOS}"), (f"yes{EOS}", f"no{EOS}"), ("n", "o")]
    assert max(len(document) for pair in dataset for document in pair) <= room
    assert report.filtered == {"same_tokens": 1, "prompt_too_long": 2}
    assert (report.num_truncated, report.num_kept) == (2, 4)
    assert report.num_rows == report.num_bad + sum(report.filtered.values()) + report.num_kept == 7


def test_everything_filtered_says_what_would_work(load: Load, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", row("hi", "same start", "same end"), row("longer", "same start", "same end"))
    with pytest.raises(InputError, match=rf"raise --max_seq_length: the shortest prompt alone has {HEAD + 2} tokens"):
        load(path, "1.0", max_seq_length=HEAD)
    with pytest.raises(InputError, match=r"same_tokens 2\); raise --max_seq_length, so that the replies"):
        load(path, "1.0", max_seq_length=HEAD + 7)
    with pytest.raises(InputError, match="--max_seq_length 1 leaves no room"):
        load(path, "1.0", max_seq_length=1)


# --- bad rows -------------------------------------------------------------------------------------------


def bad_file(path: Path) -> Path:
    return write(
        path,
        row("q", "yes", "no"),
        b"not json",
        b'{"chosen": "\xff"}',
        b"[]",
        row("q", "  ", "no"),
        row("q", "same", "same"),
        {"chosen": []},
        {"chosen": row("a", "b", "c")["chosen"], "rejected": row("x", "b", "c")["rejected"]},
        row("q", "no", "yes"),
    )


def test_bad_rows_stop_with_the_first_few_and_the_count(load: Load, tmp_path: Path) -> None:
    path = bad_file(tmp_path / "rows.jsonl")
    with pytest.raises(InputError) as caught:
        load(path, "1.0")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("7 rows of 9 cannot be used (not_json 1, not_utf8 1, not_object 1, empty_reply 1")
    assert [line.split(": ")[0].strip() for line in lines[1:6]] == [f"{path}, line {i}" for i in range(2, 7)]
    assert lines[6].strip() == "... and 2 more"
    assert lines[7].startswith('found   {"chosen": [{') and '"content": "  "' in lines[7]
    assert lines[8].startswith('wanted  {"prompt": "text", "chosen": "text"')
    assert "docs/data.md" in lines[9] and "--on_bad_row skip" in lines[10] and len(lines) == 11
    assert not (tmp_path / "cache").exists()


def test_the_same_reason_is_told_once(load: Load, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *({"text": f"Hello {i} " + "o" * 99, "n": i} for i in range(30)), b"[]")
    with pytest.raises(InputError) as caught:
        load(path, "1.0")
    lines = str(caught.value).splitlines()
    assert lines[0] == "31 rows of 31 cannot be used (missing_key 30, not_object 1):"
    assert lines[1].strip() == f"{path}, line 1: no key 'chosen'; the row has 'text', 'n' (and so 29 rows more)"
    assert lines[2].strip().startswith(f"{path}, line 31: the row is a JSON list")
    assert lines[3] == f'found   {{"text": "Hello 0 {"o" * 32}…", "n": 0}}'
    assert "--columns" in lines[-2] and len(lines) == 7


def test_columns_by_other_names(load: Load, tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.jsonl", {"prompt": "hi", "chosen": "yes", "rejected": "no"})
    other = write(tmp_path / "other.jsonl", {"question": "hi", "chosen": "no", "rejected": "yes", "prompt": "not this"})
    dataset, report = load(plain, "1.0")
    swapped = ["prompt=question", "chosen=rejected", "rejected=chosen"]
    renamed, told = load(other, "1.0", columns=swapped)
    assert list(renamed) == list(dataset)
    assert (report.warnings, told.warnings) == ((), ())
    _, told = load(plain, "1.0", columns=["system=persona"])
    assert told.warnings == (f"--columns system=persona: no row of {plain} has a column 'persona'",)
    with pytest.raises(InputError, match="no key 'chosen'; the row has 'prompt', 'rejected', 'better'"):
        load(plain, "1.0", columns=["better=chosen"])


def test_bad_rows_can_be_skipped_and_counted(load: Load, tmp_path: Path) -> None:
    path = bad_file(tmp_path / "rows.jsonl")
    dataset, report = load(path, "1.0", on_bad_row="skip")
    assert len(dataset) == report.num_kept == 2
    kinds = ("not_json", "not_utf8", "not_object", "empty_reply", "chosen_equals_rejected", "not_messages")
    assert report.bad == dict.fromkeys((*kinds, "prompts_differ"), 1)
    assert len(report.bad_rows) == 5
    text = "\n".join(report.lines())
    assert "7 rows skipped as malformed" in text and "line 2: not JSON" in text
    with pytest.raises(InputError, match="7 rows of 9"):
        load(path, "1.0")  # what was skipped before is no excuse now


def test_rows_that_the_template_refuses_are_bad_rows(
    load: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = "{{ raise_exception('no system turn') if messages[0]['role'] == 'system' }}{% for m in messages %}"
    monkeypatch.setattr(
        tokenizer, "chat_template", strict + "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    )
    fine = "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
    monkeypatch.setattr(tokenizer, "chat_template", strict + fine)
    system = {"role": "system", "content": "be kind"}
    refused = {key: [system, *turns] for key, turns in row("q", "yes", "no").items()}
    path = write(tmp_path / "rows.jsonl", row("q", "yes", "no"), refused)
    with pytest.raises(InputError, match=r"line 2: .* refuses the conversation: no system turn"):
        load(path, "1.0", chat_template_name=None)
    many = write(tmp_path / "many.jsonl", refused, *({**refused, "n": i} for i in range(3)))
    with pytest.raises(InputError) as caught:
        load(many, "1.0", chat_template_name=None)
    assert str(caught.value).splitlines()[1].endswith("no system turn (and so 3 rows more)")
    assert "wanted" not in str(caught.value), "the form of these rows is right"
    dataset, report = load(path, "1.0", chat_template_name=None, on_bad_row="skip")
    assert (len(dataset), report.bad) == (1, {"template": 1})
    assert any("without an end-of-turn token" in warning for warning in report.warnings)


def test_nothing_but_bad_rows(load: Load, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", b"x", b"y")
    with pytest.raises(InputError, match="2 rows of 2 cannot be used"):
        load(path, "1.0", on_bad_row="skip")


# --- the report -----------------------------------------------------------------------------------------


def test_report_round_trip_and_words(load: Load, tmp_path: Path) -> None:
    _, report = load(bad_file(tmp_path / "rows.jsonl"), "2.0", on_bad_row="skip", max_seq_length=HEAD + 3)
    assert DataReport.from_json(report.to_json()) == report
    assert report.num_truncated == 2
    assert "2 rows with a reply cut to --max_seq_length" in report.lines()
    assert f"kept in {report.cache_file}" in report.lines()


def test_rows_that_are_mostly_cut_are_a_warning(load: Load, tmp_path: Path) -> None:
    """Once, with the remedy, also where they are read from the cache; a few long ones are not."""
    rows = [row("hi", "yes", f"no {i}" + "!" * (30 if i < 2 else 0)) for i in range(20)]
    path, room = write(tmp_path / "rows.jsonl", *rows), HEAD + 2 + 5
    expected = (
        f"20 of 20 rows are cut to --max_seq_length {room - 2}, and teach replies that break off: raise it, or leave "
        "such rows out"
    )
    for _ in range(2):
        _, report = load(path, "1.0", max_seq_length=room - 2)
        assert report.warnings == (expected,)
    _, report = load(path, "1.0", max_seq_length=room)
    assert report.num_truncated == 12 and report.warnings[0].startswith("12 of 20 rows are cut")
    _, report = load(path, "1.0", max_seq_length=room + 20)
    assert (report.num_truncated, report.warnings) == (2, ())


def test_progress_counts_distinct_rows(load: Load, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    one, two = numbered(tmp_path / "one.jsonl", 700), numbered(tmp_path / "two.jsonl", 5)
    load(one, "2.0", two, "1.0", on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (705, 705)
    assert all(total == 705 for _, total in seen)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


# --- the cache ------------------------------------------------------------------------------------------


def same(one: TokenDataset, other: TokenDataset) -> bool:
    return list(one) == list(other) and one.fingerprint == other.fingerprint


def test_second_load_reads_the_file(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = numbered(tmp_path / "rows.jsonl", 9)
    first, report = load(path, "1.5")
    monkeypatch.setattr(PreferenceBuilder, "build", None)  # would fail if it were built again
    second, again = load(path, "1.5")
    assert same(first, second)
    assert again.from_cache and not report.from_cache
    assert (again.num_pairs, again.num_tokens, again.cache_file) == (14, report.num_tokens, report.cache_file)
    assert list((tmp_path / "cache" / "pairs").iterdir()) == [Path(report.cache_file)]


def test_everything_that_matters_is_in_the_cache_key(
    load: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = numbered(tmp_path / "rows.jsonl", 9)
    bigger = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), eos_token=EOS
    )
    bigger.add_tokens(["yes"])
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"max_seq_length": 64},
        {"chat_template_name": "simple_chat"},
        {"on_bad_row": "skip"},
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
    ],
    ids=["half", "one byte short", "empty", "one bit flipped", "header length", "too long"],
)
def test_a_damaged_cache_file_is_built_again(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    rows = numbered(tmp_path / "rows.jsonl", 9)
    first, report = load(rows, "1.0")
    expected = list(first)
    path = Path(report.cache_file)
    whole = path.read_bytes()
    path.unlink()  # `first` is not mapped from it, but be sure
    path.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        second, again = load(rows, "1.0")
    assert "damaged" in caplog.text
    assert list(second) == expected and not again.from_cache
    assert path.read_bytes() == whole


def test_a_crash_while_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    from safetensors.numpy import load_file

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
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(DamagedFile):
        read_arrays(other)


def test_unwritable_cache_and_where_it_is(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--cache_dir: cannot write to"):
        load(numbered(tmp_path / "rows.jsonl", 2), "1.0", cache_dir=tmp_path / "file")
    assert cache_root("given") == Path("given")
    monkeypatch.setenv("OPEN_INSTRUCT_CACHE", "/from/environment")
    assert cache_root(None) == Path("/from/environment")
    monkeypatch.delenv("OPEN_INSTRUCT_CACHE")
    assert cache_root(None) == Path.home() / ".cache" / "open_instruct"


# --- made pairs -----------------------------------------------------------------------------------------


def prompts(path: Path) -> list[str]:
    return [json.loads(line)["chosen"][-2]["content"] for line in path.read_text().splitlines()]


def test_synthetic_pairs_are_valid_varied_and_disjoint(load: Load, tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    write_synthetic_preferences(train, num_rows=600, seed=1, holdout_path=held_out, num_holdout_rows=100)
    dataset, report = load(train, "1.0", held_out, "1.0", max_seq_length=4096)
    assert len(dataset) == 700 and report.num_truncated == 0
    asked = prompts(train) + prompts(held_out)
    assert len(set(asked)) == 700
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
