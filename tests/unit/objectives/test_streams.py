"""Three losses over the tokens of a step: none changes with what is added to another, nor with the
cut.
"""

import dataclasses
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from open_instruct.batching.rollouts import (
    build_rollout_batch,
    build_rollout_minibatches,
    count_denominators,
    plan_steps_of_ranks,
)
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.policy_sections import PolicyLossSection
from open_instruct.core.batch_values import RLValues
from open_instruct.core.errors import InputError
from open_instruct.core.records import Batch, Document, RolloutSample, Span, StepBatch
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.user_code import load_own_function
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.losses.policy import POLICY_LOSSES
from open_instruct.objectives.objective import BoundLoss, LossOutputs, TokenLogprobs
from open_instruct.objectives.policy_gradient import bind
from open_instruct.rl.samples import sft_samples
from open_instruct.run.pretrained import open_pretrained
from open_instruct.training.open_companion import open_companion_model
from tests.unit.fake_rollouts import grpo_config

PAGE = (Path(__file__).parents[3] / "docs" / "losses.md").read_text(encoding="utf-8")
# The examples of that page, `squared` and `signs`.
OWN = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))


def completions(seed: int, count: int = 6) -> list[RolloutSample]:
    chance = random.Random(seed)
    samples = []
    for index in range(count):
        num_prompt, length = chance.randint(1, 4), chance.randint(1, 7)
        samples.append(
            RolloutSample(
                document=Document(
                    token_ids=(1000 * index, *range(1, num_prompt + length)),
                    responses=(Span(start=num_prompt, stop=num_prompt + length),),
                ),
                engine_logprobs=tuple(-chance.uniform(0.1, 3) for _ in range(length)),
                advantage=chance.gauss(0, 1),
            )
        )
    return samples


def as_conversation(sample: RolloutSample) -> RolloutSample:
    labels = len(sample.engine_logprobs)
    zeros, ones = (0.0,) * labels, (1.0,) * labels
    return dataclasses.replace(
        sample,
        engine_logprobs=zeros,
        advantage=0.0,
        weights={"rl": zeros, "ce": ones, "kl": zeros},
    )


def with_tool(sample: RolloutSample) -> RolloutSample:
    """The same completion behind two tokens that a tool wrote, which are learned as they stand."""
    ids, start = sample.document.token_ids, sample.document.responses[0].start
    labels = len(sample.engine_logprobs)
    return dataclasses.replace(
        sample,
        document=Document(
            token_ids=(*ids[:start], 7, 8, *ids[start:]),
            responses=(Span(start=start, stop=start + 2), Span(start=start + 2, stop=len(ids) + 2)),
        ),
        engine_logprobs=(0.0, 0.0, *sample.engine_logprobs),
        weights={
            "rl": (0.0, 0.0, *(1.0,) * labels),
            "ce": (1.0, 0.5, *(0.0,) * labels),
            "kl": (0.0, 0.0, *(1.0,) * labels),
        },
    )


def scores_of(samples: Sequence[RolloutSample], batch: Batch) -> TokenLogprobs:
    """Log-probs near the engine's; where there is no engine, -1.

    The entropy of a token is a tenth of its log-prob.
    """
    engine_N = RLValues.read(batch.values).engine_logprobs_N
    logprobs_N = torch.where(engine_N == 0, -1.0, engine_N + 0.3 * (engine_N * 97).sin())
    ids = [i for i, sample in enumerate(samples) for _ in sample.engine_logprobs]
    return TokenLogprobs(
        logprobs_N=logprobs_N.detach().requires_grad_(),
        sequence_ids_N=torch.tensor(ids, dtype=torch.long),
        entropy_N=-logprobs_N.detach() / 10,
    )


def loss_and_gradient(
    samples: Sequence[RolloutSample], loss: PolicyLossSection, **values: float | torch.Tensor
) -> tuple[LossOutputs, torch.Tensor]:
    """Of one microbatch;

    `values` are offsets of the frozen log-probs from the engine's, by name.
    """
    batch = build_rollout_batch(samples)
    engine_N = RLValues.read(batch.values).engine_logprobs_N
    frozen: dict[str, Any] = {
        f"{name}_logprobs_N": engine_N + offset for name, offset in values.items()
    }
    batch = dataclasses.replace(batch, values=dataclasses.replace(batch.values, **frozen))
    scores = scores_of(samples, batch)
    bound = bind(loss, temperature=1.0, response_length=20)
    outputs = bound.compute(scores, batch, count_denominators(samples))
    (gradient_N,) = torch.autograd.grad(outputs.loss, scores.logprobs_N)
    return outputs, gradient_N


FROZEN = {"old": 0.1, "reference": -0.4, "teacher": -0.2}


@pytest.mark.parametrize(
    "kind", [kind for kind, known in POLICY_LOSSES.items() if known.marks is None]
)
def test_tokens_of_another_stream_leave_the_gradient_of_the_policy_loss_alone(kind: str) -> None:
    """To the last bit; with a reference and a teacher too."""
    loss = PolicyLossSection(loss_fn=kind, beta=0.1, rho_correction="sequence_mask")
    alone = completions(1)
    _, expected_N = loss_and_gradient(alone, loss, **FROZEN)
    together, conversations = (
        [with_tool(sample) for sample in alone],
        [as_conversation(s) for s in completions(2)],
    )
    outputs, gradient_N = loss_and_gradient([*together, *conversations], loss, **FROZEN)
    is_ours_N = torch.tensor(
        [bool(w) for s in (*together, *conversations) for w in s.stream_weights("rl")]
    )
    assert torch.equal(gradient_N[is_ours_N], expected_N)
    # And the others have the gradient of their own mean: 12 tokens of tools, and those of the
    # conversations.
    of_ce = [weight for s in (*together, *conversations) for weight in s.stream_weights("ce")]
    num_ce = sum(map(bool, of_ce))
    expected_ce = -torch.tensor(of_ce)[~is_ours_N] / num_ce
    torch.testing.assert_close(gradient_N[~is_ours_N], expected_ce)
    ce = outputs.metrics["ce"].value
    assert float(ce) == pytest.approx(sum(of_ce) / num_ce)  # all of them have log-prob -1


def test_weights_and_coefficients() -> None:
    samples = completions(3)
    plain, plain_N = loss_and_gradient(samples, PolicyLossSection())
    doubled = [
        dataclasses.replace(s, weights={"rl": (2.0,) * len(s.engine_logprobs)}) for s in samples
    ]
    outputs, gradient_N = loss_and_gradient(doubled, PolicyLossSection())
    torch.testing.assert_close(gradient_N, 2 * plain_N)
    outputs, gradient_N = loss_and_gradient(samples, PolicyLossSection(rl_coef=0.25))
    torch.testing.assert_close(gradient_N, plain_N / 4)
    assert float(outputs.metrics["policy_loss"].value) == float(plain.metrics["policy_loss"].value)
    given = [*samples, *map(as_conversation, completions(4))]
    ce = float(loss_and_gradient(given, PolicyLossSection())[0].metrics["ce"].value)
    outputs, _ = loss_and_gradient(given, PolicyLossSection(ce_coef=0.5))
    assert float(outputs.metrics["loss"].value) == pytest.approx(
        float(plain.metrics["loss"].value) + 0.5 * ce
    )


def test_teacher_alone_pulls_each_token_by_its_distance() -> None:
    samples = completions(5)
    loss = PolicyLossSection(
        rl_coef=0.0, teacher_model_name_or_path="t", teacher_kl_coef=3.0, rho_correction="none"
    )
    outputs, gradient_N = loss_and_gradient(samples, loss, teacher=-0.2)
    batch = build_rollout_batch(samples)
    distance_N = scores_of(samples, batch).logprobs_N.detach() - (
        RLValues.read(batch.values).engine_logprobs_N - 0.2
    )
    torch.testing.assert_close(gradient_N, 3.0 * distance_N / len(distance_N))
    assert float(outputs.metrics["teacher_kl"].value) == pytest.approx(
        float(distance_N.mean()), rel=1e-5
    )


@pytest.mark.parametrize("kind", ["gspo", "luspo", "dapo", "vespo"])
def test_estimate_is_weighted_by_the_ratio_that_is_optimised(kind: str) -> None:
    """r (e^-d - 1 + d); of gspo and its like r is the geometric mean over the completion, which
    pulls each token.
    """
    samples = completions(6)
    loss = PolicyLossSection(
        loss_fn=kind, rl_coef=0.0, beta=0.5, kl_importance_weighted=True, rho_correction="none"
    )
    _, gradient_N = loss_and_gradient(samples, loss, old=0.1, reference=-0.4)
    batch = build_rollout_batch(samples)
    new_N = scores_of(samples, batch).logprobs_N.detach().requires_grad_()
    total, start = new_N.sum() * 0, 0
    for sample in samples:
        own = slice(start, start := start + len(sample.engine_logprobs))
        engine, new = RLValues.read(batch.values).engine_logprobs_N[own], new_N[own]
        ratios, d = (new - engine - 0.1).exp(), new - engine + 0.4
        if kind in ("gspo", "luspo"):
            ratios = ratios.prod() ** (1 / len(ratios))
        kl = ratios * ((-d).exp() - 1 + d)
        total = total + (kl.mean() if kind == "gspo" else kl.sum())
    num = len(new_N) if kind in ("dapo", "vespo") else len(samples)
    (expected_N,) = torch.autograd.grad(0.5 * total / num, new_N)
    torch.testing.assert_close(gradient_N, expected_N, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ["0", "1", "2", "3"])
def test_token_that_a_frozen_model_rules_out_pulls_nowhere(estimator: str) -> None:
    samples = completions(6)
    offsets = torch.zeros(sum(len(sample.engine_logprobs) for sample in samples))
    offsets[0] = -torch.inf
    loss = PolicyLossSection(rl_coef=0.0, beta=0.5, kl_estimator=estimator, teacher_kl_coef=2.0)
    outputs, gradient_N = loss_and_gradient(
        samples, loss, reference=offsets - 0.4, teacher=offsets - 0.2
    )
    _, without_N = loss_and_gradient(samples, loss, reference=-0.4, teacher=-0.2)
    assert gradient_N[0] == 0 != without_N[0] and torch.equal(gradient_N[1:], without_N[1:])
    assert all(torch.as_tensor(metric.value).isfinite() for metric in outputs.metrics.values())


def test_conversations_have_a_temperature_of_their_own() -> None:
    """Whatever completions were sampled at."""
    plain, other, written = completions(3, count=3)
    given = [plain, with_tool(other), as_conversation(written)]
    bound = bind(PolicyLossSection(), temperature=0.7, response_length=9)
    assert bound.find_temperatures(build_rollout_batch(given[:1])) == 0.7
    lengths = [len(sample.engine_logprobs) for sample in (plain, other, written)]
    expected = [0.7] * lengths[0] + [1.0] * 2 + [0.7] * lengths[1] + [1.0] * lengths[2]
    temperatures = torch.as_tensor(bound.find_temperatures(build_rollout_batch(given)))
    assert temperatures.tolist() == pytest.approx(expected)


# --- tokens of the whole update
# ----------------------------------------------------------------------


def choices_by_cut(
    loss: PolicyLossSection, samples: list[RolloutSample], cut: int
) -> dict[str, list[float]]:
    """What is chosen of each token, in the order of the samples, if `cut` of them lie in a
    microbatch.
    """
    bound: BoundLoss = bind(loss, temperature=1.0, response_length=20)
    assert bound.scores_before_step
    parts = [samples[start : start + cut] for start in range(0, len(samples), cut)]
    batches = [build_rollout_batch(part) for part in parts]
    step = StepBatch(
        microbatches=(*batches, build_rollout_batch([])), counts=count_denominators(samples)
    )
    scores = [
        scores_of(part, batch) for part, batch in zip([*parts, []], step.microbatches, strict=True)
    ]
    prepared = bound.prepare(step, scores, lambda values: values)
    choices: dict[str, list[float]] = {}
    for batch in prepared.microbatches:
        values = RLValues.read(batch.values)
        for name, chosen_M in (("learned", values.is_learned_M), ("marked", values.is_marked_M)):
            if chosen_M is not None:
                choices.setdefault(f"is_{name}", []).extend(chosen_M.tolist())
    return choices


CHOICES: list[tuple[dict[str, Any], float]] = [
    ({"top_entropy_quantile": 0.2}, 0.2),
    ({"loss_fn": "kl_cov", "cov_fraction": 0.1}, 0.1),
    (
        {"loss_fn": "clip_cov", "cov_fraction": 0.1, "clip_cov_lower": 0.05, "clip_cov_upper": 1.5},
        0.1,
    ),
]


@pytest.mark.parametrize(("settings", "share"), CHOICES)
def test_tokens_are_chosen_over_the_update_however_it_is_cut(
    settings: dict[str, Any], share: float
) -> None:
    samples = completions(7, count=12)
    loss = PolicyLossSection(**settings)
    ((name, chosen),) = choices_by_cut(loss, samples, 12).items()
    for cut in (1, 5):
        assert choices_by_cut(loss, samples, cut) == {name: chosen}
    count = round(share * len(chosen)) if name == "is_learned" else int(share * len(chosen))
    assert sum(chosen) == count > 1

    batch = build_rollout_batch(samples)
    scores, advantages_N = scores_of(samples, batch), RLValues.read(batch.values).advantages_N
    logprobs_N = scores.logprobs_N.detach()
    covariances_N = (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())
    is_chosen_N = torch.tensor(chosen).bool()
    if loss.loss_fn == "clip_cov":
        assert ((covariances_N[is_chosen_N] > 0.05) & (covariances_N[is_chosen_N] < 1.5)).all()
        return
    values_N = scores.entropy_N if name == "is_learned" else covariances_N
    assert values_N is not None
    assert values_N[is_chosen_N].min() >= values_N[~is_chosen_N].max()


def test_draw_of_tokens_leaves_clipped_ones_aside_and_is_another_in_another_update() -> None:
    flags = {
        "loss_fn": "clip_cov",
        "cov_fraction": 1.0,
        "clip_cov_lower": -1e9,
        "clip_cov_upper": 1e9,
    }
    samples = completions(11, count=12)
    bound = bind(PolicyLossSection(**flags), temperature=1.0, response_length=20)
    assert bound.scores_before_step
    batch = build_rollout_batch(samples)
    # Every ratio is e^0.5, which the clip range takes the gradient from where the advantage is
    # positive.
    scores = scores_of(samples, batch)
    values = batch.values.with_logprobs("old_logprobs_N", scores.logprobs_N.detach() - 0.5)
    batch = dataclasses.replace(batch, values=values)
    step = bound.prepare(
        StepBatch(microbatches=(batch,), counts={}), [scores], lambda values: values
    )
    values = RLValues.read(step.microbatches[0].values)
    assert values.is_marked_M is not None
    assert torch.equal(values.is_marked_M.bool(), values.advantages_N <= 0)

    few = PolicyLossSection(**flags | {"cov_fraction": 0.2})
    draws = []
    for shift in (0.0, 1e-3):
        update = [
            dataclasses.replace(
                each, engine_logprobs=tuple(value - shift for value in each.engine_logprobs)
            )
            for each in samples
        ]
        draws.append(choices_by_cut(few, update, 12)["is_marked"])
    assert draws[0] != draws[1] and sum(draws[0]) == sum(draws[1])


def test_equal_covariances_mark_no_more_tokens_than_their_share() -> None:
    """With one advantage for all every covariance is 0."""
    samples = [dataclasses.replace(each, advantage=1.0) for each in completions(12, count=12)]
    chosen = choices_by_cut(PolicyLossSection(loss_fn="kl_cov", cov_fraction=0.1), samples, 12)[
        "is_marked"
    ]
    assert sum(chosen) == int(0.1 * len(chosen))


def test_tokens_of_low_entropy_are_not_learned_but_count() -> None:
    samples, loss = completions(8), PolicyLossSection(top_entropy_quantile=0.25)
    _, plain_N = loss_and_gradient(samples, PolicyLossSection())
    batch, bound = build_rollout_batch(samples), bind(loss, temperature=1.0, response_length=20)
    assert bound.with_entropy and bound.scores_before_step
    scores = scores_of(samples, batch)
    step = bound.prepare(
        StepBatch(microbatches=(batch,), counts={}), [scores], lambda values: values
    )
    outputs = bound.compute(scores, step.microbatches[0], count_denominators(samples))
    (gradient_N,) = torch.autograd.grad(outputs.loss, scores.logprobs_N)
    is_learned_M = RLValues.read(step.microbatches[0].values).is_learned_M
    assert is_learned_M is not None and torch.equal(gradient_N, plain_N * is_learned_M)


# --- plans
# -------------------------------------------------------------------------------------------


def test_conversations_lie_in_microbatches_of_their_own() -> None:
    """So that completions are computed as without them, whatever the number of ranks and
    mini-batches.
    """
    alone, given = completions(9, count=7), [as_conversation(s) for s in completions(10, count=5)]
    for num_ranks, num_mini_batches in ((1, 1), (2, 3), (4, 6)):
        sizes = {
            "num_ranks": num_ranks,
            "max_tokens_per_microbatch": 24,
            "num_mini_batches": num_mini_batches,
        }
        without, together = (
            plan_steps_of_ranks(alone, **sizes),
            plan_steps_of_ranks([*alone, *given], **sizes),
        )
        seen: list[RolloutSample] = []
        for ours, both in zip(without, together, strict=True):
            for plain, mixed in zip(ours.minibatches, both.minibatches, strict=True):
                assert mixed.microbatches[: len(plain.microbatches)] == plain.microbatches
                seen += [
                    s
                    for microbatch in mixed.microbatches[len(plain.microbatches) :]
                    for s in microbatch
                ]
                of_rl = ("rl_rows", "rl_labels", "kl_rows", "kl_labels")
                assert [mixed.counts[name] for name in of_rl] == [
                    plain.counts[name] for name in of_rl
                ]
        assert sorted(map(repr, seen)) == sorted(map(repr, given))
        assert len({len(of_rank.minibatches[0].microbatches) for of_rank in together}) == 1
        everywhere = [minibatch.counts["ce_labels"] for minibatch in together[0].minibatches]
        assert sum(everywhere) == sum(len(s.engine_logprobs) for s in given)


def test_conversations_are_learned_where_no_completion_is() -> None:
    (step,) = plan_steps_of_ranks(
        [as_conversation(s) for s in completions(11)],
        num_ranks=1,
        max_tokens_per_microbatch=99,
        num_mini_batches=2,
    )
    (minibatch,) = build_rollout_minibatches(step)
    assert minibatch.counts["rl_rows"] == 0 < minibatch.counts["rows"]
    bound = bind(PolicyLossSection(), temperature=1.0, response_length=20)
    for samples, batch in zip(
        step.minibatches[0].microbatches, minibatch.microbatches, strict=True
    ):
        outputs = bound.compute(scores_of(samples, batch), batch, minibatch.counts)
        assert outputs.metrics.keys() == {"ce", "loss", "policy_loss"}
        assert float(outputs.metrics["policy_loss"].value) == 0


def test_document_of_several_turns_has_its_labels_in_order() -> None:
    batch = build_rollout_batch([with_tool(completions(12, count=1)[0])])
    values = RLValues.read(batch.values)
    assert values.ce is not None
    assert values.ce.tokens_M is not None and values.ce.tokens_M.tolist() == [0, 1]
    assert values.ce.weights_M is not None and values.ce.weights_M.tolist() == [1.0, 0.5]
    assert values.rl.tokens_M is not None
    assert values.rl.tokens_M.tolist() == list(range(2, len(values.advantages_N)))


# --- a loss of the user's own
# ------------------------------------------------------------------------


def test_loss_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    samples = completions(13)
    loss = PolicyLossSection(loss_fn=f"{tmp_path}/mine.py:squared", rho_correction="none")
    _, gradient_N = loss_and_gradient(samples, loss)
    advantages_N = RLValues.read(build_rollout_batch(samples).values).advantages_N
    torch.testing.assert_close(gradient_N, -advantages_N / len(advantages_N))
    signs = load_own_function(f"{tmp_path}/mine.py:signs", flag="--advantages", built_in=())
    assert signs is not None and signs([SimpleNamespace(rewards=(1.0, 0.25))]) == [[1.0, -1.0]]


@pytest.mark.parametrize(
    ("name", "told"),
    [("missing", "cannot be loaded (AttributeError"), ("OWN", "is a int, not a function")],
)
def test_stream_that_cannot_be_used_is_refused(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("OWN = 3")
    with pytest.raises(InputError) as caught:
        bind(
            PolicyLossSection(loss_fn=f"{tmp_path}/mine.py:{name}"),
            temperature=1.0,
            response_length=20,
        )
    assert told in str(caught.value) and "--loss_fn" in str(caught.value)


# --- conversations
# -----------------------------------------------------------------------------------


def test_conversations_of_a_step_depend_on_its_number_alone() -> None:
    """Every row once an epoch, in another order the next time; so nothing of them need be saved."""
    rows: Any = [(sample.document,) for sample in completions(14, count=7)]
    config = grpo_config("--sft_mixer_list", "r.jsonl", "1.0", "--sft_rows_per_step", "3")
    flags = {"num_rows_per_step": config.data.sft_rows_per_step, "seed": config.optim.seed}
    steps = [sft_samples(rows, step=step, **flags) for step in range(1, 15)]
    assert (
        sft_samples(rows, step=9, **flags) == steps[8] and sft_samples(None, step=9, **flags) == []
    )
    order = [sample.document for step in steps for sample in step]
    epochs = [order[start : start + 7] for start in range(0, 42, 7)]
    assert all({d.token_ids for d in epoch} == {d.token_ids for (d,) in rows} for epoch in epochs)
    assert len({tuple(d.token_ids for d in epoch) for epoch in epochs}) > 1
    for sample in steps[0]:
        labels = sample.document.num_label_tokens
        assert sample.stream_weights("ce") == (1.0,) * labels and not any(
            sample.stream_weights("rl") + sample.stream_weights("kl")
        )


@pytest.mark.parametrize("kind", ["teacher", "critic"])
def test_model_with_other_tokens_is_refused(tmp_path: Path, kind: Any) -> None:
    """And one with fewer positions than a prompt and its completion need."""
    write_tiny_model(tmp_path / "t", family="olmo2")
    layout = ShardLayout(gpus_per_node=(1,), shard_degree=1, num_replicas=1)
    student: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0}),
        hf_config=SimpleNamespace(vocab_size=1),
    )
    for longest, told in (
        (
            "8",
            rf"--{kind}_model_name_or_path .*its tokenizer has .* the student's 1 \(its head 1\)",
        ),
        ("9999", "--response_length together: 10007 is more"),
    ):
        config = grpo_config("--response_length", "8", "--max_prompt_token_length", longest)
        with pytest.raises(InputError, match=told):
            open_companion_model(kind, str(tmp_path / "t"), student, config=config, layout=layout)


def test_teacher_with_experts_is_not_asked_what_only_training_them_cannot_do(
    tmp_path: Path,
) -> None:
    write_tiny_model(tmp_path / "t", family="qwen3_moe")
    config_file = tmp_path / "t" / "config.json"
    config_file.write_text(
        json.dumps(json.loads(config_file.read_text()) | {"output_router_logits": True})
    )
    layout = ShardLayout(gpus_per_node=(1,), shard_degree=1, num_replicas=1)
    config = grpo_config("--optimizer", "muon")
    config.model.model_name_or_path = str(tmp_path / "t")
    with pytest.raises(InputError, match="--optimizer muon"):
        open_pretrained(config, tmp_path / "out", layout=layout)
    tokenizer = load_tokenizer(str(tmp_path / "t"))
    student: Any = SimpleNamespace(tokenizer=tokenizer, hf_config=SimpleNamespace(vocab_size=512))
    assert (
        open_companion_model(
            "teacher", str(tmp_path / "t"), student, config=config, layout=layout
        ).hf_config.num_experts
        == 8
    )
