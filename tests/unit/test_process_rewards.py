"""Process reward models: the loss, rows of both forms, what is refused, and P(right) of the steps of a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from open_instruct.cli import main
from open_instruct.data.report import DataReport
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.errors import InputError
from open_instruct.objectives.objective import TokenLogprobs
from open_instruct.objectives.prm import PRM, StepBuilder, step_losses
from open_instruct.packing.steps import BatchShape, step_batch
from open_instruct.records import ROW_VALUES, Batch, Check
from open_instruct.toys.tiny import write_tiny_model
from open_instruct.verifiers.pool import VerifierPool
from tests.unit.objective_runs import config_of, load_rows, write_rows
from tests.unit.scored import score

PLACEHOLDER = "@"
STEPS = {"prompt": "1 + 2 + 3?", "completions": ["1 + 2 = 3", "3 + 3 = 7", "So 7."], "labels": [True, False, False]}
TEXT = {"input": "1 + 2 + 3?\n1 + 2 = 3 @\n3 + 3 = 7 @\nSo 7. @ the end", "label": ["+", "-", 0.25]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", family="qwen3", tie=True)


def loaded(
    folder: Path, tmp_path: Path, rows: list[dict[str, Any]], *, placeholder: str | None = None, length: int = 200
) -> tuple[TokenDataset, DataReport]:
    return load_rows(
        StepBuilder,
        [write_rows(tmp_path / "rows.jsonl", rows), "1.0"],
        AutoTokenizer.from_pretrained(folder),
        tmp_path,
        max_seq_length=length,
        separator="\n",
        placeholder=placeholder,
        reward_tokens=["+", "-"],
    )


# The loss


@pytest.mark.parametrize("scale", [1e-3, 1.0, 80.0, 1e4])
def test_the_loss_is_the_cross_entropy_of_two_words(scale: float) -> None:
    generator = np.random.default_rng(0)
    logits = torch.tensor(generator.normal(size=(40, 2)) * scale, dtype=torch.float32, requires_grad=True)
    right = torch.tensor(np.concatenate([np.repeat([0.0, 1.0], 10), generator.uniform(size=20)]), dtype=torch.float32)
    losses = step_losses(logits, right)
    losses.sum().backward()
    x = np.diff(logits.detach().numpy().astype(np.float64))[:, 0]  # how much more is said for "-"
    p = right.numpy().astype(np.float64)
    # p log(1 + e^x) + (1 - p) log(1 + e^-x), written so that no power overflows.
    softplus = np.log1p(np.exp(-np.abs(x)))
    expected = p * (np.maximum(x, 0) + softplus) + (1 - p) * (np.maximum(-x, 0) + softplus)
    np.testing.assert_allclose(losses.detach(), expected, rtol=1e-6, atol=1e-6 * max(1, scale / 100))
    said_right = np.where(x > 0, np.exp(-np.abs(x)), 1.0) / (1 + np.exp(-np.abs(x)))
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad[:, 0], said_right - p, rtol=1e-5, atol=1e-6 * max(1, scale / 10))
    np.testing.assert_allclose(logits.grad[:, 0], -logits.grad[:, 1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cut", [[7], [3, 4], [0, 7]])
def test_the_loss_is_a_mean_over_all_steps_however_they_are_cut(cut: list[int]) -> None:
    logits = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    right = torch.tensor([1, 0, 0.5, 1, 0, 0.75, 0.25])
    loss, total, start = PRM.bind(config_of(PRM)), 0.0, 0
    for size in cut:
        part = slice(start, start + size)
        scores = TokenLogprobs(
            logprobs_N=logits[part, 0], sequence_ids_N=torch.zeros(size, dtype=torch.long), values_NC=logits[part]
        )
        batch = Batch(packed=SimpleNamespace(), row_ids=(), values={ROW_VALUES: right[part]})  # type: ignore[arg-type]
        total += float(loss.function(scores, batch, {"labels": 7}).loss)
        start += size
    assert total == pytest.approx(float(step_losses(logits, right).mean()), rel=1e-6)


# Flags and rows


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tensor_parallel_degree", "2"], "--tensor_parallel_degree 2: two logits are read"),
        (["--reward_tokens", "+"], "takes two tokens"),
        (["--reward_tokens", "+", "+"], "takes two tokens"),
        (["--step_separator", ""], "an empty text ends no step"),
    ],
)
def test_flags_that_cannot_work_are_refused(words: list[str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        PRM.validate(config_of(PRM, *words))


def test_a_word_of_several_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert PRM.bound(config_of(PRM), tokenizer).class_ids == tuple(tokenizer.convert_tokens_to_ids(["+", "-"]))
    with pytest.raises(InputError, match="'wrong' has to be one token"):
        PRM.bound(config_of(PRM, "--reward_tokens", "+", "wrong"), tokenizer)
    with pytest.raises(InputError, match="'ки' has to be one token, and this tokenizer makes 4 of it"):
        loaded(folder, tmp_path, [TEXT], placeholder="ки")


@pytest.mark.parametrize("row", [STEPS, STEPS | {"prompt": [{"role": "user", "content": "1 + 2 + 3?"}]}])
def test_a_step_is_read_at_the_last_token_of_its_separator(folder: Path, tmp_path: Path, row: dict[str, Any]) -> None:
    dataset, _ = loaded(folder, tmp_path, [row])
    (document,) = dataset[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = [tokenizer.decode(document.token_ids[: span.stop]) for span in document.responses]
    assert document.reads_ends and all(len(span) == 1 for span in document.responses)
    assert [text.endswith(step + "\n") for text, step in zip(before, row["completions"], strict=True)] == [True] * 3
    assert "1 + 2 + 3?" in before[0] and dataset.values(0).tolist() == [1, 0, 0]
    assert ("<|assistant|>" in before[0]) == isinstance(row["prompt"], list)


def test_a_placeholder_is_where_it_is_read(folder: Path, tmp_path: Path) -> None:
    dataset, _ = loaded(folder, tmp_path, [TEXT], placeholder=PLACEHOLDER)
    (document,) = dataset[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    whole = TEXT["input"].rpartition(PLACEHOLDER)[0] + PLACEHOLDER
    assert tokenizer.decode(document.token_ids) == whole, "what follows the last one is read by nobody"
    read = [document.token_ids[span.start] for span in document.responses]
    assert read == [tokenizer.convert_tokens_to_ids(PLACEHOLDER)] * 3
    assert dataset.values(0).tolist() == [1, 0, 0.25]


@pytest.mark.parametrize("placeholder", [None, PLACEHOLDER])
def test_a_cut_takes_whole_steps_with_their_labels(folder: Path, tmp_path: Path, placeholder: str | None) -> None:
    row = STEPS if placeholder is None else TEXT
    (whole,) = loaded(folder, tmp_path, [row], placeholder=placeholder)[0][0]
    second = whole.responses[1].stop
    for length, num_steps in ((len(whole), 3), (len(whole) - 1, 2), (second, 2), (second - 1, 1)):
        dataset, report = loaded(folder, tmp_path, [row, row], placeholder=placeholder, length=length)
        (document,) = dataset[0]
        assert len(document.responses) == num_steps == len(dataset.values(0))
        assert document.token_ids == whole.token_ids[: len(document)]
        cut = 2 * (3 - num_steps)
        assert [warning.split(" ")[0] for warning in report.warnings] == ([str(cut)] if cut else [])
    # Labels stay beside their steps in a batch of several rows.
    shape = BatchShape(
        documents_per_sample=1,
        max_samples_per_microbatch=2,
        max_microbatches=1,
        max_seq_length=200,
        packing=True,
        pad_token_id=0,
    )
    step = step_batch(dataset, [(0,), (1,)], shape=shape, rank=0, num_ranks=1)
    assert step.counts["labels"] == 2 and step.microbatches[0].values[ROW_VALUES].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("row", "placeholder", "told"),
    [
        (STEPS | {"labels": [True, False]}, None, "'labels' has 2 labels for 3 steps"),
        (STEPS | {"labels": [True, "?", False]}, None, "'labels', step 2: '\\?' is neither '\\+' nor '-'"),
        (STEPS | {"labels": [True, 1.5, False]}, None, "'labels', step 2: 1.5 is neither"),
        (STEPS | {"labels": True}, None, "'labels' must be a list with a label for each step, not a boolean"),
        (STEPS | {"completions": []}, None, "'completions' must be a list of steps"),
        (STEPS | {"completions": ["a", " ", "b"]}, None, "'completions', step 2: must be text that is not empty"),
        (STEPS | {"prompt": ""}, None, "'prompt' is empty"),
        (TEXT, None, "no key 'prompt': rows are a 'prompt' and 'completions' without --placeholder_token"),
        (STEPS, PLACEHOLDER, "no key 'input': rows are an 'input' with the placeholder with --placeholder_token"),
        (TEXT | {"label": ["+"]}, PLACEHOLDER, "'label' has 1 label for 3 steps"),
        (TEXT | {"input": "no step"}, PLACEHOLDER, "'input' has no '@'"),
        (TEXT | {"input": "@ a @ b @"}, PLACEHOLDER, "'input' begins with the placeholder"),
        (TEXT | {"input": 7}, PLACEHOLDER, "'input' must be text, not a number"),
    ],
)
def test_a_row_that_will_not_do_is_told_with_its_line(
    folder: Path, tmp_path: Path, row: dict[str, Any], placeholder: str | None, told: str
) -> None:
    good = STEPS if placeholder is None else TEXT
    with pytest.raises(InputError, match=f"line 2: {told}"):
        loaded(folder, tmp_path, [good, row], placeholder=placeholder)


def test_a_placeholder_that_the_tokenizer_joins_is_told_of(folder: Path, tmp_path: Path) -> None:
    """A token of its own after a line break, and part of another one after a space."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = sorted(
        word[1:] for word in tokenizer.get_vocab() if len(word) == 2 and word[0] == "Ġ" and word[1].isalpha()
    )
    joined = next(word for word in words if word not in "one two")
    row = {"input": f"one\n{joined} two {joined}", "label": ["+", "+"]}
    assert tokenizer.tokenize(f"two {joined}")[-1] == f"Ġ{joined}"
    with pytest.raises(InputError, match=r"1 of 2 placeholders .* are tokens of their own"):
        loaded(folder, tmp_path, [row], placeholder=joined)


# What is done with one


def exported_to(folder: Path, to: Path, *, placeholder: str | None) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    words = [] if placeholder is None else ["--placeholder_token", placeholder]
    more = PRM.exported(config_of(PRM, *words), AutoTokenizer.from_pretrained(folder), None)  # type: ignore[arg-type]
    (to / "config.json").write_text(json.dumps(json.loads((to / "config.json").read_text()) | dict(more)))
    return to


def expected_scores(folder: Path, texts: list[str]) -> list[float]:
    """By transformers: each text tokenised by itself, read at its last token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids: list[int] = []
    ends = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        ends.append(len(ids) - 1)
    words = tokenizer.convert_tokens_to_ids(["+", "-"])
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, ends][:, words]
    scores: list[float] = logits.softmax(dim=1)[:, 0].tolist()
    return scores


@pytest.mark.slow
@pytest.mark.parametrize("placeholder", [None, PLACEHOLDER])
def test_steps_of_a_file_and_of_a_completion_are_scored(folder: Path, tmp_path: Path, placeholder: str | None) -> None:
    model = exported_to(folder, tmp_path / "prm", placeholder=placeholder)
    prompt, lines = "1 + 2 + 3?", list(STEPS["completions"])
    if placeholder is None:
        texts = [prompt, *(line + "\n" for line in lines)]
        row: dict[str, Any] = {"prompt": prompt, "completions": lines}
        expected = expected_scores(folder, texts)[1:]
    else:
        texts = [f"{prompt}{lines[0]} @", *(f"\n{line} @" for line in lines[1:])]
        row = {"input": "".join(texts)}
        expected = expected_scores(folder, texts)
    write_rows(tmp_path / "rows.jsonl", [row])
    assert main(["score", str(model), str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out.jsonl")]) == 0
    scored = json.loads((tmp_path / "out.jsonl").read_text())
    assert scored == row | {"scores": pytest.approx(expected, abs=1e-5)}

    # A process that loads torch and the model for each, so each word is asked for in one case.
    word, reward = ("product", math.prod(expected)) if placeholder is None else ("min", min(expected))
    pool = VerifierPool([f"prm:{model},{word}"], num_processes=1, timeout_s=300)
    try:
        check = Check(verifier="prm", ground_truth=None)
        found = score(pool, check, "\n".join(lines), prompt=prompt)
        cut = score(pool, check, "\n".join([*lines, "and so"]), prompt=prompt, is_truncated=True)
        assert cut.score == pytest.approx(found.score), "a step that was cut is none"
        assert score(pool, check, " ", prompt=prompt).score == 0
    finally:
        pool.close()
    assert found.problem is None and found.score == pytest.approx(reward, abs=1e-5)


def test_it_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model_name_or_path", "allenai/OLMo-2-1124-7B", "--gpus_per_node", "8", "--json"]
    assert main(["plan", "prm", *words]) == 0
    workload = json.loads(capsys.readouterr().out)["workload"]
    assert workload["algorithm"] == "prm" and workload["tokens_per_microbatch"] == 8 * 2048
