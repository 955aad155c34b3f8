"""Process reward models: that no cut of a batch changes one, and what is exported is what
transformers scores with.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from open_instruct.commands import merge
from tests.ranks.objective_case import (
    assert_opens_whole,
    assert_resumed_bitwise,
    assert_same,
    read,
    stopped_and_not,
    train,
    write,
)
from tests.ranks.objective_rows import write_solutions
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import NUM_ROWS, OF_EVERY_RUN, STEPS_OF_AN_EPOCH, TrainCase

pytestmark = pytest.mark.extended

NUMBERS = ("loss", "accuracy")
WORDS: dict[str, Any] = {"reward_tokens": ["+", "-"], "placeholder_token": "@"}
LORA: dict[str, Any] = {"use_lora": "true", "lora_r": 8, "lora_alpha": 16, "learning_rate": 2e-3}


def with_placeholders(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "input": row["prompt"] + "".join(f"{step} @\n" for step in row["completions"]),
        "values": row["labels"],
    }


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    folder = tmp_path_factory.mktemp("prm")
    for name, num_rows, seed in (("rows", NUM_ROWS, 1), ("held_out", 12, 2)):
        write_solutions(folder / f"{name}.jsonl", num_rows=num_rows, seed=seed)
        write(
            folder / f"{name}_of_text.jsonl", map(with_placeholders, read(folder / f"{name}.jsonl"))
        )
    model = write_shallow_model(folder / "model", family="qwen3", tie=True)
    own = {
        "eval_mixer_list": [folder / "held_out.jsonl", "1.0"],
        "max_train_steps": STEPS_OF_AN_EPOCH,
    }
    return TrainCase(model=model, rows=folder / "rows.jsonl", folder=folder, own_flags=own)


def words(case: TrainCase, name: str, **flags: Any) -> list[str]:
    """A run that learns two words after placeholders."""
    rows = {
        "mixer_list": [case.folder / "rows_of_text.jsonl", "1.0"],
        "eval_mixer_list": [case.folder / "held_out_of_text.jsonl", "1.0"],
    }
    return case.command(name, **rows, **WORDS, **flags)


@pytest.fixture(scope="module")
def one_process(case: TrainCase) -> TrainCase:
    whole: dict[str, Any] = {
        "max_train_steps": 1,
        "per_device_train_batch_size": NUM_ROWS,
        "learning_rate": 1e-9,
    }
    train(
        "prm",
        1,
        case.command("base"),
        words(case, "words"),
        case.command("adapters", **LORA),
        case.command("padded", packing=False, batch=2),
        *stopped_and_not(case),
        case.command("goes_on", **whole, model_name_or_path=case.folder / "base" / "hf_model"),
        words(case, "whole_words", **whole),
    )
    return case


def test_cutting_a_batch_changes_nothing(one_process: TrainCase) -> None:
    assert_same(one_process, "padded", "base", NUMBERS, num_steps=STEPS_OF_AN_EPOCH)


def test_layouts_of_ranks_change_nothing(one_process: TrainCase) -> None:
    of_base: dict[str, dict[str, Any]] = {
        "fsdp_2": {"ranks": 2},
        "context_2": {"context_parallel_degree": 2, "batch": 4},
        "tensor_2": {"tensor_parallel_degree": 2},
        "zero_0": {"ranks": 2, "backend": "deepspeed", "deepspeed_stage": 0},
        "zero_1": {"ranks": 2, "backend": "deepspeed", "deepspeed_stage": 1},
        "zero_2": {"ranks": 2, "backend": "deepspeed", "deepspeed_stage": 2},
        "zero_3": {"ranks": 2, "backend": "deepspeed", "deepspeed_stage": 3},
        "zero_split": {"backend": "deepspeed", "deepspeed_stage": 2, "tensor_parallel_degree": 2},
    }
    of_words: dict[str, dict[str, Any]] = {
        "words_tensor_2": {"tensor_parallel_degree": 2},
        "words_context_2": {"context_parallel_degree": 2},
        "words_zero_3": {"ranks": 2, "backend": "deepspeed", "deepspeed_stage": 3},
    }
    of_adapters: dict[str, dict[str, Any]] = {"adapters_tensor_2": {"tensor_parallel_degree": 2}}
    train(
        "prm",
        2,
        *(one_process.command(name, **flags) for name, flags in of_base.items()),
        *(words(one_process, name, **flags) for name, flags in of_words.items()),
        *(one_process.command(name, **LORA, **flags) for name, flags in of_adapters.items()),
    )
    train(
        "prm",
        4,
        one_process.command("hsdp_2x2", ranks=4, fsdp_shard_degree=2, batch=1),
        words(one_process, "words_hsdp_2x2", ranks=4, fsdp_shard_degree=2, batch=1),
    )
    for base, names in {
        "base": [*of_base, "hsdp_2x2"],
        "words": [*of_words, "words_hsdp_2x2"],
        "adapters": [*of_adapters],
    }.items():
        for name in names:
            assert_same(one_process, name, base, NUMBERS, num_steps=STEPS_OF_AN_EPOCH)


def test_resumed_run_is_bitwise_the_undisturbed_one(one_process: TrainCase) -> None:
    assert_resumed_bitwise(one_process)


def test_metrics_are_those_of_the_page(one_process: TrainCase) -> None:
    assert all(set(row) == OF_EVERY_RUN | {"accuracy"} for row in one_process.metrics("base"))
    for row in read(one_process.folder / "base" / "eval.jsonl"):
        steps = sum(len(each["labels"]) for each in read(one_process.folder / "held_out.jsonl"))
        assert row["eval/num_steps"] == steps and 0 <= row["eval/accuracy"] <= 1


def open_whole(folder: Path) -> Any:
    """The model with its head of classes, as transformers opens it, with all of its tensors and no
    others.
    """
    model, report = AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert (
        not report["missing_keys"]
        and not report["unexpected_keys"]
        and not report["mismatched_keys"]
    )
    return model.eval()


def mean_loss(
    model: Any, pieces: list[tuple[list[int], list[int], list[float]]], choose: Any
) -> float:
    """By float64 cross-entropy at the places where steps end: ids, places and P(right) of each
    row.
    """
    losses = []
    for ids, places, labels in pieces:
        with torch.no_grad():
            logits = choose(model(torch.tensor([ids])).logits[0, places]).double()
        right, wrong = logits.log_softmax(1).T.tolist()
        losses += [-(p * a + (1 - p) * b) for p, a, b in zip(labels, right, wrong, strict=True)]
    return sum(losses) / len(losses)


def tokenized(
    tokenizer: Any, row: dict[str, Any], end: str
) -> tuple[list[int], list[int], list[float]]:
    ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
    places = []
    for step in row["completions"]:
        ids += (
            tokenizer(step, add_special_tokens=False)["input_ids"]
            + tokenizer(end)["input_ids"][-1:]
        )
        places.append(len(ids) - 1)
    return ids, places, list(map(float, row["labels"]))


def test_first_loss_is_that_of_transformers_with_the_exported_head(one_process: TrainCase) -> None:
    start = one_process.folder / "base" / "hf_model"
    tokenizer = AutoTokenizer.from_pretrained(start)
    rows = [row | {"prompt": tokenizer.bos_token + row["prompt"]} for row in read(one_process.rows)]
    pieces = [tokenized(tokenizer, row, "\n") for row in rows]
    expected = mean_loss(open_whole(start), pieces, lambda logits: logits.flip(1))
    (first,) = one_process.metrics("goes_on")
    assert first["loss"] == pytest.approx(expected, rel=1e-5)
    config = json.loads((start / "config.json").read_text())
    assert (
        config["id2label"] == {"0": "wrong", "1": "right"} and config["prm_step_separator"] == "\n"
    )


def test_first_loss_of_two_words_is_that_of_transformers(one_process: TrainCase) -> None:
    tokenizer = AutoTokenizer.from_pretrained(one_process.model)
    word_ids = tokenizer.convert_tokens_to_ids(WORDS["reward_tokens"])
    rows = []
    for row in read(one_process.rows):
        first, *others = row["completions"]
        steps = [f"{row['prompt']}{first} ", *(f"\n{step} " for step in others)]
        rows.append(row | {"prompt": "", "completions": steps})
    pieces = [tokenized(tokenizer, row, "@") for row in rows]
    model = AutoModelForCausalLM.from_pretrained(one_process.model, dtype=torch.float32)
    (first_step,) = one_process.metrics("whole_words")
    expected = mean_loss(model, pieces, lambda logits: logits[:, word_ids])
    assert first_step["loss"] == pytest.approx(expected, rel=1e-5)
    assert_opens_whole(one_process.folder / "words")
    config = json.loads((one_process.folder / "words" / "hf_model" / "config.json").read_text())
    assert (config["prm_placeholder_token"], config["prm_reward_tokens"]) == ("@", ["+", "-"])


def test_adapter_with_its_head_opens_in_peft_and_is_the_merged_model(
    one_process: TrainCase,
) -> None:
    run = one_process.folder / "adapters"
    base = AutoModelForTokenClassification.from_pretrained(
        one_process.model, num_labels=2, dtype=torch.float32
    )
    model = PeftModel.from_pretrained(base, str(run / "adapter")).eval()
    ids = torch.arange(6, 40).unsqueeze(0)
    with torch.no_grad():
        ours, theirs = (each(ids).logits for each in (open_whole(run / "hf_model"), model))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    flags = {
        "model_name_or_path": one_process.model,
        "adapter_name_or_path": run / "adapter",
        "output_dir": run / "merged",
    }
    assert (
        merge.main([word for name, value in flags.items() for word in (f"--{name}", str(value))])
        == 0
    )
    for name in ("config.json", "model.safetensors"):
        assert (run / "merged" / name).read_bytes() == (run / "hf_model" / name).read_bytes()
    assert one_process.is_exported_again("adapters") and one_process.is_exported_again("base")
