"""The estimates of the divergence, and the correction for engines that disagree: values and
gradients by hand.
"""

import math
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from open_instruct.config.policy_sections import PolicyLossSection
from open_instruct.losses.mismatch import (
    MISMATCH_FLAGS,
    Correction,
    correct_mismatch,
    kl_estimates,
    rho_values,
)
from open_instruct.losses.registry import bind_flags
from tests.tiers import num_examples

FAR_APART = [89.0, -89.0, 1e4, -1e4]


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
    estimator: str,
    value: Callable[[float], float],
    gradient: Callable[[float], float],
    difference: float,
) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    kl = kl_estimates(estimator, logprobs, torch.tensor([-1.0 - difference], dtype=torch.float64))
    kl.sum().backward()
    assert logprobs.grad is not None
    assert kl.item() == pytest.approx(value(difference), abs=1e-12)
    assert logprobs.grad.item() == pytest.approx(gradient(difference), abs=1e-12)


def test_expected_kl_and_expected_gradients() -> None:
    """Over a small vocabulary expectations are sums, so what each estimator estimates can be
    computed.
    """
    logits = torch.tensor([0.4, -1.0, 0.3, 1.2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, -0.9, 0.6], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    forward_kl = (policy.exp() * (policy - reference)).sum()
    reverse_kl = (reference.exp() * (reference - policy)).sum()
    of_forward, of_reverse = (
        torch.autograd.grad(kl, logits, retain_graph=True)[0] for kl in (forward_kl, reverse_kl)
    )
    expected = {"0": torch.zeros(4), "1": of_forward, "2": of_reverse, "3": of_forward}
    for estimator, gradient in expected.items():
        kl_V = kl_estimates(estimator, policy, reference)
        probabilities = policy.exp().detach()
        if estimator != "1":
            assert (probabilities * kl_V).sum().item() == pytest.approx(forward_kl.item()), (
                estimator
            )
        (ours,) = torch.autograd.grad((probabilities * kl_V).sum(), logits, retain_graph=True)
        torch.testing.assert_close(ours, gradient.to(ours.dtype), atol=1e-12, rtol=1e-9)


def corrected(
    kind: str, ratios: list[float], sequence_ids: list[int], **settings: Any
) -> Correction:
    learner_N = torch.zeros(len(ratios), dtype=torch.float64, requires_grad=True)
    log_rho_N = learner_N + torch.tensor(ratios, dtype=torch.float64).log()
    correct = bind_flags(
        correct_mismatch, MISMATCH_FLAGS, PolicyLossSection(rho_correction=kind, **settings)
    )
    return correct(log_rho_N, torch.tensor(sequence_ids, dtype=torch.long), 3)


@pytest.mark.parametrize(
    ("kind", "weights", "is_corrected"),
    [
        ("none", [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]),
        ("clamp", [2, 1, 0.1, 2, 1.8, 0.4], [1, 0, 0, 1, 0, 0]),
        ("token_mask", [0, 1, 0, 0, 1, 0], [1, 0, 1, 1, 0, 1]),
        # Geometric means 0.67, 2.68 and 0.4; sequence 0 stays whole although tokens of it are
        # outside.
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
        (
            {"rho_level": "sequence", "rho_mask_lower": 0.5, "rho_clamp_upper": 2},
            [0.3 ** (1 / 3)] * 3 + [2, 2, 0],
        ),
    ],
)
def test_bounds_of_their_own(bounds: dict[str, Any], weights: list[float]) -> None:
    ratios, ids = [3.0, 1.0, 0.1, 4.0, 1.8, 0.4], [0, 0, 0, 1, 1, 2]
    correction = corrected("bounds", ratios, ids, **bounds)
    assert correction.weights_N.tolist() == pytest.approx(weights)
    if "rho_level" not in bounds:
        expected = [
            not math.isclose(weight, ratio) for weight, ratio in zip(weights, ratios, strict=True)
        ]
        assert correction.is_corrected_N.tolist() == expected


@settings(max_examples=num_examples(30))
@given(
    ratios=st.lists(st.floats(1e-3, 1e3), max_size=8),
    kind=st.sampled_from(["clamp", "token_mask", "sequence_mask"]),
)
def test_weights_never_exceed_the_cap_and_agreement_is_left_alone(
    ratios: list[float], kind: str
) -> None:
    weights_N = corrected(kind, ratios, [0] * len(ratios)).weights_N
    assert all(0 <= weight <= 2.0 for weight in weights_N.tolist())
    assert corrected(kind, [1.0] * 3, [0, 1, 1]).weights_N.tolist() == pytest.approx([1] * 3)


def test_buckets_of_rho() -> None:
    correction = corrected("clamp", [0.1, 0.9, 1.0, 1.04, 1.5, 3.0], [0, 0, 0, 1, 1, 1])
    means = {
        name: value_N.double().mean().item() for name, value_N in rho_values(correction).items()
    }
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


@pytest.mark.parametrize("kind", get_args(get_type_hints(PolicyLossSection)["rho_correction"]))
def test_rho_of_policies_that_are_far_apart_is_finite(kind: str) -> None:
    correct = bind_flags(correct_mismatch, MISMATCH_FLAGS, PolicyLossSection(rho_correction=kind))
    correction = correct(torch.tensor(FAR_APART), torch.arange(4), 4)
    assert all(values_N.isfinite().all() for values_N in rho_values(correction).values())
    assert correction.weights_N.isfinite().all()


@pytest.mark.parametrize("estimator", ["0", "1", "2", "3"])
def test_kl_of_policies_that_are_far_apart_is_finite(estimator: str) -> None:
    logprobs_N = torch.tensor(FAR_APART, requires_grad=True)
    kl_N = kl_estimates(estimator, logprobs_N, torch.zeros(4))
    (gradients_N,) = torch.autograd.grad(kl_N.sum(), logprobs_N)
    assert kl_N.isfinite().all() and gradients_N.isfinite().all()
