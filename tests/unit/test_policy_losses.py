"""Each policy loss against its equation worked out in plain Python, value and gradient; KL, mismatch, advantages."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from open_instruct.config.losses import POLICY_LOSSES
from open_instruct.config.rollout_sections import PolicyLossSection
from open_instruct.losses.advantages import group_advantages, has_signal
from open_instruct.losses.kl import kl_estimates
from open_instruct.losses.mismatch import Correction, correct_mismatch, rho_values
from open_instruct.losses.policy import (
    POLICY_FUNCTIONS,
    PolicyLossInputs,
    PolicyLossOutputs,
    global_denominator,
    policy_loss,
    shares,
)

# Completion 0 has three tokens and advantage 2, completion 1 one token and advantage -1.
RATIOS = [1.1, 1.5, 0.5, 0.5]
OLD = [-1.0, -2.0, -0.5, -3.0]
ADVANTAGES = [2.0, 2.0, 2.0, -1.0]
SEQUENCE_IDS = [0, 0, 0, 1]
LOWER, HIGHER = 0.2, 0.3


def make_inputs(
    ratios: list[float] = RATIOS, advantages: list[float] = ADVANTAGES, sequence_ids: list[int] = SEQUENCE_IDS
) -> PolicyLossInputs:
    old_N = torch.tensor(OLD[: len(ratios)], dtype=torch.float64)
    return PolicyLossInputs(
        logprobs_N=(old_N + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        old_logprobs_N=old_N,
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        sequence_ids_N=torch.tensor(sequence_ids, dtype=torch.long),
        num_sequences=2,
        marked_N=torch.zeros(len(ratios), dtype=torch.float64),
    )


def settings_of(kind: str, **rest: Any) -> PolicyLossSection:
    return PolicyLossSection(loss_fn=kind, clip_lower=LOWER, clip_higher=HIGHER, **rest)


def losses_and_gradients(kind: str, inputs: PolicyLossInputs) -> tuple[PolicyLossOutputs, list[float], list[float]]:
    outputs = policy_loss(inputs, settings_of(kind))
    (gradient_N,) = torch.autograd.grad(outputs.losses_N.sum(), inputs.logprobs_N)
    return outputs, outputs.losses_N.tolist(), gradient_N.tolist()


def test_every_loss_of_the_table_has_a_function() -> None:
    assert list(POLICY_FUNCTIONS) == list(POLICY_LOSSES)


# --- losses ------------------------------------------------------------------------------------------

# -min(r A, clip(r, 0.8, 1.3) A): inside; clipped above; below, where the unclipped value is the smaller one; and a bad
# completion whose token became rarer than the clip range rewards. The gradient is -r A where nothing was clipped.
DAPO_LOSSES = [-1.1 * 2, -1.3 * 2, -0.5 * 2, 0.8]
DAPO_GRADIENTS = [-2.2, 0.0, -1.0, 0.0]
LENGTHS = [3, 3, 3, 1]


@pytest.mark.parametrize("kind", ["dapo", "dr_grpo"])
def test_clipped_ratio(kind: str) -> None:
    outputs, losses, gradients = losses_and_gradients(kind, make_inputs())
    assert losses == pytest.approx(DAPO_LOSSES)
    assert gradients == pytest.approx(DAPO_GRADIENTS)
    assert outputs.is_clipped_N.tolist() == [0, 1, 0, 1]


def test_grpo_averages_each_completion() -> None:
    outputs, losses, gradients = losses_and_gradients("grpo", make_inputs())
    assert losses == pytest.approx([loss / n for loss, n in zip(DAPO_LOSSES, LENGTHS, strict=True)])
    assert gradients == pytest.approx([gradient / n for gradient, n in zip(DAPO_GRADIENTS, LENGTHS, strict=True)])
    assert outputs.is_clipped_N.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(("from_below", "clipped"), [(False, [1.1, 1.3, 0.5, 0.5]), (True, [1.1, 1.3, 0.8, 0.8])])
def test_cispo_keeps_the_gradient_of_every_token(from_below: bool, clipped: list[float]) -> None:
    inputs = make_inputs()
    outputs = policy_loss(inputs, settings_of("cispo", cispo_clamp_below=from_below))
    (gradient_N,) = torch.autograd.grad(outputs.losses_N.sum(), inputs.logprobs_N)
    logprobs = [old + math.log(ratio) for old, ratio in zip(OLD, RATIOS, strict=True)]
    expected = [-c * a * lp for c, a, lp in zip(clipped, ADVANTAGES, logprobs, strict=True)]
    assert outputs.losses_N.tolist() == pytest.approx(expected)
    assert gradient_N.tolist() == pytest.approx([-c * a for c, a in zip(clipped, ADVANTAGES, strict=True)])
    assert outputs.is_clipped_N.tolist() == [float(c != r) for c, r in zip(clipped, RATIOS, strict=True)]


def test_gspo_clips_whole_completions() -> None:
    outputs, losses, gradients = losses_and_gradients("gspo", make_inputs())
    # The geometric mean of 1.1, 1.5 and 0.5 lies inside the range; completion 1's is its only ratio.
    mean = (1.1 * 1.5 * 0.5) ** (1 / 3)
    assert 0.8 < mean < 1.3
    assert losses == pytest.approx([-mean * 2 / 3] * 3 + [0.8])
    # d/dlogp_t of -s A with s = exp(mean of log r): -s A / |o|, the same for every token of the completion.
    assert gradients == pytest.approx([-mean * 2 / 3] * 3 + [0.0])
    assert outputs.is_clipped_N.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_on_policy_the_gradient_is_that_of_reinforce(kind: str) -> None:
    inputs = make_inputs(ratios=[1.0] * 4)
    outputs, _, gradients = losses_and_gradients(kind, inputs)
    lengths = LENGTHS if POLICY_LOSSES[kind].averaged else [1] * 4
    assert gradients == pytest.approx([-a / n for a, n in zip(ADVANTAGES, lengths, strict=True)])
    assert outputs.is_clipped_N.sum() == 0


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_no_completions_cost_nothing(kind: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    inputs = PolicyLossInputs(
        logprobs_N=empty,
        old_logprobs_N=torch.zeros(0),
        advantages_N=torch.zeros(0),
        sequence_ids_N=torch.zeros(0, dtype=torch.long),
        num_sequences=0,
        marked_N=torch.zeros(0),
    )
    outputs = policy_loss(inputs, settings_of(kind))
    loss = outputs.losses_N.sum() + shares(kind, empty, inputs).sum()
    loss.backward()
    assert loss == 0 and empty.grad is not None


token_lists = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0.1, 3.0), min_size=n, max_size=n),
        st.lists(st.floats(-2.0, 2.0), min_size=n, max_size=n),
    )
)


@settings(max_examples=30)
@given(completions=st.lists(token_lists, min_size=2, max_size=4), kind=st.sampled_from(sorted(POLICY_LOSSES)))
def test_the_sum_does_not_depend_on_the_split(completions: list, kind: str) -> None:
    def total(chosen: list) -> float:
        ratios = [r for ratios, _ in chosen for r in ratios]
        inputs = PolicyLossInputs(
            logprobs_N=torch.tensor(ratios, dtype=torch.float64).log(),
            old_logprobs_N=torch.zeros(len(ratios), dtype=torch.float64),
            # One advantage a completion, as sampling has it.
            advantages_N=torch.tensor([a[0] for _, a in chosen for _ in a], dtype=torch.float64),
            sequence_ids_N=torch.tensor([i for i, (r, _) in enumerate(chosen) for _ in r]),
            num_sequences=len(chosen),
            marked_N=torch.tensor([float(r > 1) for r in ratios], dtype=torch.float64),
        )
        return float(policy_loss(inputs, settings_of(kind)).losses_N.sum())

    assert total(completions) == pytest.approx(sum(total([one]) for one in completions), abs=1e-9)


FAR_APART = [89.0, -89.0, 1e4, -1e4]


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_policies_that_are_far_apart_have_finite_losses_and_gradients(kind: str) -> None:
    """In float32, where exp overflows from 89 on; log-ratios of both signs with advantages of both signs."""
    log_ratios_N = torch.tensor(FAR_APART * 2)
    inputs = PolicyLossInputs(
        logprobs_N=(log_ratios_N - 1.0).requires_grad_(),
        old_logprobs_N=torch.full_like(log_ratios_N, -1.0),
        advantages_N=torch.tensor([1.0] * 4 + [-1.0] * 4),
        sequence_ids_N=torch.arange(8),
        num_sequences=8,
        marked_N=torch.ones(8),
    )
    outputs, _, gradients = losses_and_gradients(kind, inputs)
    assert outputs.losses_N.isfinite().all() and all(map(math.isfinite, gradients))


@pytest.mark.parametrize("kind", get_args(get_type_hints(PolicyLossSection)["rho_correction"]))
def test_rho_of_policies_that_are_far_apart_is_finite(kind: str) -> None:
    log_rho_N, ids_N = torch.tensor(FAR_APART), torch.arange(4)
    zeros_N = torch.zeros_like(log_rho_N)
    correction = correct_mismatch(
        PolicyLossSection(rho_correction=kind),
        learner_logprobs_N=log_rho_N,
        engine_logprobs_N=zeros_N,
        sequence_ids_N=ids_N,
        num_sequences=4,
    )
    assert all(values_N.isfinite().all() for values_N in rho_values(correction).values())
    assert correction.weights_N.isfinite().all()


@pytest.mark.parametrize("estimator", ["0", "1", "2", "3"])
def test_kl_of_policies_that_are_far_apart_is_finite(estimator: str) -> None:
    logprobs_N = torch.tensor(FAR_APART, requires_grad=True)
    kl_N = kl_estimates(estimator, logprobs_N, torch.zeros(4))
    (gradients_N,) = torch.autograd.grad(kl_N.sum(), logprobs_N)
    assert kl_N.isfinite().all() and gradients_N.isfinite().all()


def test_denominators() -> None:
    counts = {"num_tokens": 900, "num_completions": 12, "response_length": 100}
    by_kind = {"tokens": 900, "completions": 12, "response_length": 1200}
    for kind, known in POLICY_LOSSES.items():
        assert global_denominator(kind, **counts) == by_kind[known.denominator], kind
    assert {kind for kind, known in POLICY_LOSSES.items() if known.denominator != "tokens"} == {
        *("grpo", "dr_grpo", "gspo", "sapo", "gmpo", "luspo")
    }
    assert global_denominator("of_my_own.py:loss", **counts) == 900
    assert global_denominator("dapo", **counts, constant=50) == 600


def test_kl_counts_as_the_loss_does() -> None:
    kl_N, inputs = torch.tensor([3.0, 6.0, 9.0, 4.0]), make_inputs()
    assert shares("dapo", kl_N, inputs).tolist() == [3, 6, 9, 4]
    assert shares("gspo", kl_N, inputs).tolist() == [1, 2, 3, 4]


# --- divergence --------------------------------------------------------------------------------------


@pytest.mark.parametrize("difference", [-1.5, 0.0, 0.3, 2.0])
@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("0", lambda d: d, lambda d: 1.0),
        ("1", lambda d: d * d / 2, lambda d: d),
        ("2", lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
        ("3", lambda d: d, lambda d: d + 1),
    ],
)
def test_kl_value_and_gradient(
    estimator: str, value: Callable[[float], float], gradient: Callable[[float], float], difference: float
) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    kl = kl_estimates(estimator, logprobs, torch.tensor([-1.0 - difference], dtype=torch.float64))
    kl.sum().backward()
    assert logprobs.grad is not None
    assert kl.item() == pytest.approx(value(difference), abs=1e-12)
    assert logprobs.grad.item() == pytest.approx(gradient(difference), abs=1e-12)


def test_expected_kl_and_expected_gradients() -> None:
    """Over a small vocabulary expectations are sums, so what each estimator estimates can be computed."""
    logits = torch.tensor([0.4, -1.0, 0.3, 1.2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, -0.9, 0.6], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    forward_kl = (policy.exp() * (policy - reference)).sum()
    reverse_kl = (reference.exp() * (reference - policy)).sum()
    of_forward, of_reverse = (torch.autograd.grad(kl, logits, retain_graph=True)[0] for kl in (forward_kl, reverse_kl))
    expected = {"0": torch.zeros(4), "1": of_forward, "2": of_reverse, "3": of_forward}
    for estimator, gradient in expected.items():
        kl_V = kl_estimates(estimator, policy, reference)
        probabilities = policy.exp().detach()
        if estimator != "1":
            assert (probabilities * kl_V).sum().item() == pytest.approx(forward_kl.item()), estimator
        (ours,) = torch.autograd.grad((probabilities * kl_V).sum(), logits, retain_graph=True)
        torch.testing.assert_close(ours, gradient.to(ours.dtype), atol=1e-12, rtol=1e-9)


# --- learner against engine --------------------------------------------------------------------------


def corrected(kind: str, ratios: list[float], sequence_ids: list[int], **settings: Any) -> Correction:
    learner_N = torch.zeros(len(ratios), dtype=torch.float64, requires_grad=True)
    return correct_mismatch(
        PolicyLossSection(rho_correction=kind, **settings),
        learner_logprobs_N=learner_N,
        engine_logprobs_N=-torch.tensor(ratios, dtype=torch.float64).log(),
        sequence_ids_N=torch.tensor(sequence_ids, dtype=torch.long),
        num_sequences=3,
    )


@pytest.mark.parametrize(
    ("kind", "weights", "is_corrected"),
    [
        ("none", [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]),
        ("clamp", [2, 1, 0.1, 2, 1.8, 0.4], [1, 0, 0, 1, 0, 0]),
        ("token_mask", [0, 1, 0, 0, 1, 0], [1, 0, 1, 1, 0, 1]),
        # Geometric means 0.67, 2.68 and 0.4; sequence 0 stays whole although tokens of it are outside.
        ("sequence_mask", [1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]),
    ],
)
def test_corrections(kind: str, weights: list[float], is_corrected: list[int]) -> None:
    ratios = [3.0, 1.0, 0.1, 4.0, 1.8, 0.4]
    correction = corrected(kind, ratios, [0, 0, 0, 1, 1, 2])
    assert correction.weights_N.tolist() == pytest.approx(weights)
    assert correction.is_corrected_N.int().tolist() == is_corrected
    assert correction.rho_N.tolist() == pytest.approx(ratios)
    assert not correction.weights_N.requires_grad and not correction.rho_N.requires_grad


@pytest.mark.parametrize(
    ("bounds", "weights"),
    [
        ({}, [3, 1, 0.1, 4, 1.8, 0.4]),
        ({"rho_clamp_upper": 2, "rho_clamp_lower": 0.5}, [2, 1, 0.5, 2, 1.8, 0.5]),
        ({"rho_mask_upper": 2, "rho_mask_lower": 0.2}, [0, 1, 0, 0, 1.8, 0.4]),
        ({"rho_clamp_upper": 1.5, "rho_mask_upper": 3.5}, [1.5, 1, 0.1, 0, 1.5, 0.4]),
        # Geometric means 0.3^(1/3), 7.2^(1/2) and 0.4.
        ({"rho_level": "sequence"}, [0.3 ** (1 / 3)] * 3 + [7.2**0.5] * 2 + [0.4]),
        ({"rho_level": "sequence", "rho_mask_lower": 0.5, "rho_clamp_upper": 2}, [0.3 ** (1 / 3)] * 3 + [2, 2, 0]),
    ],
)
def test_bounds_of_their_own(bounds: dict[str, Any], weights: list[float]) -> None:
    ratios, ids = [3.0, 1.0, 0.1, 4.0, 1.8, 0.4], [0, 0, 0, 1, 1, 2]
    correction = corrected("bounds", ratios, ids, **bounds)
    assert correction.weights_N.tolist() == pytest.approx(weights)
    if "rho_level" not in bounds:
        expected = [not math.isclose(weight, ratio) for weight, ratio in zip(weights, ratios, strict=True)]
        assert correction.is_corrected_N.tolist() == expected


@settings(max_examples=30)
@given(
    ratios=st.lists(st.floats(1e-3, 1e3), max_size=8), kind=st.sampled_from(["clamp", "token_mask", "sequence_mask"])
)
def test_weights_never_exceed_the_cap_and_agreement_is_left_alone(ratios: list[float], kind: str) -> None:
    weights_N = corrected(kind, ratios, [0] * len(ratios)).weights_N
    assert all(0 <= weight <= 2.0 for weight in weights_N.tolist())
    assert corrected(kind, [1.0] * 3, [0, 1, 1]).weights_N.tolist() == pytest.approx([1] * 3)


def test_buckets_of_rho() -> None:
    correction = corrected("clamp", [0.1, 0.9, 1.0, 1.04, 1.5, 3.0], [0, 0, 0, 1, 1, 1])
    means = {name: value_N.double().mean().item() for name, value_N in rho_values(correction).items()}
    assert means.pop("rho/mean") == pytest.approx(7.54 / 6)
    assert means.pop("rho/corrected_fraction") == pytest.approx(1 / 6)
    assert means == pytest.approx(
        {
            "rho/hist_0_to_0.5": 1 / 6,
            "rho/hist_0.5_to_0.8": 0,
            "rho/hist_0.8_to_0.95": 1 / 6,
            "rho/hist_0.95_to_1.05": 2 / 6,
            "rho/hist_1.05_to_1.25": 0,
            "rho/hist_1.25_to_2": 1 / 6,
            "rho/hist_2_to_inf": 1 / 6,
        }
    )


# --- advantages --------------------------------------------------------------------------------------


def test_advantages_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    assert group_advantages(rewards, "centered") == pytest.approx((0.75, -0.25, -0.25, -0.25))
    std = math.sqrt(0.1875)  # the population's: the mean of the squares, not divided by 3
    assert group_advantages(rewards, "standard") == pytest.approx((0.75 / std, *(-0.25 / std,) * 3))


@pytest.mark.parametrize("normalization", ["standard", "centered"])
def test_a_group_without_a_signal(normalization: Literal["standard", "centered"]) -> None:
    # 0.1 * 3 is not 0.3 in floating point: a rounding error must not be divided by itself.
    for rewards in ([], [1.0], [0.0, 0.0], [0.1 * 3, 0.3]):
        assert not has_signal(rewards)
        assert group_advantages(rewards, normalization) == (0.0,) * len(rewards)
    assert has_signal([0.0, 0.1])


@given(rewards=st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, -2.0]), min_size=2, max_size=8))
def test_advantages_are_centred_and_keep_the_order(rewards: list[float]) -> None:
    for normalization in get_args(get_type_hints(group_advantages)["normalization"]):
        advantages = group_advantages(rewards, normalization)
        assert math.fsum(advantages) == pytest.approx(0, abs=1e-9)
        pairs = sorted(zip(rewards, advantages, strict=True))
        assert all(b - a >= -1e-12 for (_, a), (_, b) in pairwise(pairs))
    if has_signal(rewards):
        squares = [a * a for a in group_advantages(rewards, "standard")]
        assert math.fsum(squares) / len(squares) == pytest.approx(1, abs=1e-6)
