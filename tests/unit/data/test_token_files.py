"""Folders of token ids that OLMo-core's SFT reads, as `sft` reads them."""

import gzip
import re
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from olmo_core.data import NumpyPackedFSLDatasetConfig, TokenizerConfig

from open_instruct.commands.tiny_model import train_tokenizer
from open_instruct.core.records import Document, Span
from open_instruct.data.eval_split import Side
from open_instruct.data.files.opening import open_rows
from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.data.sft_rows import ReplyBuilder, SFTBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from tests.refusals import refused
from tests.unit.token_data import byte_tokenizer, load_rows, turns, write_rows
from tests.unit.token_folders import Labelled, label, write_token_folder

TOKENIZER = byte_tokenizer()
EOS = int(TOKENIZER.eos_token_id or 0)
TOKENS = "token_ids_part_0000.npy"
MASK = "labels_mask_part_0000.npy"
BOUNDS = "token_ids_part_0000.csv.gz"


def load(
    *mixer_list: str | Path, builder: Any = SFTBuilder, tokenizer: Any = TOKENIZER, **changes: Any
) -> Any:
    settings: dict[str, Any] = {"max_seq_length": 128, "template": "simple_chat"}
    return load_rows(
        partial(load_token_dataset, builder), *mixer_list, tokenizer=tokenizer, **settings | changes
    )


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    conversations = [turns("a", "bc", "d", "e"), turns("f", "g" * 40), turns("h", "i")]
    return write_rows(
        tmp_path / "rows.jsonl", *({"messages": messages} for messages in conversations)
    )


@pytest.fixture
def cached(tmp_path: Path) -> dict[str, Any]:
    return {"cache_dir": tmp_path / "cache"}


@pytest.fixture
def folder(rows: Path, tmp_path: Path, cached: dict[str, Any]) -> Path:
    """What a conversion makes of `rows`."""
    documents = [label(document) for (document,) in load(rows, "1.0", **cached)[0]]
    return write_token_folder(tmp_path / "converted", documents, tokenizer=TOKENIZER)


@pytest.mark.parametrize("max_seq_length", [128, 40])
def test_token_files_are_the_rows_that_they_were_made_of(
    rows: Path, folder: Path, cached: dict[str, Any], max_seq_length: int
) -> None:
    cached["max_seq_length"] = max_seq_length
    from_rows, report_of_rows = load(rows, "1.0", **cached)
    dataset, report = load(folder, "1.0", **cached)
    assert dataset.fingerprint == from_rows.fingerprint
    assert list(dataset) == list(from_rows)
    assert np.array_equal(dataset.num_label_tokens, from_rows.num_label_tokens)
    assert (report.num_tokens, report.num_truncated, report.filtered) == (
        report_of_rows.num_tokens,
        report_of_rows.num_truncated,
        report_of_rows.filtered,
    )
    again, report_again = load(folder, "1.0", **cached)
    assert report_again.from_cache and list(again) == list(dataset)


def test_tokens_stay_in_their_files(folder: Path, cached: dict[str, Any]) -> None:
    """The cache has no copy of them, and what is read is mapped."""
    dataset, _ = load(folder, "2.0", **cached)
    mapped, copied = dataset.token_ids_T.arrays
    assert isinstance(mapped, np.memmap)
    assert len(copied) == 0
    assert len(dataset) == 6 and dataset.key(0) == dataset.key(3)
    assert dataset.find_largest_id() == max(max(document.token_ids) for (document,) in dataset)


def test_memory_holds_a_document_at_a_time(tmp_path: Path, cached: dict[str, Any]) -> None:
    """Of files of 12 MB, and of documents that take 24 kB."""
    num_documents = 1_000
    length = 4_000
    folder = tmp_path / "tokens"
    folder.mkdir()
    ids_T = np.arange(num_documents * length, dtype=np.uint16) % 250
    ids_T.tofile(folder / TOKENS)
    (np.arange(num_documents * length) % length > 1_000).tofile(folder / MASK)
    lines = (f"{n * length},{(n + 1) * length}" for n in range(num_documents))
    (folder / BOUNDS).write_bytes(gzip.compress("\n".join(lines).encode()))
    del ids_T
    cached |= {"max_seq_length": length // 2}
    small = write_token_folder(tmp_path / "small", [([10, 11, EOS], [0, 1, 1])])
    load(small, "1.0", **cached)  # what every data set takes
    tracemalloc.start()
    dataset, _ = load(folder, "4", **cached)
    before, _ = tracemalloc.get_traced_memory()
    dataset, report = load(folder, "1.0", **cached)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(dataset), report.num_truncated) == (num_documents, num_documents)
    assert peak - before < 4e6


def test_rows_and_token_files_may_be_mixed(
    rows: Path, folder: Path, tmp_path: Path, cached: dict[str, Any]
) -> None:
    others = write_rows(tmp_path / "others.jsonl", {"messages": turns("j", "k")})
    mixture = [folder, "1.0", others, "1.0", folder, "1"]
    dataset, _ = load(*mixture, **cached)
    from_rows, _ = load(rows, "1.0", others, "1.0", **cached)
    assert [dataset.key(row) for row in range(4)] == [from_rows.key(row) for row in range(4)]
    assert list(dataset)[:4] == list(from_rows)
    assert dataset.key(4) in {dataset.key(row) for row in range(3)}
    assert list(load(*mixture, **cached)[0]) == list(dataset)


def test_sides_of_an_eval_split_are_all_documents(folder: Path, cached: dict[str, Any]) -> None:
    def read_side(*, is_held_out: bool) -> set[str]:
        side = Side(share=0.6, is_held_out=is_held_out)
        dataset, _ = load(folder, "1.0", side=side, **cached)
        return {dataset.key(row) for row in range(len(dataset))}

    whole, _ = load(folder, "1.0", **cached)
    training = read_side(is_held_out=False)
    held_out = read_side(is_held_out=True)
    assert training and held_out and training.isdisjoint(held_out)
    assert training | held_out == {whole.key(row) for row in range(len(whole))}


def draw_documents(lengths: list[int]) -> list[Labelled]:
    """Documents with an eos inside, context behind the last label, and learned first tokens."""
    generator = np.random.default_rng(3)
    documents: list[Labelled] = []
    for number, length in enumerate(lengths):
        token_ids = generator.integers(5, 250, size=length)
        token_ids[length // 3 :: 4] = EOS
        mask = generator.random(length) < 0.5
        mask[-1] = number % 2
        mask[0] = number % 3 == 0
        documents.append((token_ids.tolist(), mask.tolist()))
    return documents


def test_documents_and_masks_are_those_of_olmo_cores_own_data_set(
    tmp_path: Path, cached: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fills more than half of an instance of OLMo-core's, which therefore packs it alone."""
    limit = 32
    documents = draw_documents([17, 32, 19, 50, 28, 23, 18])
    ends = np.cumsum([len(ids) for ids, _ in documents])
    write_token_folder(tmp_path / "tokens", documents, cuts=ends[[1, 4]].tolist())
    monkeypatch.setenv("OLMO_DATA_PREP_WORKERS", "1")
    stock = NumpyPackedFSLDatasetConfig(
        tokenizer=TokenizerConfig(vocab_size=len(TOKENIZER), eos_token_id=EOS, pad_token_id=0),
        work_dir=str(tmp_path / "work"),
        paths=[str(tmp_path / "tokens" / "token_ids_part_*.npy")],
        label_mask_paths=[str(tmp_path / "tokens" / "labels_mask_*.npy")],
        expand_glob=True,
        sequence_length=limit,
        use_array_if_local=False,  # where documents end is in the metadata
    ).build()
    stock.prepare()
    expected = []
    for index in range(len(stock)):
        item = stock[index]
        mask = item["label_mask"].int().tolist()
        mask[0] = 0  # nothing predicts it, here; there it is the token of another document
        length = limit - mask[::-1].index(1)  # what follows changes no loss, and is left out here
        expected.append((tuple(item["input_ids"][:length].tolist()), mask[:length]))
    dataset, _ = load(tmp_path / "tokens", "1.0", **cached | {"max_seq_length": limit})
    assert len(expected) == len(documents)
    assert sorted(label(document) for (document,) in dataset) == sorted(expected)


def test_document_that_two_files_share_is_two_documents(
    tmp_path: Path, cached: dict[str, Any]
) -> None:
    """As the metadata of both files say, and as OLMo-core reads them."""
    document = ([10, 11, 12, 13, 14, 15], [0, 0, 1, 1, 1, 1])
    write_token_folder(tmp_path / "tokens", [document], cuts=[4])
    dataset, _ = load(tmp_path / "tokens", "1.0", **cached)
    assert list(dataset) == [
        (Document(token_ids=(10, 11, 12, 13), responses=(Span(start=2, stop=4),)),),
        (Document(token_ids=(14, 15), responses=(Span(start=1, stop=2),)),),
    ]


def test_documents_that_teach_nothing_are_left_out(tmp_path: Path, cached: dict[str, Any]) -> None:
    documents = [
        ([10, 11, EOS], [0, 1, 1]),
        ([10, 11, 12], [1, 0, 0]),  # nothing predicts a first token
        ([10] * 200 + [11], [0] * 200 + [1]),
        ([10, 11, 12], [0, 1, 0]),
    ]
    dataset, report = load(write_token_folder(tmp_path / "tokens", documents), "1.0", **cached)
    assert len(dataset) == 2
    assert report.filtered == {"nothing_learned": 1, "prompt_too_long": 1}
    assert any("1 learned part" in warning for warning in report.warnings)


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change_folder(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return change_folder


def rewrite_bounds(text: str) -> Callable[[Path], None]:
    return rewrite("token_ids_part_0000.csv.gz", lambda _: gzip.compress(text.encode()))


def save_as_uint32(folder: Path) -> None:
    path = folder / "token_ids_part_0000.npy"
    np.fromfile(path, dtype=np.uint16).astype(np.uint32).tofile(path)


def save_other_tokenizer(folder: Path) -> None:
    train_tokenizer(["an other text"], vocab_size=270).save_pretrained(folder / "tokenizer")


FAULTS: dict[str, tuple[Callable[[Path], None], str, list[str]]] = {
    "another dtype": (save_as_uint32, "conflict", ["uint32", "uint16"]),
    "mask is shorter": (rewrite(MASK, lambda mask: mask[:-3]), "conflict", [TOKENS]),
    "mask is no mask": (rewrite(MASK, lambda mask: b"\x07" * len(mask)), "bad_row", [TOKENS]),
    "no mask": (lambda folder: (folder / MASK).unlink(), "missing_file", [MASK]),
    "no bounds": (lambda folder: (folder / BOUNDS).unlink(), "missing_file", [BOUNDS]),
    "bounds are damaged": (rewrite(BOUNDS, lambda _: b"\x1f\x8bno"), "unreadable_file", [BOUNDS]),
    "bounds are no numbers": (rewrite_bounds("0,3\nid,4\n"), "bad_row", ["line 2"]),
    "bounds overlap": (rewrite_bounds("0,9\n8,12\n"), "bad_row", ["line 2"]),
    "bounds are outside": (rewrite_bounds("0,100000\n"), "bad_row", ["line 1"]),
    "head of npy": (
        rewrite(TOKENS, lambda content: b"\x93NUMPY" + content[6:]),
        "unreadable_file",
        [TOKENS, "array.tofile"],
    ),
    "ids beyond the vocabulary": (
        rewrite(TOKENS, lambda content: content[:8] + b"\xff\xff" + content[10:]),
        "conflict",
        ["65535", "token 4"],
    ),
    "another tokenizer": (save_other_tokenizer, "conflict", ["--tokenizer_name_or_path"]),
    "conversion did not end": (
        lambda folder: (folder / "_tokens.partial.bin").touch(),
        "unreadable_file",
        ["--resume"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_token_files_that_do_not_fit_are_refused(
    folder: Path, cached: dict[str, Any], fault: str
) -> None:
    change, kind, words = FAULTS[fault]
    change(folder)
    with refused(kind, None, *words):
        load(folder, "1.0", **cached)


def test_tokenizer_of_the_folder_may_be_the_runs(folder: Path, cached: dict[str, Any]) -> None:
    """What the refusal of another tokenizer says to do."""
    save_other_tokenizer(folder)
    other = train_tokenizer(["an other text"], vocab_size=270)
    dataset, _ = load(folder, "1.0", tokenizer=other, **cached)
    assert len(dataset) == 3


def test_what_nothing_reads_is_named(folder: Path, cached: dict[str, Any]) -> None:
    lines = gzip.decompress((folder / BOUNDS).read_bytes()).decode().splitlines()
    start, stop = lines[-1].split(",")
    lines[-1] = f"{int(start) + 2},{stop},an id"
    rewrite_bounds("\n".join(lines))(folder)
    _, report = load(folder, "1.0", columns=["messages=dialogue"], **cached)
    text = "\n".join(report.warnings)
    for words in (r"--columns.*no columns", rf"columns behind.*{BOUNDS}", "2 tokens.*no document"):
        assert re.search(words, text), (words, text)


@pytest.mark.parametrize("builder", [PreferenceBuilder, ReplyBuilder])
def test_forms_that_need_messages_refuse_token_files(
    folder: Path, cached: dict[str, Any], builder: Any
) -> None:
    with refused("conflict", None, str(folder)):
        load(folder, "1.0", builder=builder, **cached)


def test_readers_of_text_refuse_token_files(folder: Path) -> None:
    with refused("unreadable_file", None, "token files"):
        open_rows(str(folder))


def test_token_files_have_one_split(folder: Path, cached: dict[str, Any]) -> None:
    with refused("bad_value", None, "test"):
        load(folder, "1.0", splits=["test"], **cached)


def test_ids_of_a_large_vocabulary_take_four_bytes(tmp_path: Path, cached: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"word{number}" for number in range(2**16)])
    document = ([65_700, 11, 65_701], [0, 1, 1])
    write_token_folder(tmp_path / "tokens", [document], dtype=np.uint32)
    dataset: TokenDataset = load(tmp_path / "tokens", "1.0", tokenizer=tokenizer, **cached)[0]
    assert dataset[0][0].token_ids == (65_700, 11, 65_701)
