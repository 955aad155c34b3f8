"""KTO: its rows, whose reply z0 is measured on, its loss by the paper, and that no cut of a batch
changes it.
"""

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from open_instruct.batching.documents import pack_documents
from open_instruct.batching.steps import BatchShape, build_step_batch
from open_instruct.commands.plan import parse_request
from open_instruct.commands.tiny_model import tiny_config
from open_instruct.core.batch_values import UnpairedValues
from open_instruct.core.errors import InputError, RunError
from open_instruct.core.records import Document
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.report import DataReport
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.losses.logprobs import sum_by_sequence
from open_instruct.models.build import build_model
from open_instruct.objectives.kto import (
    KTO,
    KTOConfig,
    KTOLossSection,
    unpaired_losses,
)
from open_instruct.objectives.kto_rows import (
    MismatchedBuilder,
    UnpairedBuilder,
    choose_other_replies,
    parse_labelled_row,
)
from open_instruct.planning.plan import make_plan
from open_instruct.training.policy import Policy
from tests.refusals import refused
from tests.unit.objective_runs import all_gradients, load_rows, train_module
from tests.unit.objective_runs import config_of as list_flags
from tests.unit.token_data import byte_tokenizer, pair, write_rows
from tests.unit.training.test_finite import CPU, SIZE

Load = Callable[..., tuple[TokenDataset, DataReport]]
VOCABULARY = 262
USER, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def config_of(**flags: Any) -> KTOConfig:
    config: KTOConfig = list_flags(
        KTO, *(word for name, value in flags.items() for word in (f"--{name}", str(value)))
    )
    return config


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def load(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Load:
    def load(
        *mixer_list: str | Path, form: type = MismatchedBuilder, **changes: Any
    ) -> tuple[TokenDataset, DataReport]:
        return load_rows(
            form, mixer_list, tokenizer, tmp_path, chat_template_name="simple_chat", **changes
        )

    return load


def labelled(prompt: str, reply: str, label: object) -> dict[str, Any]:
    return {
        "prompt": [USER | {"content": prompt}],
        "completion": [REPLY | {"content": reply}],
        "label": label,
    }


def replies(tokenizer: PreTrainedTokenizerFast, dataset: TokenDataset) -> list[tuple[str, ...]]:
    """The replies of each row's documents, as text."""

    def reply(document: Document) -> str:
        (span,) = document.responses
        text = str(tokenizer.decode(list(document.token_ids[span.start : span.stop])))
        return text.removesuffix(str(tokenizer.eos_token)).strip()

    return [tuple(map(reply, row)) for row in dataset]


class TestRows:
    def test_both_forms_are_the_same_row(self, load: Load, tmp_path: Path) -> None:
        rows = [labelled("p", "one", True), labelled("q", "two", False)]
        conversations = [
            {"messages": [*row["prompt"], *row["completion"]], "label": int(row["label"])}
            for row in rows
        ]
        one, _ = load(write_rows(tmp_path / "a.jsonl", *rows), "1.0")
        other, _ = load(write_rows(tmp_path / "b.jsonl", *conversations), "1.0")
        assert one.keys_N32.tolist() == other.keys_N32.tolist()
        assert [one.values(row).tolist() for row in range(2)] == [[1.0], [0.0]]

    def test_only_the_last_reply_of_a_conversation_is_judged(
        self, load: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        turns = [USER, REPLY, USER | {"content": "again"}, REPLY | {"content": "last"}]
        rows = write_rows(
            tmp_path / "rows.jsonl", {"messages": turns, "label": True}, labelled("q", "two", False)
        )
        dataset, _ = load(rows, "1.0")
        assert replies(tokenizer, dataset) == [("last", "two"), ("two", "last")]
        own, mismatched = dataset[0]
        assert (
            own.token_ids[: own.responses[0].start]
            == mismatched.token_ids[: mismatched.responses[0].start]
        )

    def test_pair_is_two_rows_of_which_neither_is_measured_on_the_other(
        self, load: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        rows = write_rows(
            tmp_path / "rows.jsonl", pair("p", "good", "bad"), pair("q", "fine", "poor")
        )
        dataset, report = load(rows, "1.0")
        assert replies(tokenizer, dataset) == [
            ("good", "fine"),
            ("bad", "fine"),
            ("fine", "good"),
            ("poor", "good"),
        ]
        assert [float(dataset.values(row)[0]) for row in range(4)] == [1, 0, 1, 0]
        assert report.sources == [f"{rows}: 4 taken of 4 rows"]
        # An amount counts the rows that pairs became.
        assert len(load(rows, "3")[0]) == 3

    def test_replies_come_from_the_same_source_and_are_repeated_with_their_row(
        self, load: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        one = write_rows(
            tmp_path / "one.jsonl", *(labelled(f"p{i}", f"one{i}", True) for i in range(3))
        )
        two = write_rows(
            tmp_path / "two.jsonl", *(labelled(f"q{i}", f"two{i}", False) for i in range(2))
        )
        dataset, _ = load(one, "2.0", two, "1.0")
        of_one = [("one0", "one1"), ("one1", "one2"), ("one2", "one0")]
        assert replies(tokenizer, dataset) == [*of_one, *of_one, ("two0", "two1"), ("two1", "two0")]
        again, report = load(one, "2.0", two, "1.0")
        assert report.from_cache and again.fingerprint == dataset.fingerprint

    def test_reply_that_only_the_cut_makes_equal_is_passed_over(
        self, load: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        rows = [
            labelled("p" * 20, "same", True),
            labelled("q", "same but longer", True),
            labelled("r", "other", True),
        ]
        # Behind the first prompt there is room for one blank and three letters.
        room = len("User: " + "p" * 20 + "\nAssistant:") + 4
        dataset, _ = load(write_rows(tmp_path / "rows.jsonl", *rows), "1.0", max_seq_length=room)
        assert replies(tokenizer, dataset)[0] == ("sam", "oth")
        assert all(len(document) <= room for row in dataset for document in row)

    def test_kto_without_z0_has_one_document(self, load: Load, tmp_path: Path) -> None:
        rows = write_rows(tmp_path / "rows.jsonl", labelled("p", "one", True))
        dataset, _ = load(rows, "1.0", form=UnpairedBuilder)
        assert [len(row) for row in dataset] == [1] and dataset.values(0).tolist() == [1.0]
        for loss_type, form in (("kto", MismatchedBuilder), ("apo_zero_unpaired", UnpairedBuilder)):
            assert KTO.choose_rows(config_of(loss_type=loss_type)) is form

    def test_kto_refuses_rows_with_one_distinct_reply(self, load: Load, tmp_path: Path) -> None:
        rows = write_rows(
            tmp_path / "rows.jsonl", *(labelled(f"p{i}", "yes", True) for i in range(3))
        )
        with refused("bad_row", "loss_type", "rows.jsonl", "3", "apo_zero_unpaired"):
            load(rows, "1.0")

    @pytest.mark.parametrize(
        ("row", "kind", "reason"),
        [
            (
                labelled("a", "b", "good"),
                "bad_label",
                "'label' must be true or false (or 1 or 0), not 'good'",
            ),
            (labelled("a", "b", 2), "bad_label", "not 2"),
            (labelled("a", "b", math.nan), "bad_label", "not nan"),
            (labelled("a", "b", None), "bad_label", "not null"),
            (labelled("a", "b", [True]), "bad_label", "not a list"),
            ({"messages": [USER, REPLY]}, "missing_key", "no key 'label'; the row has 'messages'"),
            ({"text": "x", "label": True}, "missing_key", "no key 'messages', nor 'conversations'"),
            ({"prompt": [USER], "label": True}, "missing_key", "the row has 'prompt', 'label'"),
            (
                {"prompt": 1, "completion": "b", "label": True},
                "not_messages",
                "'prompt' must be text or a list",
            ),
            (
                labelled("a", "b", True) | {"completion": []},
                "not_messages",
                "'completion' must be one message",
            ),
            (
                labelled("a", "b", True) | {"completion": [USER]},
                "roles_out_of_order",
                "turn 2: the role is 'user'",
            ),
            (
                labelled("a", " ", True),
                "empty_reply",
                "the reply in 'prompt + completion' is empty",
            ),
        ],
    )
    def test_bad_rows(
        self, load: Load, tmp_path: Path, row: dict[str, Any], kind: str, reason: str
    ) -> None:
        with pytest.raises(MalformedRow) as caught:
            parse_labelled_row(row)
        assert caught.value.kind == kind and reason in caught.value.reason
        good = [labelled("p", "one", True), labelled("q", "two", False)]
        rows = write_rows(tmp_path / "rows.jsonl", good[0], row, good[1])
        with pytest.raises(InputError) as refused:
            load(rows, "1.0")
        assert f"{rows}, line 2: " in str(refused.value) and reason in str(refused.value)
        dataset, report = load(rows, "1.0", on_bad_row="skip")
        assert len(dataset) == 2 and report.bad == {kind: 1}

    def test_rows_of_its_page_are_rows(self, load: Load, tmp_path: Path) -> None:
        page = (Path(__file__).parents[3] / "docs" / "kto.md").read_text(encoding="utf-8")
        *single, of_pair = (
            json.loads(text) for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL)
        )
        assert [parse_labelled_row(row)[1] for row in single] == [True, False]
        one, _ = load(write_rows(tmp_path / "single.jsonl", *single), "1.0")
        other, _ = load(write_rows(tmp_path / "pairs.jsonl", of_pair), "1.0")
        assert one.keys_N32.tolist() == other.keys_N32.tolist()

    def test_bad_pair_is_named_by_its_line(self, load: Load, tmp_path: Path) -> None:
        rows = write_rows(
            tmp_path / "rows.jsonl", pair("p", "one", "two"), pair("q", "same", "same")
        )
        with refused("bad_row", "on_bad_row", "rows.jsonl", "2"):
            load(rows, "1.0")
        assert load(rows, "1.0", on_bad_row="skip")[1].bad == {"chosen_equals_rejected": 2}


def test_mismatched_replies_are_those_of_the_definition() -> None:
    """Searched for one after the other, on drawn rows."""
    draw = random.Random(0)
    for _ in range(300):
        prompts = [draw.randrange(4) for _ in range(draw.randint(2, 12))]
        raw = [draw.randrange(6) for _ in prompts]
        order = list(dict.fromkeys(raw))
        if len(order) == 1:
            continue
        rows = [(prompt, order.index(reply)) for prompt, reply in zip(prompts, raw, strict=True)]
        came_with = [
            next(prompt for prompt, reply in rows if reply == number)
            for number in range(len(order))
        ]
        for (prompt, own), chosen in zip(rows, choose_other_replies(rows), strict=True):
            in_turn = [(own + step) % len(order) for step in range(1, len(order))]
            assert (
                chosen
                == next((each for each in in_turn if came_with[each] != prompt), in_turn[0])
                != own
            )
    # A single prompt has no others.
    assert choose_other_replies([(0, 0), (0, 1), (0, 2)]) == [1, 2, 0]


def by_the_paper(
    r: float, z0: float, is_desirable: bool, loss: KTOLossSection
) -> tuple[float, float]:
    """`lambda_y - v(x, y)` of eq. 7 and 8, and its derivative by r, in float64."""

    def sigma(x: float) -> float:
        return 1 / (1 + math.exp(-x)) if x > -700 else 0.0

    if is_desirable:
        weight, inner = loss.desirable_weight, loss.beta * (r - z0)
        return weight - weight * sigma(inner), -weight * loss.beta * sigma(inner) * sigma(-inner)
    weight, inner = loss.undesirable_weight, loss.beta * (z0 - r)
    return weight - weight * sigma(inner), weight * loss.beta * sigma(inner) * sigma(-inner)


class TestLoss:
    @pytest.mark.parametrize("weights", [(1.0, 1.0), (1.33, 0.7)])
    @pytest.mark.parametrize("beta", [0.01, 0.1, 2.0])
    def test_values_and_gradients_are_the_papers(
        self, weights: tuple[float, float], beta: float
    ) -> None:
        draw = np.random.default_rng(0)
        ratios = [
            *draw.normal(scale=5, size=40),
            0.0,
            1e-7,
            -1e-7,
            80.0,
            -80.0,
            1e4,
            -1e4,
            1e6,
            -1e6,
        ]
        loss = KTOLossSection(beta=beta, desirable_weight=weights[0], undesirable_weight=weights[1])
        for z0 in (0.0, 0.3, 25.0, 1e4):
            for label in (True, False):
                ratios_R = torch.tensor(ratios, dtype=torch.float32, requires_grad=True)
                labels_R = torch.full((len(ratios),), label)
                losses_R = unpaired_losses(ratios_R, labels_R, torch.tensor(z0), loss)
                losses_R.sum().backward()
                expected = [by_the_paper(float(r), z0, label, loss) for r in ratios_R.detach()]
                assert ratios_R.grad is not None
                np.testing.assert_allclose(
                    losses_R.detach(), [value for value, _ in expected], rtol=1e-5, atol=1e-6
                )
                np.testing.assert_allclose(
                    ratios_R.grad, [slope for _, slope in expected], rtol=1e-5, atol=1e-6
                )

    def test_kto_without_z0_is_apo_zero(self) -> None:
        ratios_R = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 30
        labels_R = torch.arange(50) % 2 == 0
        theirs_R = torch.where(
            labels_R, 1 - torch.sigmoid(0.1 * ratios_R), torch.sigmoid(0.1 * ratios_R)
        )
        torch.testing.assert_close(
            unpaired_losses(ratios_R, labels_R, 0.0, KTOLossSection()), theirs_R
        )


@pytest.fixture(scope="module")
def policy() -> torch.nn.Module:
    """A model whose log-probs differ from token to token."""
    torch.manual_seed(0)
    return filled(
        build_model(tiny_config("olmo2", SIZE, vocab_size=VOCABULARY, tie=False), init_device="cpu")
    )


@torch.no_grad()
def filled(model: torch.nn.Module) -> torch.nn.Module:
    for index, parameter in enumerate(model.parameters()):
        parameter.copy_(0.3 * torch.sin(torch.arange(parameter.numel()) + index).view_as(parameter))
    return model


ROWS = [labelled("p" * (1 + i), "reply " + "xyz" * (i % 4) + str(i), i % 3 != 0) for i in range(8)]


def step_of(
    policy: torch.nn.Module,
    dataset: TokenDataset,
    folder: Path,
    *,
    reference_ND: np.ndarray,
    microbatches: int,
    step: int = 3,
    flags: dict[str, Any] | None = None,
    **shape: Any,
) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics and gradient of one step over all rows, in so many microbatches."""
    config = config_of(
        **(flags or {}), **({} if shape.get("packing", True) else {"packing": False})
    )
    module, recorder = train_module(KTO.bind(config), policy, folder, max_seq_length=128)
    recorder.global_step = step
    batch_shape = BatchShape(
        documents_per_sample=dataset.documents_per_row,
        max_samples_per_microbatch=8 // microbatches,
        max_microbatches=microbatches,
        max_seq_length=128,
        **({"packing": True} | shape),
    )
    filled(policy)  # the train module empties what it is given
    module.zero_grads()
    every_row = [(row,) for row in range(len(dataset))]
    rows = build_step_batch(
        dataset,
        every_row,
        shape=batch_shape,
        rank=0,
        num_ranks=1,
        reference_logps_ND=reference_ND,
        values_class=UnpairedValues,
    )
    return dict(module.policy.forward_backward(rows)), all_gradients(policy)


def logps_of(policy: Any, dataset: TokenDataset) -> np.ndarray:
    """Each document by itself."""
    from open_instruct.training.model.forward import token_logprobs

    with torch.no_grad():
        scores = [
            [token_logprobs(policy, pack_documents([document]), device=CPU) for document in row]
            for row in dataset
        ]
    return np.array(
        [[float(sum_by_sequence(*each_of(score), 1)[0]) for score in row] for row in scores],
        np.float32,
    )


def each_of(score: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return score.logprobs_N, score.sequence_ids_N


class TestStep:
    def test_kto_loss_is_the_papers_for_any_microbatches(
        self, policy: torch.nn.Module, load: Load, tmp_path: Path
    ) -> None:
        dataset, _ = load(write_rows(tmp_path / "rows.jsonl", *ROWS), "1.0")
        logps_ND = logps_of(policy, dataset)
        reference_ND = logps_ND - np.random.default_rng(1).normal(2.0, 3.0, logps_ND.shape).astype(
            np.float32
        )
        loss = config_of(desirable_weight=1.2).loss
        z0 = max(0.0, float((logps_ND - reference_ND)[:, 1].mean(dtype="float64")))
        assert z0 > 0.5
        labels = [row["label"] for row in ROWS]
        ratios = (logps_ND - reference_ND)[:, 0].astype(float)
        each = [
            by_the_paper(r, z0, label, loss)[0] for r, label in zip(ratios, labels, strict=True)
        ]
        run = {"flags": {"desirable_weight": 1.2}, "reference_ND": reference_ND}
        whole, gradient = step_of(policy, dataset, tmp_path, microbatches=1, **run)
        of_class = {
            label: [r for r, own in zip(ratios, labels, strict=True) if own is label]
            for label in (True, False)
        }
        chosen, rejected = (0.1 * np.mean(of_class[label]) for label in (True, False))
        expected = {
            "loss": np.mean(each),
            "kl": z0,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": chosen - rejected,
            "rewards/accuracy": np.mean(
                [bool(r > z0) is label for r, label in zip(ratios, labels, strict=True)]
            ),
            "logps/chosen": logps_ND[np.array(labels), 0].mean(),
            "logps/rejected": logps_ND[~np.array(labels), 0].mean(),
        }
        assert {name: whole[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        cuts = [
            *({"microbatches": number} for number in (2, 4, 8)),
            {"microbatches": 2, "packing": False},
            {"microbatches": 2, "prefix_sharing": "on"},
        ]
        for cut in cuts:
            metrics, of_cut = step_of(policy, dataset, tmp_path, **run, **cut)
            assert {name: metrics[name] for name in expected} == pytest.approx(
                expected, rel=1e-5
            ), cut
            torch.testing.assert_close(of_cut, gradient, rtol=1e-4, atol=1e-7)

    def test_only_own_replies_are_learned(
        self, policy: torch.nn.Module, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The step has half of the documents, and so no place for a gradient of the others."""
        dataset, _ = load(write_rows(tmp_path / "rows.jsonl", *ROWS), "1.0")
        seen: list[int] = []
        function = Policy.microbatch_loss

        def watched(self: Policy, batch: Any, counts: Any) -> Any:
            seen.extend(len(document) for document in batch.documents)
            assert batch.packed.num_tokens == sum(map(len, batch.documents))
            return function(self, batch, counts)

        monkeypatch.setattr(Policy, "microbatch_loss", watched)
        step_of(policy, dataset, tmp_path, reference_ND=logps_of(policy, dataset), microbatches=2)
        assert sorted(seen) == sorted(len(own) for own, _ in dataset)

    @pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
    def test_first_loss_is_known(
        self, policy: torch.nn.Module, load: Load, tmp_path: Path, loss_type: str
    ) -> None:
        flags = {"loss_type": loss_type, "desirable_weight": 2, "undesirable_weight": 3}
        form = KTO.choose_rows(config_of(**flags))
        dataset, _ = load(write_rows(tmp_path / "rows.jsonl", *ROWS), "1.0", form=form)
        reference_ND = logps_of(policy, dataset)
        run: dict[str, Any] = {"step": 1, "flags": flags, "microbatches": 2}
        metrics, _ = step_of(policy, dataset, tmp_path, reference_ND=reference_ND, **run)
        # Five of the eight rows are desirable.
        assert metrics["loss"] == pytest.approx((2 * 5 + 3 * 3) / (2 * 8), abs=1e-5)
        assert ("kl" in metrics) == (loss_type == "kto")
        elsewhere_ND = reference_ND.copy()
        elsewhere_ND[0, 0] += 9
        with pytest.raises(
            RunError,
            match=r"the first loss is .* has 1.187500: the reference log-probs do not belong",
        ):
            step_of(policy, dataset, tmp_path, reference_ND=elsewhere_ND, **run)

    def test_reply_within_rounding_of_the_reference_is_not_above_it(
        self, policy: torch.nn.Module, load: Load, tmp_path: Path
    ) -> None:
        dataset, _ = load(write_rows(tmp_path / "rows.jsonl", *ROWS), "1.0")
        reference_ND = logps_of(policy, dataset) * (1 + 3e-7 * np.float32([[-1, -1], [1, -1]] * 4))
        for microbatches in (1, 4):
            metrics, _ = step_of(
                policy, dataset, tmp_path, reference_ND=reference_ND, microbatches=microbatches
            )
            assert metrics["rewards/accuracy"] == 3 / 8  # that of "nothing is desirable"

    def test_class_that_is_not_there_has_no_metrics(
        self, policy: torch.nn.Module, load: Load, tmp_path: Path
    ) -> None:
        rows = [row | {"label": False} for row in ROWS]
        dataset, _ = load(write_rows(tmp_path / "rows.jsonl", *rows), "1.0")
        metrics, gradient = step_of(
            policy,
            dataset,
            tmp_path,
            reference_ND=logps_of(policy, dataset),
            microbatches=8,
            step=1,
        )
        assert metrics["loss"] == pytest.approx(0.5, abs=1e-5) and gradient.any()
        assert all(map(math.isfinite, metrics.values()))
        assert {name for name in metrics if "/" in name} == {
            "rewards/rejected",
            "rewards/accuracy",
            "logps/rejected",
        }


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("labels", [{True, False}, {True}])
def test_held_out_rows_are_scored_without_nan(
    load: Load, tmp_path: Path, loss_type: str, labels: set[bool]
) -> None:
    config = config_of(loss_type=loss_type)
    rows = [row for row in ROWS if row["label"] in labels]
    dataset, _ = load(
        write_rows(tmp_path / "rows.jsonl", *rows), "1.0", form=KTO.choose_rows(config)
    )
    draw = np.random.default_rng(0)
    logps_ND, reference_ND = draw.normal(-20, 3, (2, len(rows), dataset.documents_per_row)).astype(
        np.float32
    )
    row = KTO.evaluate(dataset, logps_ND, reference_ND, config).row
    assert all(map(math.isfinite, row.values()))
    ratios_ND = (logps_ND - reference_ND).astype(float)
    z0 = max(0.0, ratios_ND[:, 1].mean()) if loss_type == "kto" else 0.0
    each = [
        by_the_paper(r, z0, own["label"], config.loss)[0]
        for r, own in zip(ratios_ND[:, 0], rows, strict=True)
    ]
    assert row["eval/loss"] == pytest.approx(np.mean(each), rel=1e-5)
    assert ("eval/kl" in row) == (loss_type == "kto") and ("eval/rewards/rejected" in row) == (
        False in labels
    )
    assert row["eval/num_rows"] == len(rows)
    before = KTO.evaluate(dataset, reference_ND, reference_ND, config).row
    assert before["eval/loss"] == pytest.approx(0.5) and before["eval/rewards/chosen"] == 0


class TestChecks:
    def test_global_batch_of_one_row_is_refused(self, load: Load, tmp_path: Path) -> None:
        dataset, _ = load(write_rows(tmp_path / "rows.jsonl", *ROWS), "1.0")
        with refused("conflict", "loss_type", "z0", "--per_device_train_batch_size"):
            KTO.check_rows(dataset, 1, config_of())
        KTO.check_rows(dataset, 2, config_of())
        KTO.check_rows(dataset, 1, config_of(loss_type="apo_zero_unpaired"))

    def test_weights_that_leave_the_papers_range(self, load: Load, tmp_path: Path) -> None:
        dataset, _ = load(write_rows(tmp_path / "rows.jsonl", *ROWS), "1.0")
        (warning,) = KTO.check_rows(dataset, 8, config_of())
        assert (
            "5 desirable rows of weight 1 count 1.67 times as much as 3 undesirable ones of "
            "weight 1"
        ) in warning
        assert (
            "--desirable_weight 0.6 to 0.8 would do, or --undesirable_weight 1.25 to 1.67"
            in warning
        )
        assert KTO.check_rows(dataset, 8, config_of(desirable_weight=0.6)) == []
        assert len(KTO.check_rows(dataset, 8, config_of(desirable_weight=0.59))) == 1

    def test_single_class(self, load: Load, tmp_path: Path) -> None:
        rows = write_rows(tmp_path / "rows.jsonl", labelled("p", "one", 0), labelled("q", "two", 0))
        (warning,) = KTO.check_rows(load(rows, "1.0")[0], 8, config_of())
        assert warning.startswith("all 2 rows are undesirable")

    def test_flags(self) -> None:
        assert KTO.validate(config_of()) == []
        for flags, message in (
            ({"desirable_weight": -1}, "--desirable_weight -1.0: must be above 0"),
            (
                {"prefix_sharing": "on", "packing": False},
                "--prefix_sharing on: only packed rows share prompts",
            ),
        ):
            with pytest.raises(InputError, match=message):
                KTO.validate(config_of(**flags))


RUN = ["kto", "--model_name_or_path", "allenai/OLMo-2-1124-7B", "--gpus_per_node", "8"]


def test_plan_counts_learned_documents_and_a_pass_over_the_others() -> None:
    rows = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "3"]
    losses = ("kto", "apo_zero_unpaired")
    with_z0, without = (
        make_plan(parse_request([*RUN, *rows, "--loss_type", name]).setting) for name in losses
    )
    for plan in (with_z0, without):
        workload = plan.workload
        assert (workload.algorithm, workload.tokens_per_microbatch) == ("kto", 2 * 2048)
        assert workload.rows.per_group == 1
    assert (with_z0.workload.reference_pass_tokens, without.workload.reference_pass_tokens) == (
        8192,
        4096,
    )
    scored, scored_without = (
        next(phase.total_bytes for phase in plan.phases if phase.name == "reference pass")
        for plan in (with_z0, without)
    )
    assert scored > scored_without
    # A forward pass of each of the three microbatches more, which takes a third of what learning
    # from them does.
    assert (len(with_z0.workload.scorings), without.workload.scorings) == (1, ())
    assert with_z0.time.compute_s == pytest.approx(without.time.compute_s * 4 / 3, rel=0.02)


def test_prompts_of_kto_may_be_planned_as_shared() -> None:
    shared = [*RUN, "--shared_prompt_tokens", "1025", "--activation_checkpointing", "full"]
    workload = make_plan(parse_request(shared).setting).workload
    assert (workload.tokens_per_microbatch, workload.reference_pass_tokens) == (
        8 * 2048,
        8 * (2 * 2048 - 1024),
    )
    with refused("unread_flag", "shared_prompt_tokens"):
        parse_request([*shared, "--loss_type", "apo_zero_unpaired"])
