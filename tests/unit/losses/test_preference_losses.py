"""What holds for every preference loss; two pairs of unequal lengths throughout. The equations are
in the file beside.

Pair 0 has replies of 2 and 4 tokens, pair 1 of 5 and 1. Log-probs are whole-reply sums.
"""

import math
from typing import Any

import pytest
import torch

from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.core.errors import InputError
from open_instruct.losses.preference import PREFERENCE_LOSSES
from open_instruct.losses.preference_loss import PreferenceLossInputs
from open_instruct.objectives import dpo

CHOSEN, REJECTED = [-3.0, -10.0], [-8.0, -2.0]
REFERENCE_CHOSEN, REFERENCE_REJECTED = [-4.0, -9.0], [-6.0, -2.5]
CHOSEN_LENGTHS, REJECTED_LENGTHS = [2, 5], [4, 1]

OF_PAIRS = [name for name, loss in PREFERENCE_LOSSES.items() if not loss.sorts_batch]
REFERENCE_BASED = [name for name, loss in PREFERENCE_LOSSES.items() if loss.needs_reference]


def preference_loss(
    name: str,
    inputs: PreferenceLossInputs,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    gamma_beta_ratio: float = 0.0,
) -> dpo.PreferenceLossOutputs:
    flags = {"beta": beta, "label_smoothing": label_smoothing, "gamma_beta_ratio": gamma_beta_ratio}
    return dpo.preference_loss(section(name, **flags), inputs)


def section(name: str, **flags: Any) -> PreferenceLossSection:
    """With its paper's label smoothing for the loss that has no value without."""
    if name == "exo_pair" and not flags.get("label_smoothing"):
        flags["label_smoothing"] = dpo.EXO_SMOOTHING
    return PreferenceLossSection(loss_type=name, **flags)


def make_inputs(
    chosen: list[float] = CHOSEN,
    rejected: list[float] = REJECTED,
    reference_chosen: list[float] | None = REFERENCE_CHOSEN,
    reference_rejected: list[float] | None = REFERENCE_REJECTED,
    chosen_lengths: list[int] = CHOSEN_LENGTHS,
    rejected_lengths: list[int] = REJECTED_LENGTHS,
    dtype: torch.dtype = torch.float64,
) -> PreferenceLossInputs:
    references = (
        None
        if reference_chosen is None
        else torch.tensor([reference_chosen, reference_rejected], dtype=dtype)
    )
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
        reference_logps_2P=None
        if inputs.reference_logps_2P is None
        else inputs.reference_logps_2P.flip(0),
    )


def close(tensor: torch.Tensor, expected: list[float] | list[list[float]]) -> None:
    torch.testing.assert_close(
        tensor, torch.tensor(expected, dtype=tensor.dtype), rtol=1e-12, atol=1e-12
    )


SUMS = [[-3.0, -10.0], [-8.0, -2.0]]
MEANS = [[-1.5, -2.0], [-2.0, -2.0]]


@pytest.mark.parametrize(
    ("name", "beta", "rewards", "logps"),
    [
        # Log-ratios: chosen 1, -1; rejected -2, 0.5.
        ("dpo", 0.1, [[0.1, -0.1], [-0.2, 0.05]], SUMS),
        ("wpo", 0.5, [[0.5, -0.5], [-1.0, 0.25]], SUMS),
        # The same per token: chosen 1/2, -1/5; rejected -2/4, 0.5/1.
        ("dpo_norm", 2.0, [[1.0, -0.4], [-1.0, 1.0]], MEANS),
        ("ipo", 0.25, [[0.125, -0.05], [-0.125, 0.125]], MEANS),
        # Means of log-probs, whatever the reference.
        ("simpo", 2.0, [[-3.0, -4.0], [-4.0, -4.0]], MEANS),
    ],
)
def test_rewards_and_log_probs_by_hand(
    name: str, beta: float, rewards: list[list[float]], logps: list[list[float]]
) -> None:
    outputs = preference_loss(name, make_inputs(), beta=beta)
    close(outputs.rewards_2P, rewards)
    close(outputs.logps_2P, logps)


def test_loss_without_a_reference_ignores_one() -> None:
    with_one, without = make_inputs(), make_inputs(reference_chosen=None, reference_rejected=None)
    losses_P, other_P = (
        preference_loss("simpo", each, beta=2.0).losses_P for each in (with_one, without)
    )
    assert torch.equal(losses_P, other_P)


def test_smoothing_is_the_expectation_over_flipped_labels() -> None:
    kept = preference_loss("wpo", make_inputs(), beta=0.7).losses_P
    flipped = preference_loss("wpo", swapped(make_inputs()), beta=0.7).losses_P
    smoothed = preference_loss("wpo", make_inputs(), beta=0.7, label_smoothing=0.1).losses_P
    torch.testing.assert_close(smoothed, 0.9 * kept + 0.1 * flipped)


@pytest.mark.parametrize(
    ("name", "label_smoothing"),
    [(name, 0.0) for name in REFERENCE_BASED] + [("dpo", 0.3), ("dpo_norm", 0.3), ("wpo", 0.3)],
)
def test_loss_where_policy_is_the_reference(name: str, label_smoothing: float) -> None:
    chosen, rejected = [-812.3, -7.7], [-33.1, -1234.5]
    inputs = make_inputs(
        chosen, rejected, chosen, rejected, [400, 3], [20, 617], dtype=torch.float32
    )
    beta = 0.1
    expected = {
        **{
            loss: [math.log(2.0)] * 2
            for loss in ("dpo", "dpo_norm", "robust", "aot", "aot_unpaired")
        },
        "wpo": [
            math.log(2.0) * math.exp(-812.3 / 400 - 33.1 / 20),
            math.log(2.0) * math.exp(-7.7 / 3 - 1234.5 / 617),
        ],
        "ipo": [(1.0 / (2.0 * beta)) ** 2] * 2,
        **{loss: [1.0, 1.0] for loss in ("hinge", "apo_zero", "apo_down")},
        "exo_pair": [-math.log(2.0) - 0.5 * math.log(1e-3 * 0.999)] * 2,
        "discopop": [0.5 * math.log(2.0) + 0.5] * 2,
        "nca_pair": [2 * math.log(2.0)] * 2,
        "bco_pair": [2 * math.log(2.0)] * 2,
        "sppo_hard": [50.0, 50.0],
    }[name]
    outputs = preference_loss(name, inputs, beta=beta, label_smoothing=label_smoothing)
    torch.testing.assert_close(outputs.losses_P, torch.tensor(expected), rtol=1e-6, atol=0.0)
    assert outputs.rewards_2P.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    loss = section(name, beta=beta, label_smoothing=label_smoothing)
    first_loss = dpo.bind(loss).first_loss({})
    assert first_loss == (None if name == "wpo" else pytest.approx(expected[0]))


@pytest.mark.parametrize("name", OF_PAIRS)
def test_loss_of_a_pair_depends_on_that_pair_alone(name: str) -> None:
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


@pytest.mark.parametrize("name", REFERENCE_BASED)
def test_pairs_within_rounding_of_the_reference_are_not_told_apart(name: str) -> None:
    """The same log-probs added up in another order; 1e-4 nats of 30 are more than that."""
    rest = {
        "reference_chosen": [-30.0] * 3,
        "reference_rejected": [-25.0] * 3,
        "rejected": [-25.0] * 3,
    }
    inputs = make_inputs(
        [-29.99999, -30.00001, -29.9999], chosen_lengths=[3] * 3, rejected_lengths=[3] * 3, **rest
    )
    assert preference_loss(name, inputs, beta=0.1).is_right_P.tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", list(PREFERENCE_LOSSES))
def test_no_pairs(name: str) -> None:
    inputs = make_inputs([], [], [], [], [], [])
    outputs = preference_loss(name, inputs, beta=0.1)
    assert outputs.losses_P.shape == (0,) and outputs.rewards_2P.shape == (2, 0)
    assert outputs.losses_P.sum().item() == 0.0


def test_sum_of_losses_starts_at_the_weighted_sum() -> None:
    first_loss = dpo.bind(
        PreferenceLossSection(loss_type=["dpo", "hinge"], loss_weights=[0.5, 2.0])
    ).first_loss({})
    assert first_loss == pytest.approx(0.5 * math.log(2.0) + 2.0)
    assert dpo.bind(PreferenceLossSection(loss_type=["dpo", "sft"])).first_loss({}) is None


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
def test_flags_that_cannot_work_are_refused_by_name(
    name: str, flags: dict[str, float], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        dpo.bind(PreferenceLossSection(loss_type=name, **({"beta": 0.1} | flags)))


@pytest.mark.parametrize("name", REFERENCE_BASED)
def test_missing_reference_is_never_taken_for_zero(name: str) -> None:
    with pytest.raises(AssertionError, match="reference"):
        preference_loss(name, make_inputs(reference_chosen=None, reference_rejected=None), beta=0.1)


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(AssertionError, match="lengths_2P"):
        make_inputs(chosen_lengths=[2], rejected_lengths=[4])


@pytest.mark.parametrize("far", [89.0, 1e4, 1e6])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_margins_that_are_far_off_have_finite_losses_and_gradients(name: str, far: float) -> None:
    """In float32, where exp overflows from 89 on."""
    logps = [far, -far, -1e-3]
    inputs = make_inputs(
        logps, logps[::-1], [0.0] * 3, [0.0] * 3, [1] * 3, [1] * 3, dtype=torch.float32
    )
    smoothing = 0.1 if "label_smoothing" in PREFERENCE_LOSSES[name].reads else 0.0
    losses_P = preference_loss(name, inputs, beta=10.0, label_smoothing=smoothing).losses_P
    (gradients_2P,) = torch.autograd.grad(losses_P.sum(), inputs.policy_logps_2P)
    assert losses_P.isfinite().all() and gradients_2P.isfinite().all()
