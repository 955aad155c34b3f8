"""Losses and gradients against those of TRL and verl, as their own programs computed them:
record_other_suites.py.

TRL is of 2026-07-24 (f2cd57710), verl of 2026-01-29 (b178a3cd5).
"""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from open_instruct.batching.rollouts import build_rollout_batch, count_denominators
from open_instruct.config.policy_sections import PolicyLossSection
from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.core.batch_values import RLValues
from open_instruct.core.records import Document, RolloutSample, Span, StepBatch
from open_instruct.losses.policy import POLICY_LOSSES
from open_instruct.losses.preference_loss import PreferenceLossInputs
from open_instruct.objectives.dpo import preference_loss
from open_instruct.objectives.objective import TokenLogprobs
from open_instruct.objectives.policy_gradient import bind
from tests.unit.losses.record_other_suites import (
    BETA,
    CLIP_COV_SHARE,
    CLIP_HIGHER,
    CLIP_LOWER,
    COV_LOWER,
    COV_UPPER,
    KL_COV_COEF,
    KL_COV_SHARE,
    PREFERENCE,
    SMOOTHING,
    TABLE,
    TAU,
)

CASES: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
OF_LOSS: dict[str, dict[str, Any]] = {
    "gmpo": {},
    "clip_cov": {
        "cov_fraction": CLIP_COV_SHARE,
        "clip_cov_lower": COV_LOWER,
        "clip_cov_upper": COV_UPPER,
    },
    "kl_cov": {"cov_fraction": KL_COV_SHARE, "kl_cov_coef": KL_COV_COEF},
}


def cases(names: Any) -> list[Any]:
    chosen = [each for each in CASES if each["name"] in names]
    return [
        pytest.param(each, id=f"{each['name']}-{each['suite']}-{i}")
        for i, each in enumerate(chosen)
    ]


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_same(
    loss: torch.Tensor, gradient: torch.Tensor, case: dict[str, Any], *, within: float = 1e-12
) -> None:
    torch.testing.assert_close(loss.detach(), tensor(case["loss"]), rtol=within, atol=within)
    torch.testing.assert_close(gradient, tensor(case["gradient"]), rtol=within, atol=within)


@pytest.mark.parametrize("case", cases(PREFERENCE))
def test_preference_loss_is_that_of_another_suite(case: dict[str, Any]) -> None:
    policy_2P = tensor(case["inputs"]["policy"]).requires_grad_()
    flags = {"discopop_tau": TAU} if case["name"] == "discopop" else {"label_smoothing": SMOOTHING}
    section = PreferenceLossSection(loss_type=case["name"], beta=BETA, **flags)
    inputs = PreferenceLossInputs(
        policy_logps_2P=policy_2P,
        lengths_2P=torch.ones(policy_2P.shape),
        reference_logps_2P=tensor(case["inputs"]["reference"]),
    )
    loss = preference_loss(section, inputs).losses_P.mean()
    (gradient_2P,) = torch.autograd.grad(loss, policy_2P)
    assert_same(loss, gradient_2P, case)


@pytest.mark.parametrize("case", cases(OF_LOSS))
def test_policy_loss_is_that_of_another_suite(case: dict[str, Any]) -> None:
    """As a step computes it: tokens are chosen over the update, then each has its loss."""
    rows = {name: tensor(values) for name, values in case["inputs"].items()}
    is_token = rows["mask"].bool()
    logprobs_N = rows["logprobs"][is_token].requires_grad_()
    section = PolicyLossSection(
        loss_fn=case["name"],
        clip_lower=CLIP_LOWER,
        clip_higher=CLIP_HIGHER,
        rho_correction="none",
        **OF_LOSS[case["name"]],
    )
    samples = [
        RolloutSample(
            document=Document(
                token_ids=(1, *range(length)), responses=(Span(start=1, stop=length + 1),)
            ),
            engine_logprobs=tuple(rows["old_logprobs"][index, :length].tolist()),
            advantage=rows["advantages"][index, 0].item(),
        )
        for index, length in enumerate(is_token.sum(1).tolist())
    ]
    batch = build_rollout_batch(samples)
    values = replace(
        RLValues.read(batch.values),
        old_logprobs_N=rows["old_logprobs"][is_token],
        advantages_N=rows["advantages"][is_token],
    )
    batch = replace(batch, values=values)
    scores = TokenLogprobs(logprobs_N=logprobs_N, sequence_ids_N=batch.packed.sequence_ids_N)
    bound = bind(section, temperature=1.0, response_length=7)
    assert bound.scores_before_step is (POLICY_LOSSES[case["name"]].marks is not None)
    if bound.scores_before_step:
        step = bound.prepare(
            StepBatch(microbatches=(batch,), counts={}), [scores], lambda values: values
        )
        (batch,) = step.microbatches
    loss = bound.compute(scores, batch, count_denominators(samples)).loss
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    gradient = torch.zeros_like(rows["mask"])
    gradient[is_token] = gradient_N
    # verl's geometric mean divides by the number of tokens plus 1e-8.
    adds_to_lengths = (case["name"], case["suite"]) == ("gmpo", "verl")
    assert_same(loss, gradient, case, within=5e-8 if adds_to_lengths else 1e-12)
