"""Each loss against its equation worked out in plain Python; two pairs of unequal lengths throughout.

Pair 0 has replies of 2 and 4 tokens, pair 1 of 5 and 1. Log-probs are whole-reply sums.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from open_instruct.config.losses import PREFERENCE_LOSSES, SMOOTHED
from open_instruct.config.sections import PreferenceLossSection
from open_instruct.errors import InputError
from open_instruct.losses import preference
from open_instruct.losses.preference import PREFERENCE_FUNCTIONS, PreferenceLossInputs, PreferenceLossOutputs
from open_instruct.objectives.dpo import bind

CHOSEN, REJECTED = [-3.0, -10.0], [-8.0, -2.0]
REFERENCE_CHOSEN, REFERENCE_REJECTED = [-4.0, -9.0], [-6.0, -2.5]
CHOSEN_LENGTHS, REJECTED_LENGTHS = [2, 5], [4, 1]

OF_PAIRS = [name for name, loss in PREFERENCE_LOSSES.items() if not loss.needs_global_batch]
REFERENCE_BASED = [name for name, loss in PREFERENCE_LOSSES.items() if loss.needs_reference]
SMOOTHABLE = ["dpo", "dpo_norm", "simpo", "wpo", "robust", "exo_pair", "aot", "aot_unpaired", "cpo"]


def preference_loss(
    name: str, inputs: PreferenceLossInputs, *, beta: float, label_smoothing: float = 0.0, gamma_beta_ratio: float = 0.0
) -> PreferenceLossOutputs:
    flags = {"beta": beta, "label_smoothing": label_smoothing, "gamma_beta_ratio": gamma_beta_ratio}
    return preference.preference_loss(section(name, **flags), matched(inputs))


def section(name: str, **flags: Any) -> PreferenceLossSection:
    """Of a loss that has no value without label smoothing, its paper's."""
    if name == "exo_pair" and not flags.get("label_smoothing"):
        flags["label_smoothing"] = 1e-3
    return PreferenceLossSection(loss_type=name, **flags)


def matched(inputs: PreferenceLossInputs) -> PreferenceLossInputs:
    """With what the losses of a global batch must know of it, where these pairs are all of it."""
    if inputs.reference_logps_2P is None:
        return inputs
    return replace(inputs, matched_3P=preference.matched_pairs(preference.to_match(inputs)))


def make_inputs(
    chosen: list[float] = CHOSEN,
    rejected: list[float] = REJECTED,
    reference_chosen: list[float] | None = REFERENCE_CHOSEN,
    reference_rejected: list[float] | None = REFERENCE_REJECTED,
    chosen_lengths: list[int] = CHOSEN_LENGTHS,
    rejected_lengths: list[int] = REJECTED_LENGTHS,
    dtype: torch.dtype = torch.float64,
) -> PreferenceLossInputs:
    references = None if reference_chosen is None else torch.tensor([reference_chosen, reference_rejected], dtype=dtype)
    return PreferenceLossInputs(
        policy_logps_2P=torch.tensor([chosen, rejected], dtype=dtype, requires_grad=True),
        lengths_2P=torch.tensor([chosen_lengths, rejected_lengths]),
        reference_logps_2P=references,
    )


def swapped(inputs: PreferenceLossInputs) -> PreferenceLossInputs:
    """The same pairs with chosen and rejected exchanged."""
    return PreferenceLossInputs(
        policy_logps_2P=inputs.policy_logps_2P.flip(0),
        lengths_2P=inputs.lengths_2P.flip(0),
        reference_logps_2P=None if inputs.reference_logps_2P is None else inputs.reference_logps_2P.flip(0),
    )


def softplus(x: float) -> float:
    """-log sigmoid(-x)."""
    return math.log(1.0 + math.exp(x))


def close(tensor: torch.Tensor, expected: list[float] | list[list[float]]) -> None:
    torch.testing.assert_close(tensor, torch.tensor(expected, dtype=tensor.dtype), rtol=1e-12, atol=1e-12)


def check(
    outputs: PreferenceLossOutputs,
    *,
    losses: list[float],
    chosen_rewards: list[float],
    rejected_rewards: list[float],
    chosen_logps: list[float],
    rejected_logps: list[float],
) -> None:
    close(outputs.losses_P, losses)
    close(outputs.rewards_2P, [chosen_rewards, rejected_rewards])
    close(outputs.logps_2P, [chosen_logps, rejected_logps])


def test_dpo_by_hand() -> None:
    # Log-ratios: chosen 1, -1; rejected -2, 0.5. Margins 3 and -1.5; times 0.1: 0.3 and -0.15.
    check(
        preference_loss("dpo", make_inputs(), beta=0.1),
        losses=[softplus(-0.3), softplus(0.15)],
        chosen_rewards=[0.1, -0.1],
        rejected_rewards=[-0.2, 0.05],
        chosen_logps=[-3.0, -10.0],
        rejected_logps=[-8.0, -2.0],
    )


def test_dpo_norm_by_hand() -> None:
    # Log-ratios per token: chosen 1/2, -1/5; rejected -2/4, 0.5/1. Margins 1 and -0.7; times 2: 2 and -1.4.
    check(
        preference_loss("dpo_norm", make_inputs(), beta=2.0),
        losses=[softplus(-2.0), softplus(1.4)],
        chosen_rewards=[1.0, -0.4],
        rejected_rewards=[-1.0, 1.0],
        chosen_logps=[-1.5, -2.0],
        rejected_logps=[-2.0, -2.0],
    )


@pytest.mark.parametrize("reference", [None, [5.0, 7.0]])
def test_simpo_by_hand_whatever_the_reference(reference: list[float] | None) -> None:
    # Means: chosen -1.5, -2; rejected -2, -2. Margins 0.5 and 0; minus 0.3: 0.2, -0.3; times 2: 0.4, -0.6.
    inputs = make_inputs(reference_chosen=reference, reference_rejected=reference)
    check(
        preference_loss("simpo", inputs, beta=2.0, gamma_beta_ratio=0.3),
        losses=[softplus(-0.4), softplus(0.6)],
        chosen_rewards=[-3.0, -4.0],
        rejected_rewards=[-4.0, -4.0],
        chosen_logps=[-1.5, -2.0],
        rejected_logps=[-2.0, -2.0],
    )


def test_wpo_by_hand() -> None:
    # The DPO losses, weighted by exp(-1.5 - 2) and exp(-2 - 2).
    check(
        preference_loss("wpo", make_inputs(), beta=0.1),
        losses=[math.exp(-3.5) * softplus(-0.3), math.exp(-4.0) * softplus(0.15)],
        chosen_rewards=[0.1, -0.1],
        rejected_rewards=[-0.2, 0.05],
        chosen_logps=[-3.0, -10.0],
        rejected_logps=[-8.0, -2.0],
    )


def test_ipo_by_hand() -> None:
    # Margins per token 1 and -0.7; the target is 1 / (2 * 0.25) = 2.
    check(
        preference_loss("ipo", make_inputs(), beta=0.25),
        losses=[1.0, 7.29],
        chosen_rewards=[0.125, -0.05],
        rejected_rewards=[-0.125, 0.125],
        chosen_logps=[-1.5, -2.0],
        rejected_logps=[-2.0, -2.0],
    )


def test_hinge_by_hand() -> None:
    # Margins 3 and -1.5, times 0.5: the first is beyond the hinge.
    check(
        preference_loss("hinge", make_inputs(), beta=0.5),
        losses=[0.0, 1.75],
        chosen_rewards=[0.5, -0.5],
        rejected_rewards=[-1.0, 0.25],
        chosen_logps=[-3.0, -10.0],
        rejected_logps=[-8.0, -2.0],
    )


@pytest.mark.parametrize(
    ("name", "margins", "weights"),
    [
        ("dpo", [0.3, -0.15], [1.0, 1.0]),
        ("dpo_norm", [0.1, -0.07], [1.0, 1.0]),
        ("simpo", [0.02, -0.03], [1.0, 1.0]),
        ("wpo", [0.3, -0.15], [math.exp(-3.5), math.exp(-4.0)]),
    ],
)
def test_label_smoothing_by_hand(name: str, margins: list[float], weights: list[float]) -> None:
    outputs = preference_loss(name, make_inputs(), beta=0.1, label_smoothing=0.2, gamma_beta_ratio=0.3)
    pairs = zip(margins, weights, strict=True)
    close(outputs.losses_P, [weight * (0.8 * softplus(-m) + 0.2 * softplus(m)) for m, weight in pairs])


@pytest.mark.parametrize("name", ["dpo", "dpo_norm", "wpo"])
def test_smoothing_is_the_expectation_over_flipped_labels(name: str) -> None:
    kept = preference_loss(name, make_inputs(), beta=0.7).losses_P
    flipped = preference_loss(name, swapped(make_inputs()), beta=0.7).losses_P
    smoothed = preference_loss(name, make_inputs(), beta=0.7, label_smoothing=0.1).losses_P
    torch.testing.assert_close(smoothed, 0.9 * kept + 0.1 * flipped)


@pytest.mark.parametrize(
    ("name", "label_smoothing"),
    [(name, 0.0) for name in REFERENCE_BASED] + [("dpo", 0.3), ("dpo_norm", 0.3), ("wpo", 0.3)],
)
def test_loss_where_policy_is_the_reference(name: str, label_smoothing: float) -> None:
    chosen, rejected = [-812.3, -7.7], [-33.1, -1234.5]
    inputs = make_inputs(chosen, rejected, chosen, rejected, [400, 3], [20, 617], dtype=torch.float32)
    beta = 0.1
    expected = {
        **{loss: [math.log(2.0)] * 2 for loss in ("dpo", "dpo_norm", "robust", "aot", "aot_unpaired")},
        "wpo": [
            math.log(2.0) * math.exp(-812.3 / 400 - 33.1 / 20),
            math.log(2.0) * math.exp(-7.7 / 3 - 1234.5 / 617),
        ],
        "ipo": [(1.0 / (2.0 * beta)) ** 2] * 2,
        **{loss: [1.0, 1.0] for loss in ("hinge", "apo_zero", "apo_down")},
        "exo_pair": [-math.log(2.0) - 0.5 * math.log(1e-3 * 0.999)] * 2,
        "nca_pair": [2 * math.log(2.0)] * 2,
        "bco_pair": [2 * math.log(2.0)] * 2,
        "sppo_hard": [50.0, 50.0],
        "discopop": [0.5 * math.log(2.0) + 0.5] * 2,
    }[name]
    outputs = preference_loss(name, inputs, beta=beta, label_smoothing=label_smoothing)
    torch.testing.assert_close(outputs.losses_P, torch.tensor(expected), rtol=1e-6, atol=0.0)
    assert outputs.rewards_2P.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", [name for name in OF_PAIRS if name != "wpo"])
def test_gradient_by_finite_differences(name: str) -> None:
    smoothing = 0.1 if name in SMOOTHABLE else 0.0

    def losses(logps_2P: torch.Tensor) -> torch.Tensor:
        moved = replace(make_inputs(), policy_logps_2P=logps_2P)
        return preference_loss(name, moved, beta=0.4, label_smoothing=smoothing, gamma_beta_ratio=0.3).losses_P

    assert torch.autograd.gradcheck(losses, (make_inputs().policy_logps_2P,))


def test_wpo_gradient_is_dpos_times_the_weight_with_none_through_the_weight() -> None:
    dpo, wpo = make_inputs(), make_inputs()
    preference_loss("dpo", dpo, beta=0.4).losses_P.sum().backward()
    preference_loss("wpo", wpo, beta=0.4).losses_P.sum().backward()
    assert dpo.policy_logps_2P.grad is not None and wpo.policy_logps_2P.grad is not None
    weights = torch.tensor([math.exp(-3.5), math.exp(-4.0)], dtype=torch.float64)
    torch.testing.assert_close(wpo.policy_logps_2P.grad, weights * dpo.policy_logps_2P.grad)


def test_wpo_weight_is_clamped_at_one() -> None:
    # Log-probs above 0 only come from rounding; they must not make a weight above 1.
    inputs = make_inputs([0.2, 0.1], [0.4, 0.3], [0.2, 0.1], [0.4, 0.3])
    close(preference_loss("wpo", inputs, beta=0.1).losses_P, [math.log(2.0), math.log(2.0)])


@pytest.mark.parametrize("name", OF_PAIRS)
def test_one_loss_per_pair_each_from_its_own_pair_alone(name: str) -> None:
    """With (P,) times (P, T), or a mean inside, a pair's loss would depend on its neighbours."""
    together = preference_loss(name, make_inputs(), beta=0.4, gamma_beta_ratio=0.3)
    assert together.losses_P.shape == (2,)
    for pair in range(2):
        alone = preference_loss(
            name,
            make_inputs(
                [CHOSEN[pair]],
                [REJECTED[pair]],
                [REFERENCE_CHOSEN[pair]],
                [REFERENCE_REJECTED[pair]],
                [CHOSEN_LENGTHS[pair]],
                [REJECTED_LENGTHS[pair]],
            ),
            beta=0.4,
            gamma_beta_ratio=0.3,
        )
        assert alone.losses_P.tolist() == [together.losses_P[pair].item()]


@pytest.mark.parametrize("name", list(PREFERENCE_LOSSES))
def test_only_the_losses_carry_gradient(name: str) -> None:
    outputs = preference_loss(name, make_inputs(), beta=0.4)
    assert outputs.losses_P.requires_grad
    assert not outputs.rewards_2P.requires_grad and not outputs.logps_2P.requires_grad


@pytest.mark.parametrize("name", list(PREFERENCE_LOSSES))
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_margins_stay_finite(name: str, sign: float) -> None:
    far, near = [-1e6, -1e6], [-1e-3, -1e-3]
    chosen, rejected = (near, far) if sign > 0 else (far, near)
    inputs = make_inputs(chosen, rejected, rejected, chosen, [1, 1], [1, 1], dtype=torch.float32)
    losses_P = preference_loss(name, inputs, beta=10.0, gamma_beta_ratio=0.5).losses_P
    assert losses_P.isfinite().all() and all(gradient_P.isfinite().all() for gradient_P in gradients(losses_P, inputs))


def gradients(losses_P: torch.Tensor, inputs: PreferenceLossInputs) -> list[torch.Tensor]:
    """Of the sum, by the log-probs of chosen and of rejected replies."""
    return list(torch.autograd.grad(losses_P.sum(), inputs.policy_logps_2P)[0])


@pytest.mark.parametrize("name", REFERENCE_BASED)
def test_pairs_within_rounding_of_the_reference_are_not_told_apart(name: str) -> None:
    """The same log-probs added up in another order; 1e-4 nats of 30 are more than that."""
    rest = {"reference_chosen": [-30.0] * 3, "reference_rejected": [-25.0] * 3, "rejected": [-25.0] * 3}
    inputs = make_inputs([-29.99999, -30.00001, -29.9999], chosen_lengths=[3] * 3, rejected_lengths=[3] * 3, **rest)
    assert preference_loss(name, inputs, beta=0.1).is_right_P.tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", list(PREFERENCE_LOSSES))
def test_no_pairs(name: str) -> None:
    inputs = make_inputs([], [], [], [], [], [])
    outputs = preference_loss(name, inputs, beta=0.1)
    assert outputs.losses_P.shape == (0,) and outputs.rewards_2P.shape == (2, 0)
    assert outputs.losses_P.sum().item() == 0.0


def test_every_loss_of_the_table_has_a_function() -> None:
    assert list(PREFERENCE_FUNCTIONS) == list(PREFERENCE_LOSSES)
    assert SMOOTHED == SMOOTHABLE


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_the_table_knows_the_loss_at_the_reference(name: str) -> None:
    loss = section(name)
    inputs = make_inputs(reference_chosen=CHOSEN, reference_rejected=REJECTED)
    losses_P = preference.preference_loss(loss, matched(inputs)).losses_P
    first_loss = PREFERENCE_LOSSES[name].first_loss
    if first_loss is None:
        assert losses_P[0] != losses_P[1]
    else:
        close(losses_P, [first_loss(loss.beta, loss.label_smoothing)] * 2)


@pytest.mark.parametrize(
    ("name", "flags", "named"),
    [
        ("dop", {}, "--loss_type"),
        ("dpo", {"beta": 0.0}, "--beta"),
        ("dpo", {"beta": float("nan")}, "--beta"),
        ("dpo", {"label_smoothing": 0.5}, "--label_smoothing"),
        ("dpo", {"label_smoothing": -0.1}, "--label_smoothing"),
        ("ipo", {"label_smoothing": 0.1}, "--label_smoothing"),
        ("hinge", {"label_smoothing": 0.1}, "--label_smoothing"),
        ("simpo", {"gamma_beta_ratio": -1.0}, "--gamma_beta_ratio"),
    ],
)
def test_flags_that_cannot_work_are_refused_by_name(name: str, flags: dict[str, float], named: str) -> None:
    with pytest.raises(InputError, match=named):
        bind(PreferenceLossSection(loss_type=name, **({"beta": 0.1} | flags)))


@pytest.mark.parametrize("name", REFERENCE_BASED)
def test_a_missing_reference_is_never_taken_for_zero(name: str) -> None:
    with pytest.raises(AssertionError, match="reference"):
        preference_loss(name, make_inputs(reference_chosen=None, reference_rejected=None), beta=0.1)


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(AssertionError, match="lengths_2P"):
        make_inputs(chosen_lengths=[2], rejected_lengths=[4])


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_margins_that_are_far_off_have_finite_losses_and_gradients(name: str) -> None:
    far = [89.0, -89.0, 1e4, -1e4]
    inputs = make_inputs(far, far[::-1], [0.0] * 4, [0.0] * 4, [1] * 4, [1] * 4, dtype=torch.float32)
    smoothing = 0.1 if name in SMOOTHABLE else 0.0
    losses_P = preference_loss(name, inputs, beta=5.0, label_smoothing=smoothing).losses_P
    assert losses_P.isfinite().all() and all(gradient_P.isfinite().all() for gradient_P in gradients(losses_P, inputs))
