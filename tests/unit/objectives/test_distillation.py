"""Distillation: divergences against the papers' formulas, their gradients, chunks of the head, and
what is refused.
"""

import math
import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from open_instruct.batching.documents import pack_documents
from open_instruct.commands.plan import parse_request
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.core.batch_values import TeacherValues
from open_instruct.core.errors import InputError, RunError
from open_instruct.core.records import Batch, Document, PackedBatch, Span, StepBatch
from open_instruct.losses.distillation import divergence, keep_top_k, top_k_divergence
from open_instruct.models.build import build_model
from open_instruct.models.heads.logprob_head import LogprobHead, Measure
from open_instruct.objectives.distill import (
    DISTILL,
    DistillationLoss,
    DistillConfig,
    bind,
    describe_teacher,
)
from open_instruct.objectives.objective import LossOutputs, TokenLogprobs
from open_instruct.parallel.layout import find_layout
from open_instruct.planning.plan import Plan, make_plan
from open_instruct.planning.subject.read_shape import model_shape
from open_instruct.planning.subject.workload import Scoring
from open_instruct.run.pretrained import open_pretrained
from open_instruct.training.model.forward import hidden_at_labels, place_at_labels, token_logprobs
from open_instruct.training.row_cache import RowCache
from open_instruct.training.teacher import TeacherComparison
from tests.refusals import refused
from tests.unit.objective_runs import config_of, train_module
from tests.unit.small_models import (
    CPU,
    VOCAB_SIZE,
    hf_config,
    new_model,
    random_model,
    with_random_weights,
)

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
EXTREMES = {
    "ordinary": lambda: torch.randn(6, 50, dtype=torch.float64),
    "peaked": lambda: 60 * torch.randn(6, 50, dtype=torch.float64),
    "one token": lambda: torch.nn.functional.one_hot(torch.arange(6), 50).double() * 700,
    "flat": lambda: torch.full((6, 50), 3.0, dtype=torch.float64),
    "far from 0": lambda: 1e4 + torch.randn(6, 50, dtype=torch.float64),
}


def by_definition(
    logits: torch.Tensor, teacher: torch.Tensor, beta: float, temperature: float
) -> torch.Tensor:
    """Equations (1) and (3) of arXiv:2306.13649, with p the teacher; the logarithm of a mixture by
    logaddexp.
    """
    log_q, log_p = ((each / temperature).log_softmax(dim=-1) for each in (logits, teacher))
    if beta == 0:
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    if beta == 1:
        return (log_q.exp() * (log_q - log_p)).sum(dim=-1)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    return beta * (log_p.exp() * (log_p - log_m)).sum(-1) + (1 - beta) * (
        log_q.exp() * (log_q - log_m)
    ).sum(-1)


@pytest.mark.parametrize("of_teacher", EXTREMES)
@pytest.mark.parametrize("of_student", EXTREMES)
def test_values_and_gradients_are_the_papers(of_student: str, of_teacher: str) -> None:
    torch.manual_seed(0)
    logits, teacher = EXTREMES[of_student]().requires_grad_(), EXTREMES[of_teacher]()
    weights = torch.linspace(0.5, 2.0, len(logits), dtype=torch.float64)
    for beta, temperature in product(BETAS, [1.0, 0.5, 4.0]):
        ours = divergence(logits, teacher, beta=beta, temperature=temperature)
        theirs = by_definition(logits, teacher, beta, temperature)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
        assert (ours >= -1e-12).all()
        gradients = [
            torch.autograd.grad((values * weights).sum(), logits)[0] for values in (ours, theirs)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("beta", BETAS)
def test_gradient_over_kept_tokens_is_that_of_small_differences(beta: float) -> None:
    torch.manual_seed(0)
    logits, teacher = (
        torch.randn(3, 7, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 7).double(),
    )
    kept = keep_top_k(teacher, 3, temperature=1.7).double()
    torch.autograd.gradcheck(
        lambda logits: top_k_divergence(logits, kept, beta=beta, temperature=1.7), (logits,)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_student_that_equals_its_teacher_is_at_zero(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    teacher = (20 * torch.randn(5, 1000)).to(dtype).float()
    for beta in BETAS:
        logits = teacher.clone().requires_grad_()
        values = divergence(logits, teacher, beta=beta, temperature=0.7)
        (gradient,) = torch.autograd.grad(values.sum(), logits)
        assert not values.any() and not gradient.any()


def test_tokens_that_cannot_happen_count_nothing() -> None:
    logits = torch.tensor([[1.0, 2.0, -math.inf], [1.0, 2.0, 3.0]], requires_grad=True)
    teacher = torch.tensor([[2.0, 1.0, -math.inf], [2.0, 1.0, -math.inf]])
    for beta in (0.0, 0.5):
        values = divergence(logits, teacher, beta=beta)
        (gradient,) = torch.autograd.grad(values.sum(), logits)
        assert values.isfinite().all() and gradient.isfinite().all() and (values > 0).all()
    without = divergence(logits[:1, :2], teacher[:1, :2], beta=0.5)
    torch.testing.assert_close(divergence(logits[:1], teacher[:1], beta=0.5), without)
    # The reverse divergence would be infinite: it is that of the student without such a token.
    values = divergence(logits, teacher, beta=1.0)
    torch.testing.assert_close(values, divergence(logits[:, :2], teacher[:, :2], beta=1.0))
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    (expected,) = torch.autograd.grad(
        divergence(logits[:, :2], teacher[:, :2], beta=1.0).sum(), logits
    )
    torch.testing.assert_close(gradient, expected)
    for beta in BETAS:  # nor does a row without a label bring NaN, whose gradient is 0
        kept = keep_top_k(torch.tensor([[2.0, 1.0, -math.inf, -math.inf]]), 3)
        some = torch.tensor([[1.0, 2.0, 3.0, 300.0]], requires_grad=True)
        (gradient,) = torch.autograd.grad(0 * top_k_divergence(some, kept, beta=beta).sum(), some)
        assert not gradient.any()


@pytest.mark.parametrize("beta", BETAS)
def test_kept_tokens_and_the_rest_are_a_distribution(beta: float) -> None:
    torch.manual_seed(0)
    logits, teacher = (
        3 * torch.randn(4, 20, dtype=torch.float64),
        3 * torch.randn(4, 20, dtype=torch.float64),
    )
    kept = keep_top_k(teacher, 5, temperature=2.0)
    assert kept.shape == (4, 11) and kept.dtype == torch.float32
    torch.testing.assert_close(
        kept[:, 5:].double().exp().sum(dim=-1), torch.ones(4).double(), rtol=1e-6, atol=0
    )

    def lumped(values: torch.Tensor) -> torch.Tensor:
        probs = (values / 2.0).softmax(dim=-1)
        chosen = probs.gather(1, teacher.topk(5).indices)
        return torch.cat([chosen, 1 - chosen.sum(dim=-1, keepdim=True)], dim=-1).log()

    ours = top_k_divergence(logits, kept, beta=beta, temperature=2.0)
    torch.testing.assert_close(
        ours, by_definition(lumped(logits), lumped(teacher), beta, 1.0), rtol=1e-5, atol=1e-6
    )
    whole = divergence(logits, teacher, beta=beta, temperature=2.0)
    assert (ours <= whole + 1e-6).all(), (
        "tokens that are lumped together cannot be told apart better"
    )
    almost_all = top_k_divergence(logits, keep_top_k(teacher, 19, 2.0), beta=beta, temperature=2.0)
    torch.testing.assert_close(almost_all, whole, rtol=1e-5, atol=1e-6)


# The head.

DOCUMENTS = [
    Document(
        token_ids=tuple(range(3, 14)), responses=(Span(start=4, stop=7), Span(start=9, stop=11))
    ),
    Document(token_ids=tuple(range(40, 46)), responses=(Span(start=2, stop=6),)),
]
LAID_OUT = {"packed": pack_documents, "padded": partial(pack_documents, packing=False)}


def flags(*words: str) -> DistillConfig:
    teacher = (
        [] if "--teacher_model_name_or_path" in words else ["--teacher_model_name_or_path", "T"]
    )
    config: DistillConfig = config_of(DISTILL, *teacher, *words)
    return config


def comparison_of(config: DistillConfig, *, vocab_size: int = VOCAB_SIZE) -> TeacherComparison:
    """With a teacher of another family, its rows of the head beyond `vocab_size` being padding."""
    model = deepcopy(random_model("qwen3")).requires_grad_(False)  # other tests share it
    opened = TeacherComparison(
        teacher=describe_teacher(config.distillation), pretrained=None, vocab_size=vocab_size
    )  # type: ignore[arg-type]
    if config.distillation.teacher_top_k is not None:
        return opened
    return replace(opened, model=model, head_VD=model.lm_head.w_out.weight.detach())


def logits_at_labels(family: str, packed: PackedBatch) -> torch.Tensor:
    """Of each document by itself, without our head."""
    parts = []
    for document in DOCUMENTS:
        logits = random_model(family)(torch.tensor([document.token_ids])).float()[0]
        parts += [logits[span.start - 1 : span.stop - 1] for span in document.responses]
    return torch.cat(parts)


@pytest.mark.parametrize(
    "words", [[], ["--kd_loss", "jsd", "--kd_temperature", "2"], ["--teacher_top_k", "9"]]
)
@pytest.mark.parametrize("positions_per_chunk", [1, 2, 1000])
@pytest.mark.parametrize("laid_out", LAID_OUT)
def test_chunks_and_rows_change_nothing(
    laid_out: str, positions_per_chunk: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, student = flags(*words), new_model("olmo2")
    packed = LAID_OUT[laid_out](DOCUMENTS)
    monkeypatch.setattr(LogprobHead, "max_logits_bytes", positions_per_chunk * 8 * 4 * VOCAB_SIZE)
    comparison = comparison_of(config)
    teacher = comparison.teacher
    with torch.no_grad():
        teacher_NV = logits_at_labels("qwen3", packed)
    values = TeacherValues()
    if teacher.keep is not None:
        kept = token_logprobs(
            random_model("qwen3"), packed, device=CPU, measure=Measure(teacher.keep)
        ).measured_N
        torch.testing.assert_close(kept, teacher.keep(teacher_NV), rtol=1e-4, atol=1e-4)
        values = TeacherValues(stored_numbers=kept.detach().flatten())
        teacher_NV = kept.detach()
    batch = Batch(packed=packed, row_ids=(0, 1), values=values)

    scores = token_logprobs(
        student, packed, device=CPU, measure=comparison.measure(student, batch, device=CPU)
    )
    expected_N = teacher.compare(logits_at_labels("olmo2", packed), teacher_NV)
    assert scores.measured_N is not None and len(scores.measured_N) == 9
    torch.testing.assert_close(scores.measured_N, expected_N, rtol=1e-4, atol=1e-5)
    counts = {"labels": 12}
    outputs = bind(config.distillation).compute(scores, batch, counts)
    outputs.loss.backward()
    coef, temperature = 0.5, config.distillation.kd_temperature
    plain = random_model("olmo2")
    plain.zero_grad()
    ce_N = -scores.logprobs_N.detach()
    ((1 - coef) * label_logprobs(plain, packed).neg().sum() / 12).backward()
    (
        coef
        * temperature**2
        * teacher.compare(logits_at_labels("olmo2", packed), teacher_NV).sum()
        / 12
    ).backward()
    for (name, ours), theirs in zip(student.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)
    expected = ((1 - coef) * ce_N.sum() + coef * temperature**2 * expected_N.detach().sum()) / 12
    torch.testing.assert_close(outputs.loss.detach(), expected, rtol=1e-4, atol=1e-5)
    assert {name: metric.weight for name, metric in outputs.metrics.items()} == {
        "loss": 9,
        "ce": 9,
        "kl": 9,
    }


def label_logprobs(model: torch.nn.Module, packed: PackedBatch) -> torch.Tensor:
    return token_logprobs(model, packed, device=CPU).logprobs_N


def test_heads_are_cut_to_the_tokens_that_both_have() -> None:
    comparison, student = comparison_of(flags(), vocab_size=70), random_model("olmo2")
    packed = pack_documents(DOCUMENTS)
    batch = Batch(packed=packed, row_ids=(0, 1))
    measure = comparison.measure(student, batch, device=CPU)
    with torch.no_grad():
        ours = token_logprobs(student, packed, device=CPU, measure=measure).measured_N
        both = (logits_at_labels(family, packed)[:, :70] for family in ("olmo2", "qwen3"))
        torch.testing.assert_close(ours, divergence(*both, beta=0.0), rtol=1e-4, atol=1e-5)


def test_model_that_is_its_own_teacher_is_at_zero() -> None:
    student = random_model("qwen3")
    packed = pack_documents(DOCUMENTS)
    for words in ([], ["--kd_loss", "reverse"], ["--kd_loss", "jsd", "--kd_beta", "0.3"]):
        measure = comparison_of(flags(*words)).measure(
            student, Batch(packed=packed, row_ids=(0, 1)), device=CPU
        )
        measured_N = token_logprobs(student, packed, device=CPU, measure=measure).measured_N
        assert measured_N is not None and not measured_N.any()


def test_numbers_stand_beside_their_labels() -> None:
    model = random_model("olmo2")
    for lay_out in LAID_OUT.values():
        packed = lay_out(DOCUMENTS)
        numbers = torch.arange(18.0).view(9, 2)
        measure = Measure(
            lambda logits_NV, beside: beside, (place_at_labels(model, packed, numbers, device=CPU),)
        )
        with torch.no_grad():
            assert torch.equal(
                token_logprobs(model, packed, device=CPU, measure=measure).measured_N, numbers
            )
        assert hidden_at_labels(model, packed, model, CPU).shape[-1] == 32


# What is kept.


def test_cache_gives_back_what_was_put_in(tmp_path: Path) -> None:
    from tests.unit.training.test_training_pieces import make_pairs

    dataset = make_pairs(3)
    cache = RowCache(tmp_path / "folder" / "kept.safetensors")
    assert cache.find_missing_rows(dataset) == [0, 1, 2]
    numbers = {row: np.arange(4.0 * (row + 1), dtype=np.float32) + 100 * row for row in range(3)}
    for row in (2, 0):
        cache.add(dataset.key(row), numbers[row])
    cache.write()
    again = RowCache(cache.path)
    assert len(again) == 2 and again.find_missing_rows(dataset) == [1]
    again.add(dataset.key(1), numbers[1])
    rows = again.attach_numbers(dataset)
    assert all(np.array_equal(rows.values(row), numbers[row]) for row in range(3))
    assert (
        rows.fingerprint == dataset.fingerprint
        and rows[1] == dataset[1]
        and not len(dataset.details_C)
    )
    cache.path.write_bytes(cache.path.read_bytes()[:-3])
    damaged = RowCache(cache.path)
    assert len(damaged) == 0


# The teacher's vocabulary.


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student; a teacher whose head is padded; one of another vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "student", family="olmo2", vocab_size=300)
    write_tiny_model(folder / "other", family="olmo2", vocab_size=290)
    write_tiny_model(folder / "padded", family="qwen3", vocab_size=320)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "student" / file, folder / "padded" / file)
    return folder


def opened(folders: Path, *words: str) -> TeacherComparison:
    config = flags(*words)
    config.model.model_name_or_path = str(folders / "student")
    student = open_pretrained(config, folders / "out")
    return TeacherComparison.open(
        describe_teacher(config.distillation),
        student,
        config=config,
        layout=find_layout(config.parallel, (1,), config.backend),
    )


def test_padded_head_is_cut(folders: Path) -> None:
    teacher = opened(folders, "--teacher_model_name_or_path", str(folders / "padded"))
    assert teacher.vocab_size == 300
    assert teacher.pretrained.hf_config.vocab_size == 320


def test_teacher_of_another_vocabulary_is_refused_with_both_sizes(folders: Path) -> None:
    with pytest.raises(InputError) as refused:
        opened(folders, "--teacher_model_name_or_path", str(folders / "other"))
    told = str(refused.value)
    assert (
        "its tokenizer has 290 tokens (its head 290 rows), the student's 300 (its head 300)" in told
    )
    assert "is no token there and id 290 here" in told


def test_more_tokens_than_there_are_cannot_be_kept(folders: Path) -> None:
    words = ["--teacher_model_name_or_path", str(folders / "padded")]
    assert opened(folders, *words, "--teacher_top_k", "299").teacher.num_kept == 299
    with refused("conflict", "teacher_top_k", "300"):
        opened(folders, *words, "--teacher_top_k", "300")


# The plan.

LARGE = [
    "--model_name_or_path",
    "allenai/OLMo-2-0425-1B",
    "--teacher_model_name_or_path",
    "allenai/OLMo-2-0325-32B",
]


def planned(*words: str) -> Plan:
    return make_plan(parse_request(["distill", *LARGE, "--gpus_per_node", "8", *words]).setting)


def test_plan_counts_the_teacher() -> None:
    plan, without = planned(), planned("--teacher_top_k", "64")
    shape = model_shape("allenai/OLMo-2-0325-32B")
    assert plan.workload.scorings == (Scoring(shape=shape, stands_as="teacher", num_values=0),)
    assert (plan.workload.num_values, without.workload.num_values, without.workload.scorings) == (
        2,
        2,
        (),
    )
    phases, phases_without = (
        {phase.name: dict(phase.parts) for phase in each.phases} for each in (plan, without)
    )
    teacher_bytes = phases["backward"]["teacher"]
    # Float32 shards of an eighth each, and the head's matrix in bfloat16.
    assert teacher_bytes == pytest.approx(
        4 * shape.num_params / 8 + 2 * shape.vocab_size * shape.d_model, rel=1e-3
    )
    assert all("teacher" not in parts for parts in phases_without.values())
    assert plan.peak.total_bytes == without.peak.total_bytes + teacher_bytes
    gathered = [
        sum(e.num_bytes for e in each.exchanges if e.collective == "all_gather")
        for each in (plan, without)
    ]
    assert gathered[0] - gathered[1] == pytest.approx(2 * shape.num_params, rel=1e-2)
    assert plan.time.compute_s > 5 * without.time.compute_s


# Flags and evaluation.


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--kd_beta", "0.3"], "--kd_beta 0.3 is read only with --kd_loss jsd; add that"),
        (
            ["--kd_loss", "jsd", "--kd_beta", "1.5"],
            "--kd_beta 1.5: must be at least 0 and at most 1",
        ),
        (["--kd_temperature", "0"], "--kd_temperature 0.0: must be above 0"),
        (["--kd_coef", "0"], "--kd_coef 0.0: must be above 0"),
        (["--teacher_top_k", "0"], "--teacher_top_k 0: must be at least 1"),
        (["--teacher_model_name_or_path", " "], "--teacher_model_name_or_path is empty"),
    ],
)
def test_flags_that_cannot_work_are_refused(words: list[str], told: str) -> None:
    config = flags(*words)
    with pytest.raises(InputError, match=told.replace("(", r"\(")):
        DISTILL.validate(config)


def test_held_out_numbers_are_means_over_tokens() -> None:
    class Two:
        num_label_tokens = np.array([3, 5])

        def __len__(self) -> int:
            return 2

    config = flags("--kd_coef", "0.25", "--kd_temperature", "2")
    told = DISTILL.evaluate(Two(), np.array([[-6.0, 1.0], [-10.0, 3.0]]), None, config)  # type: ignore[arg-type]
    assert told.row["eval/ce"] == 2.0 and told.row["eval/kl"] == 0.5
    assert told.row["eval/loss"] == pytest.approx(0.75 * 2.0 + 0.25 * 4 * 0.5)
    assert "held-out loss at step 0: 2.0000" in told.sentence.format(when="at step 0")


@pytest.mark.parametrize(("kl", "is_refused"), [(-0.01, True), (-1e-6, False)])
def test_divergence_below_zero_ends_the_run(tmp_path: Path, kl: float, is_refused: bool) -> None:
    class Measured(DistillationLoss):
        def compute(
            self, scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]
        ) -> LossOutputs:
            measured_N = torch.full_like(scores.logprobs_N, kl)
            return super().compute(replace(scores, measured_N=measured_N), batch, counts)

    model = with_random_weights(build_model(hf_config("olmo2"), init_device="cpu"))
    module, _ = train_module(Measured(ce_weight=0.5, kl_weight=0.5), model, tmp_path)
    with_random_weights(module.model)
    batch = Batch(packed=pack_documents(DOCUMENTS), row_ids=(0, 1))
    step = StepBatch(microbatches=(batch,), counts={"rows": 2, "labels": 9, "tokens": 17})
    if is_refused:
        with pytest.raises(
            RunError,
            match=r"kl is -0\.010000, but can never be below 0: what was kept of the teacher",
        ):
            module.policy.forward_backward(step)
    else:
        assert module.policy.forward_backward(step)["kl"] == pytest.approx(kl)
