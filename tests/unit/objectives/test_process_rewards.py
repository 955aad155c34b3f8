"""Process reward models: the loss, rows of both forms, what is refused, plans, and what scores with
one.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from open_instruct.batching.steps import BatchShape, build_step_batch
from open_instruct.cli import main
from open_instruct.commands.score import main as score_command
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.batch_values import StepLabelValues
from open_instruct.core.errors import InputError
from open_instruct.core.families import FAMILIES
from open_instruct.core.records import Batch, Check
from open_instruct.data.report import DataReport
from open_instruct.data.step_rows import PlaceholderBuilder, StepBuilder
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.models.hf.head_kinds import HEAD_SIZES, find_class
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.objectives.objective import TokenLogprobs
from open_instruct.objectives.prm import PRM, class_shares, step_losses
from open_instruct.rewards.pool import VerifierPool
from open_instruct.rewards.registry import known_verifiers, list_judges
from open_instruct.rewards.reward_models import ProcessRewardModel
from open_instruct.run.pretrained import open_pretrained
from tests.refusals import refused
from tests.unit.objective_runs import config_of, load_rows, write_rows
from tests.unit.objectives.trl_prm import NUM_STEPS, TOLERANCE, train_ours, write_problem
from tests.unit.scored import score

PAGE = Path(__file__).resolve().parents[3] / "docs" / "prm.md"
TRL_LOSSES = Path(__file__).with_name("trl_prm_losses.json")
STEPS = {
    "prompt": "1 + 2 + 3?",
    "completions": ["1 + 2 = 3", "3 + 3 = 7", "So 7."],
    "labels": [True, False, False],
}
TEXT = {
    "input": "1 + 2 + 3?\n1 + 2 = 3 @\n3 + 3 = 7 @\nSo 7. @ the end",
    "values": ["+", "-", 0.25],
}
OF_HEAD: dict[str, Any] = {"classes": ["-", "+"], "right": 1}
OF_WORDS: dict[str, Any] = {"classes": ["+", "-"], "right": 0}
OF_THREE: dict[str, Any] = {"classes": ["+", "=", "-"], "right": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", family="qwen3", tie=True)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def load(
    tokenizer: Any, tmp_path: Path, rows: list[dict[str, Any]], *, length: int = 200, **changes: Any
) -> tuple[TokenDataset, DataReport]:
    """Rows of text are those with 'input' in the first."""
    is_text = "input" in rows[0] and "completions" not in rows[0]
    own: dict[str, Any] = {"step_end": "@", "add_bos": False} if is_text else {"step_end": "\n"}
    return load_rows(
        PlaceholderBuilder if is_text else StepBuilder,
        [write_rows(tmp_path / "rows.jsonl", rows), "1.0"],
        tokenizer,
        tmp_path,
        max_seq_length=length,
        **(own | OF_HEAD | changes),
    )


# The loss


def test_shares_of_a_label_are_those_of_the_classes_it_lies_between() -> None:
    two = class_shares(torch.tensor([0.0, 1.0, 0.25]), 2)
    assert two.tolist() == [[1, 0], [0, 1], [0.75, 0.25]]
    assert class_shares(torch.tensor([0.0, 2.0, 1.0]), 3).tolist() == [
        [1, 0, 0],
        [0, 0, 1],
        [0, 1, 0],
    ]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 80.0, 1e4])
def test_loss_and_gradient_are_those_of_binary_cross_entropy_in_float64(scale: float) -> None:
    generator = np.random.default_rng(0)
    logits = torch.tensor(
        generator.normal(size=(40, 2)) * scale, dtype=torch.float32, requires_grad=True
    )
    labels = np.concatenate([np.repeat([0.0, 1.0], 10), generator.uniform(size=20)]).astype(
        np.float32
    )
    losses = step_losses(logits, class_shares(torch.tensor(labels), 2))
    losses.sum().backward()
    # How much more is said for class 1.
    x = np.diff(logits.detach().numpy().astype(np.float64))[:, 0]
    p = labels.astype(np.float64)
    # P log(1 + e^-x) + (1 - p) log(1 + e^x), where no power overflows.
    softplus = np.log1p(np.exp(-np.abs(x)))
    expected = p * (np.maximum(-x, 0) + softplus) + (1 - p) * (np.maximum(x, 0) + softplus)
    np.testing.assert_allclose(
        losses.detach(), expected, rtol=1e-6, atol=1e-6 * max(1, scale / 100)
    )
    right = np.where(x > 0, 1.0, np.exp(-np.abs(x))) / (1 + np.exp(-np.abs(x)))
    assert logits.grad is not None
    np.testing.assert_allclose(
        logits.grad[:, 1], right - p, rtol=1e-5, atol=1e-6 * max(1, scale / 10)
    )
    np.testing.assert_allclose(logits.grad[:, 0], -logits.grad[:, 1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cut", [[7], [3, 4], [0, 7]])
def test_loss_is_a_mean_over_all_steps_however_they_are_cut(cut: list[int]) -> None:
    logits = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, 0, 0.5, 1, 0, 0.75, 0.25])
    loss = PRM.bind(config_of(PRM))
    total = 0.0
    accuracy = 0.0
    for part in map(slice, np.cumsum([0, *cut[:-1]]).tolist(), np.cumsum(cut).tolist()):
        num = part.stop - part.start
        scores = TokenLogprobs(
            logprobs_N=logits[part, 0],
            sequence_ids_N=torch.zeros(num, dtype=torch.long),
            class_logits_NC=logits[part],
        )
        values = StepLabelValues(labels_N=labels[part])
        batch = Batch(packed=SimpleNamespace(), row_ids=(), values=values)  # type: ignore[arg-type]
        outputs = loss.compute(scores, batch, {"labels": 7})
        total += float(outputs.loss)
        accuracy += float(outputs.metrics["accuracy"].value) * num / 7
    shares = class_shares(labels, 2)
    assert total == pytest.approx(float(step_losses(logits, shares).mean()), rel=1e-6)
    assert accuracy == pytest.approx(float((logits.argmax(1) == shares.argmax(1)).float().mean()))


@pytest.mark.slow
def test_losses_of_five_steps_are_those_that_trl_computed(tmp_path: Path) -> None:
    """By benchmarks/prm_vs_trl.py, with TRL 1.13.0, the last with a PRMTrainer."""
    recorded = json.loads(TRL_LOSSES.read_text())
    model, rows = write_problem(tmp_path)
    train_ours(model, rows, tmp_path / "ours")
    ours = [
        json.loads(line)["loss"]
        for line in (tmp_path / "ours" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(ours) == NUM_STEPS and recorded["made_with"] == "trl==1.13.0"
    assert ours == pytest.approx(recorded["losses"], abs=TOLERANCE)


# Flags and rows


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--reward_tokens", "+"], "reward_tokens"),
        (["--reward_tokens", "+", "+"], "reward_tokens"),
        (["--reward_tokens", "+", ""], "reward_tokens"),
        (["--step_separator", ""], "step_separator"),
        (["--placeholder_token", " "], "placeholder_token"),
        (["--placeholder_token", "+", "--reward_tokens", "+", "-"], "placeholder_token"),
    ],
)
def test_flags_that_cannot_work_are_refused(words: list[str], flag: str) -> None:
    with pytest.raises(InputError, match=f"--{flag}"):
        PRM.validate(config_of(PRM, *words))


def test_words_of_several_tokens_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    bound = PRM.bind(config_of(PRM, "--reward_tokens", "+", "-"))
    assert bound.with_ids(tokenizer).word_ids == tuple(tokenizer.convert_tokens_to_ids(["+", "-"]))
    with pytest.raises(InputError, match="'wrong'"):
        PRM.bind(config_of(PRM, "--reward_tokens", "+", "wrong")).with_ids(tokenizer)
    with pytest.raises(InputError, match=r"--placeholder_token: 'ки'.* 4 "):
        load(tokenizer, tmp_path, [TEXT], step_end="ки")


def test_family_without_a_class_of_the_head_is_refused_with_the_words_as_the_way_out(
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "model", family="olmo2")
    config = config_of(PRM)
    config.model.model_name_or_path = str(model)
    hf_config = load_hf_config(str(model))
    with pytest.raises(InputError, match="--reward_tokens") as caught:
        PRM.export_fields(config, AutoTokenizer.from_pretrained(model), hf_config)
    assert caught.value.kind == "unsupported_model"
    with pytest.raises(InputError, match="--reward_tokens"):
        open_pretrained(config, tmp_path / "out", head=PRM.choose_head(config))
    words = config_of(PRM, "--reward_tokens", "+", "-")
    words.model.model_name_or_path = str(model)
    assert (
        open_pretrained(words, tmp_path / "out", head=PRM.choose_head(words)).names.head
        == "vocabulary"
    )


@pytest.mark.slow
def test_plan_preview_and_run_refuse_such_a_family_before_torch_is_loaded(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", family="olmo2")
    (tmp_path / "steps.jsonl").write_text(
        json.dumps({"prompt": "p", "completions": ["a"], "labels": [1]}) + "\n"
    )
    words = [
        "--model_name_or_path",
        str(model),
        "--mixer_list",
        str(tmp_path / "steps.jsonl"),
        "1.0",
    ]
    run = ["prm", *words, "--output_dir", str(tmp_path / "out")]
    calls = [["plan", "prm", *words, "--gpus_per_node", "8"], ["preview", "prm", *words], run]
    calls.append(["reward_model", *run[1:]])  # which has a class: its rows are what is refused
    program = "import sys; from open_instruct.cli import main\n"
    program += f"print([main(words) for words in {calls!r}])\nassert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[2, 2, 2, 2]" and not (tmp_path / "out").exists()
    assert done.stderr.count("--reward_tokens + -") == 3 and "steps.jsonl" in done.stderr


def test_families_say_which_heads_transformers_has_no_class_for() -> None:
    for model_type, family in FAMILIES.items():
        for head in HEAD_SIZES:
            has_class = find_class(SimpleNamespace(model_type=model_type), head) is not None  # type: ignore[arg-type]
            assert has_class == (head not in family.heads_without_class), (model_type, head)


MESSAGES = [{"role": "user", "content": "1 + 2 + 3?"}]


@pytest.mark.parametrize(
    ("row", "classes", "begins", "labels"),
    [
        (STEPS, OF_HEAD, "<|bos|>1 + 2 + 3?1 + 2 = 3", [1, 0, 0]),
        (STEPS, OF_WORDS, "<|bos|>1 + 2 + 3?1 + 2 = 3", [0, 1, 1]),
        (STEPS | {"labels": [0.9, 0, "+"]}, OF_HEAD, "<|bos|>1", [0.9, 0, 1]),
        (STEPS | {"labels": [0.75, 0, "+"]}, OF_WORDS, "<|bos|>1", [0.25, 1, 0]),
        (STEPS | {"labels": ["=", "+", "-"]}, OF_THREE, "<|bos|>1", [1, 0, 2]),
        (STEPS | {"prompt": "<|bos|>So?"}, OF_HEAD, "<|bos|>So?1 + 2 = 3", [1, 0, 0]),
        (STEPS | {"prompt": MESSAGES}, OF_HEAD, "<|bos|><|user|>\n1 + 2 + 3?", [1, 0, 0]),
        (TEXT, OF_HEAD, "1 + 2 + 3?\n1 + 2 = 3 @", [1, 0, 0.25]),
        (TEXT, OF_WORDS, "1 + 2 + 3?\n1 + 2 = 3 @", [0, 1, 0.75]),
        (TEXT | {"values": TEXT["input"].replace("@", "+")}, OF_HEAD, "1 + 2", [1, 1, 1]),  # type: ignore[attr-defined]
        ({"input": "a@b@", "label": [1, 0.5]}, OF_HEAD, "a@b@", [1, 0.5]),
    ],
)
def test_row_becomes_a_document_that_is_read_where_its_steps_end(
    tokenizer: Any,
    tmp_path: Path,
    row: dict[str, Any],
    classes: dict[str, Any],
    begins: str,
    labels: list[float],
) -> None:
    dataset, _ = load(tokenizer, tmp_path, [row], **classes)
    (document,) = dataset[0]
    text = tokenizer.decode(document.token_ids)
    assert text.startswith(begins) and document.reads_ends
    assert dataset.values(0).tolist() == pytest.approx(labels)
    end = "@" if "input" in row else "\n"
    (end_id,) = tokenizer(end, add_special_tokens=False)["input_ids"]
    assert [document.token_ids[span.stop - 1] for span in document.responses] == [end_id] * len(
        labels
    )
    steps = row.get("completions") or row["input"].split("@")[: len(labels)]
    before = [tokenizer.decode(document.token_ids[: span.stop]) for span in document.responses]
    assert all(text.endswith(step + end) for text, step in zip(before, steps, strict=True))


def test_ids_of_steps_are_those_that_trl_makes(tokenizer: Any, tmp_path: Path) -> None:
    """Prompt, steps and separators tokenised apart, behind a bos token; as its docstring has
    them.
    """
    (document,) = load(tokenizer, tmp_path, [STEPS])[0][0]
    ids = [tokenizer.bos_token_id]
    for text in (
        STEPS["prompt"],
        *(part for step in STEPS["completions"] for part in (step, "\n")),
    ):
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(document.token_ids) == ids


@pytest.mark.parametrize("row", [STEPS, TEXT])
def test_cut_takes_whole_steps_with_their_labels(
    tokenizer: Any, tmp_path: Path, row: dict[str, Any]
) -> None:
    (whole,) = load(tokenizer, tmp_path, [row])[0][0]
    second = whole.responses[1].stop
    for length, num_steps in ((len(whole), 3), (len(whole) - 1, 2), (second, 2), (second - 1, 1)):
        dataset, report = load(tokenizer, tmp_path, [row, row], length=length)
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
    )
    step = build_step_batch(
        dataset,
        [(0,), (1,)],
        shape=shape,
        rank=0,
        num_ranks=1,
        values_class=StepLabelValues,
    )
    values = StepLabelValues.read(step.microbatches[0].values)
    assert step.counts["labels"] == 2 and values.labels_N.tolist() == [1, 1]
    with pytest.raises(InputError, match=r"first_step_too_long 1|prompt_too_long 1"):
        load(tokenizer, tmp_path, [row], length=whole.responses[0].stop - 1)


@pytest.mark.parametrize(
    ("row", "classes", "kind"),
    [
        ({key: STEPS[key] for key in ("prompt", "completions")}, OF_HEAD, "no_labels"),
        (STEPS | {"labels": True}, OF_HEAD, "no_labels"),
        (STEPS | {"labels": [True, False]}, OF_HEAD, "label_count"),
        (STEPS | {"labels": []}, OF_HEAD, "label_count"),
        (STEPS | {"labels": [True]}, OF_HEAD, "label_count"),
        (STEPS | {"labels": [True, "?", False]}, OF_HEAD, "bad_label"),
        (STEPS | {"labels": [True, 1.5, False]}, OF_HEAD, "bad_label"),
        (STEPS | {"labels": [True, float("nan"), False]}, OF_HEAD, "bad_label"),
        (STEPS | {"labels": [True, None, False]}, OF_HEAD, "bad_label"),
        (STEPS | {"labels": [0.5, "+", "-"]}, OF_THREE, "bad_label"),
        (STEPS | {"completions": []}, OF_HEAD, "no_step"),
        (STEPS | {"completions": "a step"}, OF_HEAD, "no_step"),
        (STEPS | {"completions": ["a", " ", "b"]}, OF_HEAD, "bad_step"),
        (STEPS | {"completions": ["a", {"step": "b"}, "c"]}, OF_HEAD, "bad_step"),
        (STEPS | {"completions": ["a", "\ud83d", "c"]}, OF_HEAD, "not_unicode"),
        (STEPS | {"prompt": ""}, OF_HEAD, "bad_prompt"),
        (STEPS | {"prompt": 7}, OF_HEAD, "bad_prompt"),
        ({key: STEPS[key] for key in ("completions", "labels")}, OF_HEAD, "missing_key"),
        (
            {key: STEPS[key] for key in ("prompt", "labels")} | {"input": "a"},
            OF_HEAD,
            "missing_key",
        ),
        (TEXT | {"values": ["+"]}, OF_HEAD, "label_count"),
        (TEXT | {"values": str(TEXT["input"]).replace("@", "?")}, OF_HEAD, "bad_label"),
        (TEXT | {"input": "no step"}, OF_HEAD, "no_step"),
        (TEXT | {"input": "@ a @ b @"}, OF_HEAD, "bad_step"),
        (TEXT | {"input": 7}, OF_HEAD, "bad_step"),
    ],
)
def test_row_that_cannot_be_used_is_refused_with_its_line(
    tokenizer: Any, tmp_path: Path, row: dict[str, Any], classes: dict[str, Any], kind: str
) -> None:
    good = TEXT if "input" in row and "labels" not in row else STEPS
    good = good | ({"labels": ["+", "-", "-"]} if classes is OF_THREE else {})
    with pytest.raises(InputError, match=rf"{kind} 1(.|\n)*line 2: |line 2: (.|\n)*{kind} 1"):
        load(tokenizer, tmp_path, [good, row], **classes)


# What is done with one


def copy_as(folder: Path, to: Path, *words: str) -> Path:
    """The tiny model as a run with these flags would have exported it; a new head is drawn."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    fields = PRM.export_fields(
        config_of(PRM, *words), AutoTokenizer.from_pretrained(folder), load_hf_config(str(folder))
    )
    config = json.loads((to / "config.json").read_text()) | dict(fields)
    (to / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    if "--reward_tokens" not in words:
        tensors = load_file(to / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        draw = torch.Generator().manual_seed(1)
        width = config["hidden_size"]
        tensors["score.weight"] = torch.randn(2, width, generator=draw) / width**0.5
        tensors["score.bias"] = torch.tensor([0.5, -0.5])
        save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def scores_by_transformers(folder: Path, texts: list[str], words: list[str]) -> list[float]:
    """Texts are tokenised apart; a score at the last token of every second one, from the third
    on.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = []
    ends = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        ends.append(len(ids) - 1)
    kind: Any = AutoModelForCausalLM if words else AutoModelForTokenClassification
    with torch.no_grad():
        logits = (
            kind.from_pretrained(folder, dtype=torch.float32)
            .eval()(torch.tensor([ids]))
            .logits[0, ends[2::2]]
        )
    if words:
        return list(logits[:, tokenizer.convert_tokens_to_ids(words)].softmax(1)[:, 0].tolist())
    return list(logits.softmax(1)[:, 1].tolist())


LINES = ["1 + 2 = 3", "3 + 3 = 7", "So 7."]
SEPARATED = ["Q?", LINES[0], "\n", LINES[1], "\n", LINES[2], "\n"]
ON_LINES = ["", f"Q?{LINES[0]} ", "@", f"\n{LINES[1]} ", "@", f"\n{LINES[2]} ", "@"]


@pytest.mark.parametrize(
    ("words", "texts", "option"),
    [
        pytest.param([], SEPARATED, "", marks=pytest.mark.extended),
        pytest.param([], SEPARATED, ",mean", marks=pytest.mark.extended),
        pytest.param(
            ["--placeholder_token", "@"], ON_LINES, ",product,cpu", marks=pytest.mark.extended
        ),
        pytest.param(
            ["--placeholder_token", "@", "--reward_tokens", "+", "-"],
            ON_LINES,
            ",min",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_verifier_scores_the_steps_of_a_completion(
    folder: Path, tmp_path: Path, words: list[str], texts: list[str], option: str
) -> None:
    model = copy_as(folder, tmp_path / "prm", *words)
    expected = scores_by_transformers(
        model, texts, ["+", "-"] if "--reward_tokens" in words else []
    )
    assert len(expected) == 3 and max(expected) - min(expected) > 1e-3
    reduced = {"": min, ",min": min, ",mean": np.mean, ",product,cpu": math.prod}[option](expected)
    pool = VerifierPool(
        RewardSection(
            verifier=[f"prm:{model}{option}"], num_verifier_processes=1, verifier_timeout_s=300
        )
    )
    try:
        check = Check(verifier="prm", ground_truth=None)
        found = score(pool, check, "\n".join(LINES), prompt="Q?")
        ended = score(pool, check, "\n\n".join([*LINES, ""]), prompt="Q?")
        cut = score(pool, check, "\n".join([*LINES, "and so"]), prompt="Q?", is_truncated=True)
        assert score(pool, check, " ", prompt="Q?").score == 0
    finally:
        pool.close()
    assert found.problem is None and found.score == pytest.approx(reduced, abs=1e-5)
    assert cut.score == ended.score == pytest.approx(found.score), (
        "what was cut is no step, and a blank line is none"
    )


@pytest.mark.parametrize("prompt", ["Q?", "<|bos|>Q?"])
def test_verifier_writes_the_bos_that_texts_with_placeholders_began_with(
    folder: Path, tmp_path: Path, prompt: str
) -> None:
    """Once, also where the policy's prompt has it."""
    model = copy_as(folder, tmp_path / "prm", *PLACEHOLDER, "--add_bos")
    judge = ProcessRewardModel(str(model))
    judge.load()
    expected = scores_by_transformers(model, ["<|bos|>", *ON_LINES[1:]], [])
    assert judge.score_steps(prompt, LINES).tolist() == pytest.approx(expected, abs=1e-5)
    assert expected != pytest.approx(scores_by_transformers(model, ON_LINES, []), abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ("{there}/nowhere", "config.json"),
        ("{there},worst", "min, product, mean"),
        ("{there},min,mean", "mean and min"),
        ("{causal}", "hf_model"),
    ],
)
def test_verifier_refuses_what_is_no_process_reward_model(
    folder: Path, tmp_path: Path, settings: str, part: str
) -> None:
    model = copy_as(folder, tmp_path / "prm")
    word = f"prm:{settings.format(there=model, causal=folder)}"
    with pytest.raises(InputError, match=part) as caught:
        known_verifiers(RewardSection(verifier=[word]))
    assert caught.value.flag == "verifier"
    assert list_judges([word]) == ["prm"]


def test_process_reward_model_is_no_reward_model(folder: Path, tmp_path: Path) -> None:
    model = copy_as(folder, tmp_path / "prm")
    with pytest.raises(InputError, match="num_labels 1"):
        known_verifiers(RewardSection(verifier=[f"reward_model:{model}"]))


def test_lines_of_the_page_score_a_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (rows,) = re.findall(r"<<'end'\n(.*?)^end$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "runs" / "prm").mkdir(parents=True)
    model = copy_as(folder, tmp_path / "runs" / "prm" / "hf_model")
    (tmp_path / "steps.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(PAGE), "exec"), {})
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    for row, before in zip(scored, map(json.loads, rows.splitlines()), strict=True):
        texts = [
            "<|bos|>" + before["prompt"],
            *(part for step in before["completions"] for part in (step, "\n")),
        ]
        assert row == before | {
            "scores": pytest.approx(scores_by_transformers(model, texts, []), abs=1e-5)
        }


TEXT_ROW = {"input": f"Q?{LINES[0]} @\n{LINES[1]} @\n{LINES[2]} @", "id": 7}
LIST_ROW = {"prompt": "Q?", "completions": LINES, "labels": [True, False, False]}
PLACEHOLDER = ["--placeholder_token", "@"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "row", "texts"),
    [
        ([], LIST_ROW, ["<|bos|>Q?", *SEPARATED[1:]]),
        (PLACEHOLDER, TEXT_ROW, ON_LINES),
        (PLACEHOLDER, LIST_ROW, ["", f"<|bos|>{ON_LINES[1]}", *ON_LINES[2:]]),
        ([*PLACEHOLDER, "--reward_tokens", "+", "-"], TEXT_ROW, ON_LINES),
        ([*PLACEHOLDER, "--add_bos"], TEXT_ROW, ["<|bos|>", *ON_LINES[1:]]),
        ([*PLACEHOLDER, "--add_bos"], LIST_ROW, ["<|bos|>", *ON_LINES[1:]]),
    ],
)
def test_score_command_writes_a_score_for_each_step(
    folder: Path, tmp_path: Path, words: list[str], row: dict[str, Any], texts: list[str]
) -> None:
    """Beside a row of one step, with which it is padded, and cut behind its second step."""
    model = copy_as(folder, tmp_path / "prm", *words)
    expected = scores_by_transformers(
        model, texts, ["+", "-"] if "--reward_tokens" in words else []
    )
    short = {"input": "Q?1 @"} if "input" in row else {"prompt": "Q?", "completions": ["1"]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (row, short)))
    out = tmp_path / "scored.jsonl"
    command = [
        "score",
        str(model),
        str(tmp_path / "rows.jsonl"),
        "--output",
        str(out),
        "--param_dtype",
        "float32",
    ]
    assert main(command) == 0
    first, second = map(json.loads, out.read_text().splitlines())
    assert first == row | {"scores": pytest.approx(expected, abs=1e-5)}
    assert len(second["scores"]) == 1 and 0 < second["scores"][0] < 1
    tokenizer = AutoTokenizer.from_pretrained(model)
    num_fitting = sum(
        len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts[:5]
    )
    assert main([*command, "--max_seq_length", str(num_fitting)]) == 0
    first, _ = map(json.loads, out.read_text().splitlines())
    assert first == row | {"scores": pytest.approx(expected[:2], abs=1e-5), "truncated": True}


def test_score_command_refuses_rows_of_the_other_form_and_what_is_no_model_of_steps(
    folder: Path, tmp_path: Path
) -> None:
    model = copy_as(folder, tmp_path / "prm")
    rows = write_rows(tmp_path / "rows.jsonl", [LIST_ROW, TEXT_ROW])
    command = [str(model), str(rows), "--output", str(tmp_path / "out.jsonl")]
    with refused("bad_row", None, "line 2", "completions"):
        score_command(command)
    with refused("conflict", "normalize", "score_mean"):
        score_command([*command, "--normalize"])
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    with refused("unsupported_model", None, "Qwen3ForCausalLM", "prm"):
        score_command(command)
    assert not (tmp_path / "out.jsonl").exists()


def test_plan_counts_the_head_and_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--model_name_or_path",
        "Qwen/Qwen3-8B",
        "--gpus_per_node",
        "8",
        "--json",
        "--activation_checkpointing",
        "full",
    ]
    assert main(["plan", "prm", *words]) == 0
    of_head = json.loads(capsys.readouterr().out)["workload"]
    assert of_head["algorithm"] == "prm" and of_head["tokens_per_microbatch"] == 8 * 2048
    assert main(["plan", "prm", *words, "--reward_tokens", "+", "-"]) == 0
    of_words = json.loads(capsys.readouterr().out)["workload"]
    assert (
        of_words["label_tokens_per_microbatch"] == of_head["label_tokens_per_microbatch"] < 8 * 2048
    )
