"""Reward models: that no cut of a batch changes one, and what is exported is what transformers
scores with.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from open_instruct.batching.documents import pack_documents
from open_instruct.data.chat import ChatFormat
from open_instruct.training.model.forward import token_logprobs
from tests.ranks.objective_case import (
    assert_resumed_bitwise,
    assert_same,
    read,
    stopped_and_not,
    train,
)
from tests.ranks.objective_rows import write_pairs
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import NUM_ROWS, OF_EVERY_RUN, STEPS_OF_AN_EPOCH, TrainCase
from tests.unit.objectives.test_reward_scores import CPU, document, opened, scoring_model
from tests.unit.token_data import encoded

pytestmark = pytest.mark.extended

# And whether their embeddings are tied.
OTHER_FAMILIES = {"olmo3": False, "qwen3": True, "llama": True}
CENTER = 0.1


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    folder = tmp_path_factory.mktemp("reward")
    write_pairs(folder / "rows.jsonl", num_rows=NUM_ROWS, seed=1)
    write_pairs(folder / "held_out.jsonl", num_rows=12, seed=2)
    model = write_shallow_model(folder / "model", family="olmo2")
    for family, tie in OTHER_FAMILIES.items():
        write_shallow_model(folder / family, family=family, tie=tie)
    own = {
        "eval_mixer_list": [folder / "held_out.jsonl", "1.0"],
        "margin": True,
        "center_rewards_coefficient": CENTER,
        "max_seq_length": 448,
        "max_train_steps": STEPS_OF_AN_EPOCH,
    }
    return TrainCase(model=model, rows=folder / "rows.jsonl", folder=folder, own_flags=own)


@pytest.fixture(scope="module")
def one_process(case: TrainCase) -> TrainCase:
    once: dict[str, Any] = {
        "max_train_steps": 1,
        "per_device_train_batch_size": NUM_ROWS,
        "learning_rate": 1e-9,
    }
    train(
        "reward_model",
        1,
        case.command("base", prefix_sharing="on"),
        case.command("unshared", batch=1, prefix_sharing="off"),
        case.command("padded", batch=2, packing=False),
        *stopped_and_not(case),
        case.command(
            "goes_on",
            **once,
            model_name_or_path=case.folder / "base" / "hf_model",
            eval_mixer_list=[],
        ),
        case.command(
            "in_bfloat16", single_gpu_mode=True, param_dtype="bfloat16", max_train_steps=1
        ),
        *(
            case.command(
                f"from_{family}",
                **once | {"max_train_steps": 1},
                model_name_or_path=case.folder / family,
            )
            for family in OTHER_FAMILIES
        ),
    )
    return case


NUMBERS = ("loss", *(f"rewards/{name}" for name in ("accuracy", "margin", "mean", "std")))


@pytest.mark.parametrize("name", ["unshared", "padded"])
def test_cutting_does_not_matter(one_process: TrainCase, name: str) -> None:
    assert_same(one_process, name, "base", NUMBERS, num_steps=STEPS_OF_AN_EPOCH)


def test_ranks_do_not_matter(one_process: TrainCase) -> None:
    context = {"context_parallel_degree": 2, "batch": 4}
    train(
        "reward_model",
        2,
        one_process.command("fsdp_2", ranks=2),
        one_process.command("context_2", **context),
        one_process.command("bfloat16_2", ranks=2, param_dtype="bfloat16", max_train_steps=1),
    )
    for name in ("fsdp_2", "context_2"):
        assert_same(one_process, name, "base", NUMBERS, num_steps=STEPS_OF_AN_EPOCH)
    # Rewards in bfloat16 would have 8 bits: here they differ from those in float32 by the model's
    # rounding alone.
    loss, exact = (one_process.metrics(name)[0]["loss"] for name in ("bfloat16_2", "base"))
    assert loss == pytest.approx(exact, rel=2e-2) and loss != exact
    assert one_process.metrics("in_bfloat16")[0]["loss"] == pytest.approx(exact, rel=2e-2)


def test_stopped_run_resumes_bitwise(one_process: TrainCase) -> None:
    assert_resumed_bitwise(one_process)


def test_metrics_have_the_names_scripts_read(one_process: TrainCase) -> None:
    own = {
        f"rewards/{name}" for name in ("accuracy", "margin", "chosen", "rejected", "mean", "std")
    }
    assert all(set(row) == OF_EVERY_RUN | own for row in one_process.metrics("base"))
    for row in read(one_process.folder / "base" / "eval.jsonl"):
        assert sum(row["eval/rewards/histogram"]) == 2 * row["eval/num_pairs"]
        assert (
            len(row["eval/rewards/histogram"]) == 10 == len(row["eval/rewards/histogram_edges"]) - 1
        )


def rewards_by_transformers(folder: Path, conversations: list[list[dict[str, str]]]) -> list[float]:
    """Padded on the right, in the order given."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert (
        not report["missing_keys"]
        and not report["unexpected_keys"]
        and not report["mismatched_keys"]
    )
    texts = [tokenizer.apply_chat_template(turns, tokenize=False) for turns in conversations]
    encoded = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    with torch.no_grad():
        rewards: list[float] = model(**encoded).logits[:, 0].tolist()
    return rewards


@pytest.mark.parametrize("run", ["base", *(f"from_{family}" for family in OTHER_FAMILIES)])
def test_transformers_gives_the_rewards_that_we_give(one_process: TrainCase, run: str) -> None:
    folder = one_process.folder / run / "hf_model"
    chats = [row["chosen"] for row in read(one_process.rows)][:8]
    model, form = (
        scoring_model(opened(folder)),
        ChatFormat.choose(AutoTokenizer.from_pretrained(folder), None),
    )
    ours = [
        token_logprobs(
            model, pack_documents([document(*encoded(form, chat).token_ids)]), device=CPU
        ).logprobs_N.item()
        for chat in chats
    ]
    assert ours == pytest.approx(rewards_by_transformers(folder, chats), abs=1e-5)
    assert len(set(ours)) == 8
    if run == "base":
        held_out, config = (
            read(one_process.folder / run / "eval.jsonl")[-1],
            AutoConfig.from_pretrained(folder),
        )
        scale = (held_out["eval/rewards/mean"], held_out["eval/rewards/std"])
        assert (config.score_mean, config.score_std) == pytest.approx(scale, abs=1e-6)


def test_loss_is_that_of_the_paper_on_the_rewards_of_transformers(one_process: TrainCase) -> None:
    """Of a run that goes on from an exported reward model, whose head is therefore read and not
    drawn.
    """
    rows = read(one_process.rows)
    start_model = one_process.folder / "base" / "hf_model"
    tokenizer = AutoTokenizer.from_pretrained(start_model)
    texts = [
        tokenizer.apply_chat_template(row[key], tokenize=False)
        for row in rows
        for key in ("chosen", "rejected")
    ]
    lengths = map(len, tokenizer(texts, add_special_tokens=False)["input_ids"])
    assert max(lengths) <= 448, "no reply is cut"
    pairs = [(row["chosen"], row["rejected"], row.get("margin", 0.0)) for row in rows]
    rewards = rewards_by_transformers(start_model, [turns for pair in pairs for turns in pair[:2]])
    losses = [
        math.log(1 + math.exp(lost - won + margin)) + CENTER * (won + lost) ** 2
        for won, lost, (_, _, margin) in zip(rewards[::2], rewards[1::2], pairs, strict=True)
    ]
    (first,) = one_process.metrics("goes_on")
    assert first["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    # The mean of held-out rewards is written where there are any.
    for run, has_mean in (("base", True), ("goes_on", False)):
        config = json.loads((one_process.folder / run / "hf_model" / "config.json").read_text())
        assert ("score_mean" in config) == has_mean
    mean = sum(rewards) / len(rewards)
    assert first["rewards/mean"] == pytest.approx(mean, rel=1e-4)
    assert first["rewards/std"] ** 2 == pytest.approx(
        sum((r - mean) ** 2 for r in rewards) / len(rewards), rel=1e-4
    )
    assert first["rewards/accuracy"] == pytest.approx(
        sum(w > x for w, x in zip(rewards[::2], rewards[1::2], strict=True)) / len(pairs)
    )


def test_drawn_head_is_the_same_in_every_family_of_a_width(one_process: TrainCase) -> None:
    """It hangs on the seed and its name alone; a step of no length leaves it as it was drawn."""
    heads = {
        family: load_file(one_process.folder / f"from_{family}" / "hf_model" / "model.safetensors")[
            "score.weight"
        ]
        for family in OTHER_FAMILIES
    }
    for head in heads.values():
        torch.testing.assert_close(head, heads["llama"], rtol=0, atol=1e-7)
        assert float(head.std()) == pytest.approx((head.numel() + 1) ** -0.5, rel=0.2)
