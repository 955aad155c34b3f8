"""Every policy loss against its paper's equation, completion by completion, and what holds for all
of them.
"""

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from open_instruct.config.policy_sections import PolicyLossSection
from open_instruct.losses.policy import POLICY_LOSSES
from open_instruct.losses.policy_loss import PolicyLoss, PolicyLossInputs, PolicyLossOutputs
from tests.tiers import num_examples

E_LOW, E_HIGH, DELTA = 0.2, 0.28, 1.9
Tensor = torch.Tensor
# Of one completion: its ratios r(t), log-probs now and at the start, and its advantage.
Formula = Callable[[Tensor, Tensor, Tensor, float], Tensor]
# The same of losses that treat some tokens apart, and whether they do; it is the last argument.
MarkedFormula = Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]
KL_COV_COEF = 0.7


def ppo(ratios: Tensor, advantage: float, delta: float | None = None) -> Tensor:
    terms = []
    for r in ratios:
        clipped = min(max(r, torch.tensor(1 - E_LOW)), torch.tensor(1 + E_HIGH))
        first = min(r, torch.tensor(delta)) if delta else r
        terms.append(-min(first * advantage, clipped * advantage))
    return torch.stack(terms)


def dapo(r: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
    return ppo(r, a).sum()


def grpo(r: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
    return ppo(r, a).mean()


def cispo(lowest: float = 0.0) -> Formula:
    def formula(r: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
        weights = torch.tensor(
            [min(max(float(x.detach()), lowest), 1 + E_HIGH) for x in r], dtype=r.dtype
        )
        return -(weights * a * new).sum()

    return formula


def gspo(r: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
    return ppo((new - old).mean().exp()[None], a)[0]


def luspo(r: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
    return gspo(r, new, old, a) * len(r)


def sapo(r: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
    t = 1.3 if a > 0 else 2.1
    return -(4 / t / (1 + torch.exp(-t * (r - 1))) * a).mean()


def gmpo(r: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
    log_ratios = []
    for x in r.log():
        clipped = min(max(x, torch.tensor(-E_LOW)), torch.tensor(E_HIGH))
        log_ratios.append(min(x * a, clipped * a) / a)
    return -a * torch.stack(log_ratios).mean().exp()


def clip_cov(r: Tensor, new: Tensor, old: Tensor, a: float, marked: Tensor) -> Tensor:
    return sum(
        (term for term, is_out in zip(ppo(r, a), marked, strict=True) if not is_out), new.sum() * 0
    )


def kl_cov(r: Tensor, new: Tensor, old: Tensor, a: float, marked: Tensor) -> Tensor:
    terms = [
        -x * a + KL_COV_COEF * abs(n - o) * m
        for x, n, o, m in zip(r, new, old, marked, strict=True)
    ]
    return torch.stack(terms).sum()


def vespo(r: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
    k, rate = (2, 3) if a >= 0 else (3, 2)
    w = r.detach().prod()
    return -(w**k * torch.exp(rate - rate * w) * a * new).sum()


def dppo(divergence: Callable[[float, float], float], delta: float = math.inf) -> Formula:
    def formula(r: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
        terms = []
        for x, p, q in zip(r, new.detach().exp().tolist(), old.exp().tolist(), strict=True):
            moved_as_asked = p > q if a > 0 else p < q
            is_blocked = moved_as_asked and divergence(q, p) > (E_HIGH if a > 0 else E_LOW)
            # Beyond delta the ratio is a weight: the token keeps a gradient, of log p.
            kept = x if x <= delta else delta * (x.log() - x.log().detach() + 1)
            terms.append(x * 0 if is_blocked else -kept * a)
        return torch.stack(terms).sum()

    return formula


def coins(q: float, p: float) -> float:
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def gpg(r: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
    return -a * new.sum()


FORMULAS: dict[str, Formula] = {
    "dapo": dapo,
    "cispo": cispo(),
    "grpo": grpo,
    "dr_grpo": dapo,
    "gspo": gspo,
    "bnpo": dapo,
    "sapo": sapo,
    "luspo": luspo,
    "vespo": vespo,
    "dppo_tv": dppo(lambda q, p: abs(p - q)),
    "dppo_kl": dppo(coins),
    "gpg": gpg,
    "gmpo": gmpo,
}
MARKED_FORMULAS: dict[str, MarkedFormula] = {"clip_cov": clip_cov, "kl_cov": kl_cov}


def section(kind: str, **rest: Any) -> PolicyLossSection:
    return PolicyLossSection(
        loss_fn=kind,
        clip_lower=E_LOW,
        clip_higher=E_HIGH,
        sapo_temperature_pos=1.3,
        sapo_temperature_neg=2.1,
        kl_cov_coef=KL_COV_COEF,
        **rest,
    )


def inputs(seed: int, *, spread: float) -> PolicyLossInputs:
    """Completions of 1 to 6 tokens whose log-ratios lie within `spread`; advantages of both
    signs.
    """
    chance = random.Random(seed)
    lengths = [chance.randint(1, 6) for _ in range(5)]
    count = sum(lengths)
    old_N = -torch.tensor([chance.uniform(0.01, 4.0) for _ in range(count)], dtype=torch.float64)
    new_N = (old_N + torch.tensor([chance.uniform(-spread, spread) for _ in range(count)])).clamp(
        max=-1e-3
    )
    per_completion = [chance.choice([-1, 1]) * chance.uniform(0.1, 3) for _ in lengths]
    return PolicyLossInputs(
        logprobs_N=new_N.requires_grad_(),
        old_logprobs_N=old_N,
        advantages_N=torch.tensor(
            [a for a, n in zip(per_completion, lengths, strict=True) for _ in range(n)],
            dtype=torch.float64,
        ),
        sequence_ids_N=torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)]),
        num_sequences=len(lengths),
        marked_N=torch.tensor(
            [float(chance.random() < 0.4) for _ in range(count)], dtype=torch.float64
        ),
    )


def by_formula(formula: Formula | MarkedFormula, given: PolicyLossInputs) -> Tensor:
    total = given.logprobs_N.sum() * 0
    for completion in range(given.num_sequences):
        own = given.sequence_ids_N == completion
        new, old = given.logprobs_N[own], given.old_logprobs_N[own]
        arguments: list[Any] = [(new - old).exp(), new, old, float(given.advantages_N[own][0])]
        if formula in MARKED_FORMULAS.values():
            assert given.marked_N is not None
            arguments.append(given.marked_N[own])
        total = total + formula(*arguments)
    return total


def outputs(given: PolicyLossInputs, loss: PolicyLossSection) -> PolicyLossOutputs:
    return POLICY_LOSSES[loss.loss_fn].outputs(given, loss)


def check(given: PolicyLossInputs, loss: PolicyLossSection, expected: Tensor) -> None:
    ours = outputs(given, loss).losses_N.sum()
    (of_ours,) = torch.autograd.grad(ours, given.logprobs_N)
    (of_theirs,) = torch.autograd.grad(expected, given.logprobs_N)
    torch.testing.assert_close(ours.detach(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(of_ours, of_theirs, rtol=1e-6, atol=1e-6)


def test_every_loss_has_a_formula() -> None:
    assert FORMULAS.keys() | MARKED_FORMULAS.keys() == POLICY_LOSSES.keys()
    assert {name for name, loss in POLICY_LOSSES.items() if loss.marks} == MARKED_FORMULAS.keys()


@pytest.mark.parametrize("spread", [1e-4, 0.3, 2.0, 12.0])
@pytest.mark.parametrize("kind", [*FORMULAS, *MARKED_FORMULAS])
def test_value_and_gradient(kind: str, spread: float) -> None:
    formulas = {**FORMULAS, **MARKED_FORMULAS}
    for seed in range(5):
        given = inputs(seed, spread=spread)
        check(given, section(kind), by_formula(formulas[kind], given))


def test_cispo_may_clamp_from_below_too() -> None:
    given = inputs(1, spread=2.0)
    check(given, section("cispo", cispo_clamp_below=True), by_formula(cispo(1 - E_LOW), given))


@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_two_sided_and_dual_clip_are_one(spread: float) -> None:
    """INTELLECT-2 bounds the ratio before the minimum; dual clip bounds the objective of a bad
    token from below.
    """

    def dual(r: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
        objective = -ppo(r, a)
        return -(torch.maximum(objective, torch.tensor(DELTA * a)) if a < 0 else objective).sum()

    for seed in range(5):
        given = inputs(seed, spread=spread)
        loss = section("dapo", delta=DELTA)
        check(given, loss, by_formula(dual, given))
        check(given, loss, by_formula(lambda r, new, old, a: ppo(r, a, delta=DELTA).sum(), given))
    is_out_N = (given.log_ratio_N.exp() > DELTA) & (given.advantages_N < 0)
    assert outputs(given, loss).is_clipped_N[is_out_N].all() and is_out_N.any() == (spread == 2.0)


@pytest.mark.parametrize("spread", [0.3, 2.0, 12.0])
def test_delta_bounds_the_ratio_where_no_other_clip_does(spread: float) -> None:
    """A rare token may multiply its probability, and have moved by little."""
    for kind, divergence in (("dppo_tv", lambda q, p: abs(p - q)), ("dppo_kl", coins)):
        for seed in range(5):
            given, loss = inputs(seed, spread=spread), section(kind, delta=DELTA)
            check(given, loss, by_formula(dppo(divergence, DELTA), given))
            bounded = outputs(given, loss)
            assert (bounded.losses_N.abs() <= (1 + 1e-6) * DELTA * given.advantages_N.abs()).all()
            assert bounded.is_clipped_N[given.log_ratio_N.exp() > DELTA].all()
        unbounded = outputs(given, section(kind)).losses_N
        assert (unbounded.abs() > DELTA * given.advantages_N.abs()).any() == (spread > 1)


def test_token_without_an_advantage_is_not_clipped() -> None:
    """It has no gradient to take."""
    given = inputs(3, spread=2.0)
    without = dataclasses.replace(
        given, advantages_N=torch.where(given.sequence_ids_N == 1, 0.0, given.advantages_N)
    )
    for kind in POLICY_LOSSES:
        plain, clipped_N = (outputs(each, section(kind)).is_clipped_N for each in (given, without))
        assert torch.equal(clipped_N, plain * (given.sequence_ids_N != 1)), kind
    assert outputs(given, section("dapo")).is_clipped_N[given.sequence_ids_N == 1].any()


def test_clip_covers_what_it_says() -> None:
    """The share of clipped tokens, where it is not that of the plain clip."""
    given = inputs(3, spread=2.0)
    marked_N = outputs(given, section("clip_cov")).is_clipped_N
    plain_N = outputs(given, section("dapo")).is_clipped_N
    assert given.marked_N is not None
    assert (
        marked_N.tolist()
        == torch.maximum(plain_N, given.marked_N.float()).tolist()
        != plain_N.tolist()
    )
    for kind in ("dppo_tv", "dppo_kl"):
        clipped = outputs(given, section(kind))
        assert (
            clipped.is_clipped_N.any() and (clipped.losses_N[clipped.is_clipped_N > 0] == 0).all()
        )


# Completion 0 has three tokens and advantage 2, completion 1 one token and advantage -1.
def two_completions(ratios: list[float]) -> PolicyLossInputs:
    old_N = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
    return PolicyLossInputs(
        logprobs_N=(old_N + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        old_logprobs_N=old_N,
        advantages_N=torch.tensor([2.0, 2.0, 2.0, -1.0], dtype=torch.float64),
        sequence_ids_N=torch.tensor([0, 0, 0, 1]),
        num_sequences=2,
        marked_N=torch.zeros(4, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("kind", "is_clipped"),
    # The geometric mean of completion 0's ratios, 0.94, lies inside the range; completion 1's is
    # its only ratio.
    [
        ("dapo", [0, 1, 0, 1]),
        ("grpo", [0, 1, 0, 1]),
        ("gspo", [0, 0, 0, 1]),
        ("cispo", [0, 1, 0, 0]),
        ("gpg", [0] * 4),
    ],
)
def test_clipped_tokens_have_no_gradient(kind: str, is_clipped: list[int]) -> None:
    assert (
        outputs(two_completions([1.1, 1.5, 0.5, 0.5]), section(kind)).is_clipped_N.tolist()
        == is_clipped
    )


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_gradient_equals_reinforce_on_policy(kind: str) -> None:
    given = two_completions([1.0] * 4)
    losses = outputs(given, section(kind))
    (gradient_N,) = torch.autograd.grad(losses.losses_N.sum(), given.logprobs_N)
    lengths_N = torch.tensor([3, 3, 3, 1]) if POLICY_LOSSES[kind].averaged else 1
    torch.testing.assert_close(gradient_N, -given.advantages_N / lengths_N)
    assert losses.is_clipped_N.sum() == 0


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_no_completions_cost_nothing(kind: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    given = PolicyLossInputs(
        logprobs_N=empty,
        old_logprobs_N=torch.zeros(0),
        advantages_N=torch.zeros(0),
        sequence_ids_N=torch.zeros(0, dtype=torch.long),
        num_sequences=0,
        marked_N=torch.zeros(0),
    )
    loss = (
        outputs(given, section(kind)).losses_N.sum()
        + POLICY_LOSSES[kind].shares(empty, given).sum()
    )
    loss.backward()
    assert loss == 0 and empty.grad is not None


token_lists = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0.1, 3.0), min_size=n, max_size=n),
        st.lists(st.floats(-2.0, 2.0), min_size=n, max_size=n),
    )
)


@settings(max_examples=num_examples(30))
@drawn(
    completions=st.lists(token_lists, min_size=2, max_size=4),
    kind=st.sampled_from(sorted(POLICY_LOSSES)),
)
def test_sum_does_not_depend_on_the_split(completions: list, kind: str) -> None:
    def total(chosen: list) -> float:
        ratios = [r for ratios, _ in chosen for r in ratios]
        given = PolicyLossInputs(
            logprobs_N=torch.tensor(ratios, dtype=torch.float64).log(),
            old_logprobs_N=torch.zeros(len(ratios), dtype=torch.float64),
            # One advantage a completion, as sampling has it.
            advantages_N=torch.tensor([a[0] for _, a in chosen for _ in a], dtype=torch.float64),
            sequence_ids_N=torch.tensor([i for i, (r, _) in enumerate(chosen) for _ in r]),
            num_sequences=len(chosen),
            marked_N=torch.tensor([float(r > 1) for r in ratios], dtype=torch.float64),
        )
        return float(outputs(given, section(kind)).losses_N.sum())

    assert total(completions) == pytest.approx(sum(total([one]) for one in completions), abs=1e-9)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_policies_that_are_far_apart_have_finite_losses_and_gradients(kind: str) -> None:
    """In float32, where exp overflows from 89 on; log-ratios of both signs with advantages of both
    signs.
    """
    log_ratios_N = torch.tensor([89.0, -89.0, 1e4, -1e4] * 2)
    given = PolicyLossInputs(
        logprobs_N=(log_ratios_N - 1.0).requires_grad_(),
        old_logprobs_N=torch.full_like(log_ratios_N, -1.0),
        advantages_N=torch.tensor([1.0] * 4 + [-1.0] * 4),
        sequence_ids_N=torch.arange(8),
        num_sequences=8,
        marked_N=torch.ones(8),
    )
    losses_N = outputs(given, section(kind)).losses_N
    (gradient_N,) = torch.autograd.grad(losses_N.sum(), given.logprobs_N)
    assert losses_N.isfinite().all() and gradient_N.isfinite().all()


def test_denominators() -> None:
    counts = {"num_tokens": 900, "num_completions": 12, "response_length": 100}
    expected = {"dapo": 900, "grpo": 12, "dr_grpo": 1200, "gspo": 12}
    assert {kind: POLICY_LOSSES[kind].denominator(**counts) for kind in expected} == expected
    assert PolicyLoss(function=outputs).denominator(**counts) == 900  # one of the user's own
    assert POLICY_LOSSES["dapo"].denominator(**counts, constant=50) == 600


def test_kl_counts_as_the_loss_does() -> None:
    kl_N = torch.tensor([3.0, 6.0, 9.0, 4.0])
    given = two_completions([1.0] * 4)
    assert POLICY_LOSSES["dapo"].shares(kl_N, given).tolist() == [3, 6, 9, 4]
    assert POLICY_LOSSES["gspo"].shares(kl_N, given).tolist() == [1, 2, 3, 4]
