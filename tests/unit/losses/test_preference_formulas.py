"""Each preference loss and its gradient against its paper's equation, in numbers of 60 digits.

The equations stand here once more, written from the papers. Legend: w chosen, l rejected; L the
policy's log-prob of a reply, R the reference's, n its number of tokens; u = e^(L - R).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import mpmath
import pytest
import torch
from mpmath import mpf

from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.losses.logprobs import sum_by_reply
from open_instruct.losses.preference import PREFERENCE_LOSSES
from open_instruct.losses.preference_loss import PreferenceLossInputs
from open_instruct.losses.rank_matching import RankPartners, match_by_rank
from open_instruct.objectives.dpo import preference_loss

mpmath.mp.dps = 60
BETA, E, GAMMA, ALPHA, TAU = (mpf(number) for number in ("0.35", "0.125", "0.75", "0.5", "0.25"))
CLAMP = 20

Pair = tuple[mpf, mpf, mpf, mpf, int, int]  # L_w, L_l, R_w, R_l, n_w, n_l
Formula = Callable[[Pair], mpf]


def sigma(x: mpf) -> mpf:
    return 1 / (1 + mpmath.exp(-x))


def log_sigma(x: mpf) -> mpf:
    return -mpmath.log1p(mpmath.exp(-x))


def margin(pair: Pair) -> mpf:
    won, lost, rw, rl, _, _ = pair
    return (won - rw) - (lost - rl)


def mean_margin(pair: Pair) -> mpf:
    won, lost, rw, rl, n_w, n_l = pair
    return (won - rw) / n_w - (lost - rl) / n_l


def rewards(pair: Pair) -> tuple[mpf, mpf]:
    won, lost, rw, rl, _, _ = pair
    return BETA * (won - rw), BETA * (lost - rl)


def smoothed(z: mpf) -> mpf:
    return -(1 - E) * log_sigma(z) - E * log_sigma(-z)


def nll(pair: Pair) -> mpf:
    return -pair[0] / pair[4]


def orpo(pair: Pair) -> mpf:
    p_w, p_l = mpmath.exp(pair[0] / pair[4]), mpmath.exp(pair[1] / pair[5])
    odds_ratio = (p_w / (1 - p_w)) / (p_l / (1 - p_l))
    return nll(pair) - BETA * mpmath.log(sigma(mpmath.log(odds_ratio)))


def exo(pair: Pair) -> mpf:
    """Equation 16: the policy's preference q against labels that are right with probability 1 -
    e.
    """
    q_w, q_l = sigma(BETA * margin(pair)), sigma(-BETA * margin(pair))
    return q_w * mpmath.log(q_w / (1 - E)) + q_l * mpmath.log(q_l / E)


def discopop(pair: Pair) -> mpf:
    """Equation 5: a logistic loss and an exponential one, and how much of each."""
    z = BETA * margin(pair)
    share = sigma(z / TAU)
    return (1 - share) * -log_sigma(z) + share * mpmath.exp(-z)


def nca(pair: Pair) -> mpf:
    won, lost = rewards(pair)
    return -log_sigma(won) - log_sigma(-won) / 2 - log_sigma(-lost) / 2


def sppo(pair: Pair) -> mpf:
    """Equation 4.7 with eta = 1 / beta, and P(won beats lost) = 1."""
    won, lost, rw, rl, _, _ = pair
    eta = 1 / BETA
    return (won - rw - eta * (mpf(1) - mpf(1) / 2)) ** 2 + (
        lost - rl - eta * (mpf(0) - mpf(1) / 2)
    ) ** 2


FORMULAS: dict[str, Formula] = {
    "dpo": lambda pair: smoothed(BETA * margin(pair)),
    "dpo_norm": lambda pair: smoothed(BETA * mean_margin(pair)),
    "simpo": lambda pair: smoothed(BETA * (pair[0] / pair[4] - pair[1] / pair[5]) - GAMMA * BETA),
    "ipo": lambda pair: (mean_margin(pair) - 1 / (2 * BETA)) ** 2,
    "hinge": lambda pair: max(mpf(0), 1 - BETA * margin(pair)),
    "robust": lambda pair: (
        (-(1 - E) * log_sigma(BETA * margin(pair)) + E * log_sigma(-BETA * margin(pair)))
        / (1 - 2 * E)
    ),
    "nca_pair": nca,
    "bco_pair": lambda pair: -log_sigma(rewards(pair)[0]) - log_sigma(-rewards(pair)[1]),
    "sppo_hard": sppo,
    "apo_zero": lambda pair: (1 - sigma(rewards(pair)[0])) + sigma(rewards(pair)[1]),
    "apo_down": lambda pair: (
        sigma(rewards(pair)[0]) + (1 - sigma(rewards(pair)[0] - rewards(pair)[1]))
    ),
    "sft": nll,
    "cpo": lambda pair: smoothed(BETA * (pair[0] - pair[1])) + ALPHA * nll(pair),
    "orpo": orpo,
    "exo_pair": exo,
    "discopop": discopop,
}


def aot(pairs: Sequence[Pair]) -> mpf:
    """Sorted margins of the policy against sorted margins of the reference."""
    policy = sorted(won - lost for won, lost, *_ in pairs)
    reference = sorted(rw - rl for _, _, rw, rl, *_ in pairs)
    return mpmath.fsum(
        smoothed(BETA * (ours - theirs)) for ours, theirs in zip(policy, reference, strict=True)
    )


def aot_unpaired(pairs: Sequence[Pair]) -> mpf:
    """Sorted log-ratios of chosen replies against those of rejected ones."""
    chosen = sorted(won - rw for won, _, rw, *_ in pairs)
    rejected = sorted(lost - rl for _, lost, _, rl, *_ in pairs)
    return mpmath.fsum(
        smoothed(BETA * (won - lost)) for won, lost in zip(chosen, rejected, strict=True)
    )


OF_BATCH: dict[str, Callable[[Sequence[Pair]], mpf]] = {"aot": aot, "aot_unpaired": aot_unpaired}


def section(name: str | list[str], **flags: Any) -> PreferenceLossSection:
    smoothing = {"label_smoothing": float(E)} if name not in ("wpo",) else {}
    settings = {
        "beta": float(BETA),
        "gamma_beta_ratio": float(GAMMA),
        "cpo_alpha": float(ALPHA),
    } | smoothing
    return PreferenceLossSection(loss_type=name, **settings | {"discopop_tau": float(TAU)} | flags)


def drawn(seed: int, *, num_pairs: int = 12, spread: float = 8.0) -> list[Pair]:
    """Pairs near their reference and, if asked for, far from it."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(num_pairs):
        lengths = draw.randint(1, 9), draw.randint(1, 9)
        policy = [-draw.uniform(0.05, 6) * length for length in lengths]
        pairs.append((*policy, *(value + draw.gauss(0, spread) for value in policy), *lengths))
    return [tuple(map(mpf, pair)) for pair in pairs]


# Logits of +-1e4 with a beta of 0.35, each side and both.
FAR = [
    tuple(map(mpf, (chosen, rejected, -40, -40, 4, 4)))
    for chosen in (-30000, -40, -0.01)
    for rejected in (-30000, -41, -0.01)
] + [
    tuple(map(mpf, (-50, -60, *reference, 3, 5)))
    for reference in ((-30000, -60), (-50, -30000), (-30000, -30050))
]


def torch_inputs(pairs: Sequence[Pair]) -> PreferenceLossInputs:
    columns = [[float(pair[place]) for pair in pairs] for place in range(6)]
    policy_2P, references_2P, lengths_2P = torch.tensor(columns, dtype=torch.float64).unflatten(
        0, (3, 2)
    )
    return PreferenceLossInputs(
        policy_logps_2P=policy_2P.clone().requires_grad_(),
        lengths_2P=lengths_2P.long(),
        reference_logps_2P=references_2P,
    )


def gradients(losses_P: torch.Tensor, inputs: PreferenceLossInputs) -> list[torch.Tensor]:
    return list(torch.autograd.grad(losses_P.sum(), inputs.policy_logps_2P)[0])


def slope(function: Callable[[mpf], mpf], at: mpf) -> mpf:
    step = mpf(10) ** -25
    return (function(at + step) - function(at - step)) / (2 * step)


def with_place(pair: Pair, place: int, value: mpf) -> Pair:
    changed: Any = (*pair[:place], value, *pair[place + 1 :])
    return changed


def close(ours: torch.Tensor, expected: Sequence[mpf]) -> None:
    torch.testing.assert_close(
        ours.detach(),
        torch.tensor([float(value) for value in expected], dtype=ours.dtype),
        rtol=1e-6,
        atol=1e-6,
    )


def check(loss: PreferenceLossSection, pairs: Sequence[Pair], formula: Formula) -> None:
    inputs = torch_inputs(pairs)
    losses_P = preference_loss(loss, inputs).losses_P
    close(losses_P, [formula(pair) for pair in pairs])
    for place, gradient_P in enumerate(gradients(losses_P, inputs)):
        close(
            gradient_P,
            [
                slope(lambda x, pair=pair: formula(with_place(pair, place, x)), pair[place])  # noqa: B023
                for pair in pairs
            ],
        )


@pytest.mark.parametrize("name", FORMULAS)
def test_values_and_gradients(name: str) -> None:
    check(section(name), [*drawn(1), *drawn(2, spread=0.5), *FAR], FORMULAS[name])


def test_no_loss_is_left_out() -> None:
    assert {*FORMULAS, *OF_BATCH, "wpo"} == PREFERENCE_LOSSES.keys()
    assert {name for name, loss in PREFERENCE_LOSSES.items() if loss.sorts_batch} == OF_BATCH.keys()


@pytest.mark.parametrize("name", OF_BATCH)
@pytest.mark.parametrize("sizes", [(12,), (5, 7), (1, 1, 1, 9)])
@pytest.mark.parametrize("pairs", [drawn(3), FAR], ids=["near", "far"])
def test_batch_is_sorted_whole_however_it_is_cut(
    name: str, sizes: tuple[int, ...], pairs: list[Pair]
) -> None:
    partners = match_by_rank(*torch_inputs(pairs).rank_values)
    total, gradients_of_parts = 0.0, []
    for stop in accumulate(sizes):
        part = slice(stop - sizes[len(gradients_of_parts)], stop)
        inputs = replace(
            torch_inputs(pairs[part]), partners=RankPartners(*(each[part] for each in partners))
        )
        losses_P = preference_loss(section(name), inputs).losses_P
        total += losses_P.sum().item()
        gradients_of_parts.append(gradients(losses_P, inputs))
    formula = OF_BATCH[name]
    assert total == pytest.approx(float(formula(pairs)), rel=1e-6)
    if pairs is FAR:
        return  # where two are equal, either may have the slope of either
    for place, gradient_P in enumerate(map(torch.cat, zip(*gradients_of_parts, strict=True))):

        def moved(x: mpf, pair: int, place: int = place) -> mpf:
            return formula([*pairs[:pair], with_place(pairs[pair], place, x), *pairs[pair + 1 :]])

        close(
            gradient_P, [slope(partial(moved, pair=i), pairs[i][place]) for i in range(len(pairs))]
        )


def f_prime(kind: str, log_u: mpf) -> mpf:
    """Table 1, up to the constant; our log-ratios are clamped before they are exponentiated."""
    u = mpmath.exp(max(-CLAMP, min(CLAMP, log_u)))
    if kind == "forward_kl":
        return -1 / u
    if kind == "alpha_divergence":  # the paper's alpha is 1 - ours
        alpha = 1 - mpf("0.3")
        return (1 - u**-alpha) / alpha
    return mpmath.log(2 * mpmath.exp(log_u) / (1 + mpmath.exp(log_u)))


@pytest.mark.parametrize("kind", ["forward_kl", "js_divergence", "alpha_divergence"])
@pytest.mark.parametrize("name", ["dpo", "hinge", "robust"])
def test_divergences(name: str, kind: str) -> None:
    def formula(pair: Pair) -> mpf:
        won, lost, rw, rl, n_w, n_l = pair
        return FORMULAS[name](
            (f_prime(kind, won - rw), f_prime(kind, lost - rl), mpf(0), mpf(0), n_w, n_l)
        )

    flags = {"f_divergence_type": kind, "f_alpha_divergence_coef": 0.3}
    check(section(name, **flags), [*drawn(4, spread=3.0), *FAR], formula)
    at_reference = torch_inputs(
        [with_place(with_place(pair, 2, pair[0]), 3, pair[1]) for pair in drawn(5)]
    )
    outputs = preference_loss(section(name, **flags), at_reference)
    assert not outputs.rewards_2P.any()


def test_sum_of_losses_is_weighted() -> None:
    def formula(pair: Pair) -> mpf:
        return (
            mpf("0.8") * FORMULAS["dpo"](pair)
            + mpf("0.2") * FORMULAS["bco_pair"](pair)
            + FORMULAS["sft"](pair)
        )

    check(section(["dpo", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]), drawn(6), formula)


@pytest.mark.parametrize("aligned", [False, True])
def test_wpo_weighs_by_what_the_policy_would_write(aligned: bool) -> None:
    """Per token the log-prob, or that relative to the expected one; the weight has no gradient."""
    pairs = drawn(7)
    inputs = torch_inputs(pairs)
    collisions = [
        [-draw.uniform(0, 4) * float(pair[place]) for pair in pairs]
        for place in (4, 5)
        for draw in [random]
    ]
    inputs = replace(inputs, collision_logps_2P=torch.tensor(collisions, dtype=torch.float64))
    losses_P = preference_loss(section("wpo", weight_alignment=aligned), inputs).losses_P
    weights = []
    for pair, c_w, c_l in zip(pairs, *collisions, strict=True):
        won, lost, _, _, n_w, n_l = pair
        shifts = (mpf(c_w), mpf(c_l)) if aligned else (0, 0)
        weights.append(
            min(mpf(1), mpmath.exp((won - shifts[0]) / n_w) * mpmath.exp((lost - shifts[1]) / n_l))
        )
    assert not aligned or {weight == 1 for weight in weights} == {False, True}
    plain = [-log_sigma(BETA * margin(pair)) for pair in pairs]
    close(losses_P, [weight * value for weight, value in zip(weights, plain, strict=True)])
    (gradient_P, _) = gradients(losses_P, inputs)
    slopes = [-BETA * sigma(-BETA * margin(pair)) for pair in pairs]
    close(gradient_P, [weight * value for weight, value in zip(weights, slopes, strict=True)])


@pytest.mark.parametrize("ld_alpha", [None, 0.0, 0.25, 1.0])
def test_sums_in_which_the_longer_reply_counts_less(ld_alpha: float | None) -> None:
    """Replies of two pairs, their labels interleaved as rows that are padded would have them."""
    # 0 against 2, 1 against 3.
    replies = {0: [-1.0, -2.0, -4.0], 1: [-8.0], 2: [-16.0], 3: [-32.0, -64.0]}
    ids, logprobs = [0, 1, 0, 2, 3, 0, 3], [-1.0, -8.0, -2.0, -16.0, -32.0, -4.0, -64.0]
    sums_S, lengths_S = sum_by_reply(torch.tensor(logprobs), torch.tensor(ids), 4, ld_alpha)
    rest = 1.0 if ld_alpha is None else ld_alpha
    assert sums_S.tolist() == [-1.0 - 6.0 * rest, -8.0, -16.0, -32.0 - 64.0 * rest]
    assert lengths_S.tolist() == [len(reply) for reply in replies.values()]
    empty_S, _ = sum_by_reply(torch.zeros(0), torch.zeros(0, dtype=torch.long), 0, ld_alpha)
    assert empty_S.shape == (0,)
