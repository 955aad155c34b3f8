"""Reward models: the loss, the head, its rows, what is refused, and what scores with one."""

import json
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from open_instruct.batching.documents import pack_documents
from open_instruct.cli import main
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.batch_values import MarginValues
from open_instruct.core.records import Batch, Check, Document, Span
from open_instruct.data.chat import ChatFormat
from open_instruct.models.heads.value_head import draw_score_matrix
from open_instruct.models.load import stream_load
from open_instruct.objectives.objective import TokenLogprobs
from open_instruct.objectives.reward_model import (
    REWARD_MODEL,
    SQUARE,
    RewardBuilder,
    RewardLossSection,
    RewardModelConfig,
    add_std,
    bind,
    pair_losses,
)
from open_instruct.parallel.reduce import combine_microbatches, reduce_metrics
from open_instruct.rewards.pool import VerifierPool
from open_instruct.rewards.registry import known_verifiers
from open_instruct.rl.run_checks import has_other_template
from open_instruct.run.pretrained import Pretrained, open_pretrained
from open_instruct.training.model.forward import token_logprobs
from tests.refusals import refused
from tests.unit.objective_runs import config_of, load_rows, write_rows
from tests.unit.scored import score
from tests.unit.token_data import encoded

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reward_model.md"
CPU = torch.device("cpu")
SEED = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", family="llama", tie=True)


def opened(folder: Path, *, seed: int = SEED) -> Pretrained:
    config = flags("--seed", str(seed))
    config.model.model_name_or_path = str(folder)
    return open_pretrained(config, folder / "out", head="score")


def scoring_model(pretrained: Pretrained, dtype: torch.dtype = torch.float32) -> Any:

    model = pretrained.build(init_device="meta").to(dtype)
    model.init_weights(device=CPU, max_seq_len=64)
    stream_load(model, pretrained.files, pretrained.names)
    return model


def document(*ids: int) -> Document:
    return Document(token_ids=ids, responses=(Span(start=1, stop=len(ids)),), reads_ends=True)


# The loss


@pytest.mark.parametrize("center", [0.0, 0.3])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 50.0, 1e4])
def test_loss_is_the_papers_with_its_gradient(scale: float, center: float) -> None:
    generator = np.random.default_rng(0)
    rewards, margins = generator.normal(size=(2, 64)) * scale, generator.uniform(0, 3, size=64)
    tensor = torch.tensor(rewards, dtype=torch.float32, requires_grad=True)
    losses = pair_losses(tensor, torch.tensor(margins, dtype=torch.float32), center)
    losses.sum().backward()

    won, lost = tensor.detach().numpy().astype(np.float64)
    x = won - lost - margins
    # log(1 + e^-x), written so that no power overflows.
    expected = np.maximum(-x, 0) + np.log1p(np.exp(-np.abs(x))) + center * (won + lost) ** 2
    slope = np.where(
        x >= 0, -np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))), -1 / (1 + np.exp(-np.abs(x)))
    )
    both = 2 * center * (won + lost)
    np.testing.assert_allclose(
        losses.detach(), expected, rtol=1e-6, atol=1e-6 * max(1.0, scale / 100)
    )
    assert tensor.grad is not None
    tolerance = {"rtol": 1e-5, "atol": 1e-6 * max(1.0, scale / 10)}
    np.testing.assert_allclose(tensor.grad, np.stack([slope + both, -slope + both]), **tolerance)


@pytest.mark.parametrize("mean", [0.0, 100.0, 1000.0])
@pytest.mark.parametrize("cut", [[5], [1, 4], [2, 0, 3]])
def test_loss_of_a_batch_does_not_depend_on_its_cut(cut: list[int], mean: float) -> None:
    rewards_2P = mean + 0.05 * torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    margins_P = torch.arange(5.0)
    loss = bind(RewardLossSection(margin=True, center_rewards_coefficient=0.1))
    total, measured, start = 0.0, [], 0
    for size in cut:
        part = slice(start, start + size)
        scores = TokenLogprobs(
            logprobs_N=rewards_2P[:, part].flatten(), sequence_ids_N=torch.arange(2 * size)
        )
        batch = Batch(
            packed=SimpleNamespace(num_sequences=2 * size),  # type: ignore[arg-type]
            row_ids=tuple(range(size)),
            values=MarginValues(margins_P=margins_P[part]),
        )
        outputs = loss.compute(scores, batch, {"rows": 5})
        total += float(outputs.loss)
        measured.append(outputs.metrics)
        start += size
    assert total == pytest.approx(float(pair_losses(rewards_2P, margins_P, 0.1).mean()), rel=1e-6)
    row = add_std(reduce_metrics(combine_microbatches(measured), group=None, device=CPU))
    assert row["rewards/std"] == pytest.approx(
        float(rewards_2P.double().std(correction=0)), rel=1e-6
    )
    assert SQUARE not in row


# The head


def test_drawn_head_hangs_on_the_seed_alone(folder: Path) -> None:
    first, again, other = (
        opened(folder, seed=seed).files.read("score.weight") for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert float(draw_score_matrix(4096, seed=0).std()) == pytest.approx(
        1 / math.sqrt(4097), rel=0.05
    )


def test_words_head_is_left_out_and_a_score_that_is_there_is_read(
    folder: Path, tmp_path: Path
) -> None:
    model = scoring_model(opened(folder))
    assert torch.equal(model.lm_head.w_out.weight, draw_score_matrix(128, seed=SEED))
    copy = copied(folder, tmp_path / "scored", score=torch.full((1, 128), 0.5))
    assert torch.equal(scoring_model(opened(copy)).lm_head.w_out.weight, torch.full((1, 128), 0.5))


def copied(folder: Path, to: Path, *, score: torch.Tensor | None) -> Path:
    """As a folder of transformers' class with a score."""
    to.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors") | (
        {} if score is None else {"score.weight": score}
    )
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"},
        to / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    more = {
        "architectures": ["LlamaForSequenceClassification"],
        "num_labels": 1,
        "id2label": {"0": "score"},
    }
    (to / "config.json").write_text(json.dumps(config | more))
    return to


@pytest.mark.parametrize(
    ("score", "told"),
    [
        (None, ("bad_model", None, "tensor score")),
        (torch.zeros(2, 128), ("bad_model", None, "2", "128")),
    ],
)
def test_folder_whose_score_will_not_do_is_refused(
    folder: Path, tmp_path: Path, score: torch.Tensor | None, told: tuple[Any, ...]
) -> None:
    with refused(*told):
        opened(copied(folder, tmp_path / "damaged", score=score))


def test_score_is_float32_in_a_model_that_computes_in_less(folder: Path) -> None:
    pretrained = opened(folder)
    model = scoring_model(pretrained, torch.bfloat16)
    assert model.lm_head.w_out.weight.dtype == torch.float32
    assert model.embeddings.weight.dtype == model.lm_head.norm.weight.dtype == torch.bfloat16
    heard: list[torch.Tensor] = []
    model.lm_head.w_out.register_forward_pre_hook(lambda module, inputs: heard.append(inputs[0]))
    scores = token_logprobs(model, pack_documents([document(1, 2, 3)]), device=CPU)
    assert heard[0].dtype == scores.logprobs_N.dtype == torch.float32
    assert float(scores.logprobs_N.detach()) == pytest.approx(
        float(heard[0].flatten() @ draw_score_matrix(128, seed=SEED)[0])
    )


def test_score_depends_neither_on_padding_nor_on_packing(folder: Path) -> None:
    model = scoring_model(opened(folder))
    documents = [document(5, 6, 7, 8), document(5, 6, 9), document(11, 300, 12, 40, 41, 42)]
    alone = [
        float(token_logprobs(model, pack_documents([each]), device=CPU).logprobs_N.detach())
        for each in documents
    ]
    shared = pack_documents(documents, groups=[(0, 1), (2,)])
    for packed in (
        pack_documents(documents, pad_to_multiple_of=8),
        pack_documents(documents, packing=False),
        shared,
    ):
        scores = token_logprobs(model, packed, device=CPU)
        order = scores.sequence_ids_N.argsort()
        assert scores.logprobs_N[order].tolist() == pytest.approx(alone, abs=1e-5)


# Flags, tokenizers and rows


def flags(*words: str) -> RewardModelConfig:
    config: RewardModelConfig = config_of(REWARD_MODEL, *words)
    return config


def test_flags_that_cannot_work_are_refused() -> None:
    with refused("conflict", "tensor_parallel_degree", "2"):
        REWARD_MODEL.validate(flags("--tensor_parallel_degree", "2"))


def test_reward_model_that_transformers_lacks_is_refused_before_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrained, tokenizer = opened(folder), AutoTokenizer.from_pretrained(folder)
    assert REWARD_MODEL.export_fields(flags(), tokenizer, pretrained.hf_config)[
        "architectures"
    ] == ["LlamaForSequenceClassification"]
    tokenizer.pad_token = tokenizer.eos_token
    with refused("bad_model", None, "pads with"):
        REWARD_MODEL.export_fields(flags(), tokenizer, pretrained.hf_config)
    tokenizer.pad_token = None
    with refused("bad_model", None, "pad token"):
        REWARD_MODEL.export_fields(flags(), tokenizer, pretrained.hf_config)
    known = "transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
    monkeypatch.setattr(known, {})
    with refused("unsupported_model", None, "transformers"):
        REWARD_MODEL.export_fields(flags(), tokenizer, pretrained.hf_config)


def loaded(
    folder: Path, tmp_path: Path, rows: list[dict[str, Any]], *, margin: bool, length: int = 400
) -> Any:
    mixer_list = [write_rows(tmp_path / "rows.jsonl", rows), "1.0"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return load_rows(
        RewardBuilder, mixer_list, tokenizer, tmp_path, max_seq_length=length, margin=margin
    )


def pair(**more: Any) -> dict[str, Any]:
    ask = {"role": "user", "content": "Is it?"}
    replies = ({"role": "assistant", "content": reply} for reply in ("It is, surely.", "No."))
    return {
        key: [ask, reply] for key, reply in zip(("chosen", "rejected"), replies, strict=True)
    } | more


def test_margins_are_read_with_the_flag_alone(folder: Path, tmp_path: Path) -> None:
    rows = [pair(margin=1.5), pair(), pair(margin=None), pair(margin=3)]
    dataset, _ = loaded(folder, tmp_path, rows, margin=True)
    assert [dataset.values(row).tolist() for row in range(4)] == [[1.5], [0.0], [0.0], [3.0]]
    assert all(document.reads_ends for documents in dataset for document in documents)
    plain, _ = loaded(folder, tmp_path, [pair(margin="much")], margin=False)
    assert not len(plain.details_C)


@pytest.mark.parametrize(
    ("margin", "told"),
    [
        ("much", "not a string"),
        (True, "not a boolean"),
        (float("nan"), "at most 1e+30"),
        (1e31, "at most 1e+30"),
    ],
)
def test_margin_that_is_no_number_is_a_bad_row(
    folder: Path, tmp_path: Path, margin: Any, told: str
) -> None:
    with refused("bad_row", "columns", "2", "'margin'", told):
        loaded(folder, tmp_path, [pair(), pair(margin=margin)], margin=True)


def test_pairs_with_a_reply_that_was_cut_are_counted(folder: Path, tmp_path: Path) -> None:
    dataset, report = loaded(folder, tmp_path, [pair()], margin=False)
    assert not report.warnings
    longest = max(len(document) for document in dataset[0])
    _, report = loaded(folder, tmp_path, [pair()], margin=False, length=longest - 1)
    assert report.warnings[0].startswith(
        "1 pair with a reply that was cut: its reward is read where it does not end"
    )


# What is done with one


@pytest.fixture(scope="module")
def judge(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(
        folder, tmp_path_factory.mktemp("judge") / "model", score=8 * draw_score_matrix(128, seed=3)
    )


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def rewards_of_transformers(folder: Path, texts: list[str]) -> list[float]:
    """Each by itself, at its last token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        return [
            model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits.item()
            for text in texts
        ]


def test_lines_of_the_page_score_a_file(
    judge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `open-instruct` itself computes them, one conversation at a time."""
    rows = [{"messages": chat("a" * n, "b" * (7 * n % 11 + 1)), "id": n} for n in range(9)]
    write_rows(tmp_path / "chats.jsonl", rows)
    (tmp_path / "runs" / "rm").mkdir(parents=True)
    (tmp_path / "runs" / "rm" / "hf_model").symlink_to(judge)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    exec(compile(block, str(PAGE), "exec"), {})
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    model, form = (
        scoring_model(opened(judge)),
        ChatFormat.choose(AutoTokenizer.from_pretrained(judge), None),
    )
    for row, before in zip(scored, rows, strict=True):
        ids = encoded(form, before["messages"]).token_ids
        ours = token_logprobs(model, pack_documents([document(*ids)]), device=CPU).logprobs_N.item()
        assert row == before | {"score": pytest.approx(ours, abs=1e-5)}


@pytest.mark.slow
def test_verifier_gives_the_reward_of_prompt_and_completion(judge: Path) -> None:
    messages = chat("Is it?", "It is, surely.")
    render: Any = partial(AutoTokenizer.from_pretrained(judge).apply_chat_template, tokenize=False)
    asked = render(messages[:1], add_generation_prompt=True)
    (wanted,) = rewards_of_transformers(judge, [render(messages)])
    pool = VerifierPool(
        RewardSection(
            verifier=[f"reward_model:{judge}"], num_verifier_processes=1, verifier_timeout_s=300
        )
    )
    try:
        check = Check(verifier="reward_model", ground_truth=None)
        outcome = score(pool, check, "It is, surely.", prompt=asked)
        cut = score(pool, check, "It is, surely.", prompt=asked, is_truncated=True)
    finally:
        pool.close()
    assert outcome.problem is None and outcome.score == pytest.approx(wanted, abs=1e-5)
    assert not 0 <= outcome.score <= 1 or not 0 <= cut.score <= 1, "a reward may be any number"
    assert abs(cut.score - outcome.score) > 1e-3


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("{there}/nowhere", ("remote", "verifier", "config.json")),
        ("{there},normalise", ("remote", "verifier", "normalize")),
        ("{there},normalize", ("remote", "verifier", "config.json", "score_std")),
    ],
)
def test_verifier_that_cannot_judge_is_refused(
    judge: Path, settings: str, told: tuple[Any, ...]
) -> None:
    with refused(*told):
        known_verifiers(RewardSection(verifier=[f"reward_model:{settings.format(there=judge)}"]))
    with refused("own_code", "verifier"):
        known_verifiers(RewardSection(verifier=[f"reward_model:{judge}", f"reward_model:{judge}"]))


def test_judge_of_another_chat_template_than_the_policys_is_noticed(judge: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(judge)
    own, other = (ChatFormat.choose(tokenizer, name) for name in (None, "simple_chat"))
    assert not has_other_template(judge, own) and has_other_template(judge, other)


def test_causal_model_is_no_reward_model_for_a_verifier(folder: Path) -> None:
    with refused("remote", "verifier", "num_labels 1"):
        known_verifiers(RewardSection(verifier=[f"reward_model:{folder}"]))


def test_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("null")
    with refused("remote", "verifier", "config.json"):
        known_verifiers(RewardSection(verifier=[f"reward_model:{tmp_path}"]))


def test_reward_model_is_planned_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model_name_or_path", "allenai/OLMo-2-1124-7B", "--gpus_per_node", "8", "--json"]
    assert main(["plan", "reward_model", *words, "--activation_checkpointing", "full"]) == 0
    workload = json.loads(capsys.readouterr().out)["workload"]
    assert (
        workload["tokens_per_microbatch"] == 8 * 2 * 2048
        and workload["label_tokens_per_microbatch"] == 2 * 8
    )
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert "reward_model" in told
