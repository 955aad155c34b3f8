"""`open-instruct score`: the scores of a file's rows are those that transformers gives, each in its
place.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from open_instruct.commands.score import main
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.core.errors import InputError

WORDS = ["one", "two", "three", "four", "five", "six"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model as transformers saves one."""
    folder = write_tiny_model(tmp_path_factory.mktemp("rm") / "hf_model", family="llama")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    kind: Any = AutoModelForSequenceClassification
    model = kind.from_config(config).float()
    model.config.score_mean, model.config.score_std = 0.25, 0.5
    model.save_pretrained(folder)
    return folder


def conversations(seed: int, count: int = 12) -> list[dict[str, Any]]:
    chance = random.Random(seed)

    def text(length: int) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(length))

    return [
        {"id": index, "prompt": text(3), "completion": text(chance.randint(1, 40))}
        if index % 3 == 0
        else {
            "id": index,
            "messages": [
                {"role": "user", "content": text(3)},
                {"role": "assistant", "content": text(chance.randint(1, 40))},
            ],
        }
        for index in range(count)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(folder: Path, rows: str, out: Path, *more: str) -> list[dict[str, Any]]:
    assert main([str(folder), rows, "--output", str(out), "--param_dtype", "float32", *more]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def transformers_score(folder: Path, row: dict[str, Any], *, longest: int = 10**9) -> float:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    kind: Any = AutoModelForSequenceClassification
    model = kind.from_pretrained(folder).eval()
    messages = row.get("messages") or [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["completion"]},
    ]
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"][:longest]
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


def test_scores_are_those_of_transformers_in_the_order_of_the_rows(
    folder: Path, tmp_path: Path
) -> None:
    rows = conversations(1)
    scored = run(
        folder,
        write_rows(tmp_path / "rows.jsonl", rows),
        tmp_path / "out.jsonl",
        "--batch_tokens",
        "200",
    )
    expected = [transformers_score(folder, row) for row in rows]
    assert [row.pop("score") for row in scored] == pytest.approx(expected, abs=1e-5)
    assert scored == rows
    normal = run(folder, str(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl", "--normalize")
    assert [row["score"] for row in normal] == pytest.approx(
        [(each - 0.25) / 0.5 for each in expected], abs=1e-4
    )


def test_long_row_is_cut_and_says_so(folder: Path, tmp_path: Path) -> None:
    rows = conversations(2, count=4)
    scored = run(
        folder,
        write_rows(tmp_path / "rows.jsonl", rows),
        tmp_path / "out.jsonl",
        "--max_seq_length",
        "12",
    )
    assert any("truncated" in row for row in scored)
    for row, plain in zip(scored, rows, strict=True):
        assert row["score"] == pytest.approx(
            transformers_score(folder, plain, longest=12), abs=1e-5
        )


def test_what_cannot_be_scored_is_refused_and_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [*conversations(3, count=2), {"messages": "text"}])
    language_model = write_tiny_model(tmp_path / "model", family="llama")
    good = write_rows(tmp_path / "good.jsonl", conversations(3, count=2))
    out = str(tmp_path / "out.jsonl")
    for words, kind, named in (
        ([str(folder), rows, "--output", out], "bad_row", "rows.jsonl, line 3"),
        ([str(language_model), good, "--output", out], "unsupported_model", "reward_model"),
        ([str(folder), good, "--output", good], "conflict", "--output"),
        (
            [str(folder), str(tmp_path / "none.jsonl"), "--output", out],
            "missing_file",
            "none.jsonl",
        ),
        ([str(folder), "--output", out], "stray_word", "MODEL FILE"),
    ):
        with pytest.raises(InputError) as caught:
            main(words)
        assert (caught.value.kind, named in str(caught.value)) == (kind, True), str(caught.value)
        assert not [path.name for path in tmp_path.iterdir() if "out.jsonl" in path.name]
