"""Distillation whole: no cut of a batch and no sharding changes it, it resumes bitwise, and what it
ends with.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from open_instruct.data.chat import ChatFormat
from open_instruct.data.mixer import parse_mixer_list
from open_instruct.data.sft_rows import SFTBuilder
from open_instruct.data.token_dataset import load_token_dataset
from tests.ranks.objective_case import (
    assert_opens_whole,
    assert_resumed_bitwise,
    assert_same,
    read,
    stopped_and_not,
    train,
)
from tests.ranks.objective_rows import write_conversations
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import NUM_ROWS, OF_EVERY_RUN, TrainCase

pytestmark = pytest.mark.extended

COEF, TEMPERATURE = 0.7, 2.0
TOP_K: dict[str, Any] = {"teacher_top_k": 40, "eval_mixer_list": []}
OWN = ("loss", "ce", "kl")
LORA: dict[str, Any] = {"use_lora": "true", "lora_r": 4, "learning_rate": 5e-3}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    """A student, and a teacher of another family, width and depth, whose head has 64 rows of
    padding.
    """
    folder = tmp_path_factory.mktemp("distill")
    write_conversations(folder / "rows.jsonl", num_rows=NUM_ROWS, seed=1)
    write_conversations(folder / "held_out.jsonl", num_rows=6, seed=2)
    model = write_shallow_model(folder / "model", family="olmo2", is_narrow=False)
    teacher = write_shallow_model(
        folder / "teacher",
        like="mini",
        layers=3,
        is_narrow=False,
        family="qwen3",
        vocab_size=512 + 64,
        seed=1,
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / file, teacher / file)
    flags: dict[str, Any] = {
        "teacher_model_name_or_path": teacher,
        "kd_coef": COEF,
        "kd_temperature": TEMPERATURE,
        "max_train_steps": 3,
    }
    return TrainCase(model=model, rows=folder / "rows.jsonl", folder=folder, own_flags=flags)


@pytest.fixture(scope="module")
def one_process(case: TrainCase) -> TrainCase:
    heldout = {"eval_mixer_list": [case.folder / "held_out.jsonl", "1.0"]}
    itself = {"teacher_model_name_or_path": case.model, "kd_coef": 1, "max_train_steps": 1}
    begun = TOP_K | {
        "adapter_name_or_path": case.folder / "shared" / "adapter",
        "cache_dir": case.folder / "begun",
    }
    shared, apart = (
        LORA | {"teacher_model_name_or_path": each}
        for each in (case.model, stored_otherwise(case.model))
    )
    whole = {"max_train_steps": 1, "per_device_train_batch_size": NUM_ROWS, "learning_rate": 1e-9}
    train(
        "distill",
        1,
        case.command("base", **heldout),
        case.command("padded_one_row_at_a_time", batch=1, packing=False, **heldout),
        case.command("whole_data", **whole),
        case.command("jsd", kd_loss="jsd", kd_beta=0.3, **whole),
        case.command("top_k", **TOP_K),
        case.command("itself", **itself, kd_loss="jsd"),
        case.command("itself_bf16", **itself, param_dtype="bfloat16", single_gpu_mode=True),
        case.command("shared", **shared),
        case.command("apart", **apart),
        case.command("top_k_shared", **shared | begun),
        case.command("top_k_apart", **apart | begun),
        *stopped_and_not(case),
    )
    return case


def stored_otherwise(model: Path) -> Path:
    """The same model, in other bytes."""
    folder = model.parent / "stored_otherwise"
    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    save_file(load_file(file), file, metadata={"format": "pt", "stored": "otherwise"})
    return folder


@pytest.fixture(scope="module")
def on_ranks(one_process: TrainCase) -> TrainCase:
    case = one_process
    heldout = {"eval_mixer_list": [case.folder / "held_out.jsonl", "1.0"]}
    itself = {"teacher_model_name_or_path": case.model, "kd_coef": 1, "max_train_steps": 1}
    elsewhere = {"cache_dir": case.folder / "cache_of_ranks"}
    train(
        "distill",
        2,
        case.command("fsdp_2", ranks=2, **heldout),
        case.command("tensor_2", tensor_parallel_degree=2, batch=4, **heldout),
        case.command("context_2", context_parallel_degree=2, batch=4, **heldout),
        case.command("top_k_fsdp_2", ranks=2, batch=2, **TOP_K, **elsewhere),
        case.command("top_k_tensor_2", tensor_parallel_degree=2, **TOP_K),
        case.command("top_k_context_2", context_parallel_degree=2, **TOP_K),
        case.command("shared_fsdp_2", ranks=2, **LORA | {"teacher_model_name_or_path": case.model}),
        case.command("itself_fsdp_2_bf16", ranks=2, **itself, param_dtype="bfloat16"),
    )
    return case


def assert_same_as(case: TrainCase, base: str, name: str) -> None:
    assert_same(case, name, base, OWN, num_steps=3)


@pytest.mark.parametrize("name", ["padded_one_row_at_a_time", "fsdp_2", "tensor_2", "context_2"])
def test_steps_are_the_same_however_they_are_cut_or_sharded(on_ranks: TrainCase, name: str) -> None:
    assert_same_as(on_ranks, "base", name)


@pytest.mark.parametrize("name", ["top_k_fsdp_2", "top_k_tensor_2", "top_k_context_2"])
def test_steps_with_a_kept_teacher_are_the_same_however_they_are_sharded(
    on_ranks: TrainCase, name: str
) -> None:
    assert_same_as(on_ranks, "top_k", name)


def test_teacher_is_computed_once_when_it_is_kept(on_ranks: TrainCase) -> None:
    log = (on_ranks.folder / "top_k_tensor_2" / "run.log").read_text()
    assert "0 to compute" in log and "loaded the teacher" not in log
    assert "loaded the teacher" in (on_ranks.folder / "top_k_fsdp_2" / "run.log").read_text()
    assert len(list((on_ranks.folder / "cache" / "teacher_distributions").iterdir())) == 1


def test_most_likely_tokens_and_the_rest_diverge_less_than_all(one_process: TrainCase) -> None:
    kept, whole = one_process.metrics("top_k")[0], one_process.metrics("base")[0]
    assert kept["ce"] == whole["ce"] and 0 < kept["kl"] < whole["kl"]


@pytest.mark.parametrize("name", ["itself", "itself_bf16", "itself_fsdp_2_bf16"])
def test_student_that_is_its_own_teacher_is_at_zero(on_ranks: TrainCase, name: str) -> None:
    (first,) = on_ranks.metrics(name)
    assert first["kl"] == first["loss"] == first["grad_norm"] == 0.0 < first["ce"]


@pytest.mark.parametrize(("name", "base"), [("shared", "apart"), ("top_k_shared", "top_k_apart")])
def test_without_its_adapters_a_student_may_be_its_own_teacher(
    on_ranks: TrainCase, name: str, base: str
) -> None:
    """Which is loaded where it is another, and else is not."""
    assert_same_as(on_ranks, base, name)
    assert on_ranks.metrics(name)[-1]["kl"] > 1e-4
    for run, is_shared in ((name, True), (base, False)):
        log = (on_ranks.folder / run / "run.log").read_text()
        assert ("the teacher is the start model" in log, "loaded the teacher" in log) == (
            is_shared,
            not is_shared,
        )
    assert_same_as(on_ranks, "apart", "shared_fsdp_2")


@pytest.mark.parametrize(("name", "beta"), [("whole_data", 0.0), ("jsd", 0.3)])
def test_numbers_are_those_of_transformers(one_process: TrainCase, name: str, beta: float) -> None:
    """Both models as transformers has them, document by document, with the logits of every position
    whole.
    """
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (one_process.model, one_process.own_flags["teacher_model_name_or_path"])
    ]
    dataset, _ = load_token_dataset(
        SFTBuilder,
        entries=parse_mixer_list([str(one_process.rows), "1.0"]),
        chat=ChatFormat.choose(AutoTokenizer.from_pretrained(one_process.model), None),
        max_seq_length=192,
        on_bad_row="error",
        seed=42,
        cache_dir=one_process.folder / "own_cache",
    )
    ce = kl = num_labels = 0.0
    for (document,) in dataset:
        ids = torch.tensor([document.token_ids])
        with torch.no_grad():
            student, teacher = (model(input_ids=ids).logits[0, :, :512] for model in models)
        for span in document.responses:
            positions = slice(span.start - 1, span.stop - 1)
            ce += float(
                F.cross_entropy(student[positions], ids[0, span.start : span.stop], reduction="sum")
            )
            log_q, log_p = (
                each[positions].div(TEMPERATURE).log_softmax(dim=-1) for each in (student, teacher)
            )
            if beta:
                log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
                kl += beta * float(F.kl_div(log_m, log_p, reduction="sum", log_target=True))
                kl += (1 - beta) * float(F.kl_div(log_m, log_q, reduction="sum", log_target=True))
            else:
                kl += float(F.kl_div(log_q, log_p, reduction="sum", log_target=True))
            num_labels += len(span)
    (first,) = one_process.metrics(name)
    assert first["ce"] == pytest.approx(ce / num_labels, rel=1e-5)
    assert first["kl"] == pytest.approx(kl / num_labels, rel=1e-4)
    assert first["loss"] == pytest.approx(
        (1 - COEF) * first["ce"] + COEF * TEMPERATURE**2 * first["kl"], rel=1e-5
    )


def test_metrics_have_the_names_scripts_read(one_process: TrainCase) -> None:
    assert all(set(row) == OF_EVERY_RUN | set(OWN) for row in one_process.metrics("base"))
    before, after = read(one_process.folder / "base" / "eval.jsonl")
    counts = {"step", "eval/num_label_tokens", "eval/num_conversations"}
    assert set(before) == set(after) == {*counts, *(f"eval/{name}" for name in OWN)}
    assert after["eval/loss"] < before["eval/loss"]


def test_stopped_run_resumes_bitwise(one_process: TrainCase) -> None:
    assert_resumed_bitwise(one_process)


def test_student_opens_in_transformers(one_process: TrainCase) -> None:
    model = assert_opens_whole(one_process.folder / "base")
    start = AutoModelForCausalLM.from_pretrained(one_process.model).state_dict()
    assert any(not weight.equal(start[name]) for name, weight in model.state_dict().items())
