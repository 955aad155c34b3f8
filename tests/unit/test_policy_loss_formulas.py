"""Every policy loss against its paper's equation, completion by completion, on random numbers and extremes."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from open_instruct.config.losses import POLICY_LOSSES
from open_instruct.config.rollout_sections import PolicyLossSection
from open_instruct.losses.policy import PolicyLossInputs, policy_loss

E_LOW, E_HIGH, DELTA = 0.2, 0.28, 1.9
Tensor = torch.Tensor
# Of one completion: its ratios r(t), log-probs now and at the start, whether they are marked, and its advantage.
Formula = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def ppo(ratios: Tensor, advantage: float, delta: float | None = None) -> Tensor:
    terms = []
    for r in ratios:
        clipped = min(max(r, torch.tensor(1 - E_LOW)), torch.tensor(1 + E_HIGH))
        first = min(r, torch.tensor(delta)) if delta else r
        terms.append(-min(first * advantage, clipped * advantage))
    return torch.stack(terms)


def dapo(r: Tensor, new: Tensor, old: Tensor, marked: Tensor, a: float) -> Tensor:
    return ppo(r, a).sum()


def grpo(r: Tensor, new: Tensor, old: Tensor, marked: Tensor, a: float) -> Tensor:
    return ppo(r, a).mean()


def cispo(r: Tensor, new: Tensor, old: Tensor, marked: Tensor, a: float) -> Tensor:
    weights = torch.tensor([min(float(x.detach()), 1 + E_HIGH) for x in r], dtype=r.dtype)
    return -(weights * a * new).sum()


def gspo(r: Tensor, new: Tensor, old: Tensor, marked: Tensor, a: float) -> Tensor:
    return ppo((new - old).mean().exp()[None], a)[0]


def luspo(r: Tensor, new: Tensor, old: Tensor, marked: Tensor, a: float) -> Tensor:
    return gspo(r, new, old, marked, a) * len(r)


def sapo(r: Tensor, new: Tensor, old: Tensor, marked: Tensor, a: float) -> Tensor:
    t = 1.3 if a > 0 else 2.1
    return -(4 / t / (1 + torch.exp(-t * (r - 1))) * a).mean()


def gmpo(r: Tensor, new: Tensor, old: Tensor, marked: Tensor, a: float) -> Tensor:
    kept = []
    for x in r:
        clipped = min(max(x, torch.tensor(1 - E_LOW)), torch.tensor(1 + E_HIGH))
        kept.append(min(x * a, clipped * a).abs() / abs(a))
    return -a * torch.stack(kept).prod() ** (1 / len(r))


def vespo(r: Tensor, new: Tensor, old: Tensor, marked: Tensor, a: float) -> Tensor:
    k, rate = (2, 3) if a >= 0 else (3, 2)
    w = r.detach().prod()
    return -(w**k * torch.exp(rate - rate * w) * a * new).sum()


def dppo(divergence: Callable[[float, float], float], delta: float = math.inf) -> Formula:
    def formula(r: Tensor, new: Tensor, old: Tensor, marked: Tensor, a: float) -> Tensor:
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


def clip_cov(r: Tensor, new: Tensor, old: Tensor, marked: Tensor, a: float) -> Tensor:
    return sum((term for term, is_out in zip(ppo(r, a), marked, strict=True) if not is_out), new.sum() * 0)


def kl_cov(r: Tensor, new: Tensor, old: Tensor, marked: Tensor, a: float) -> Tensor:
    return sum(-x * a + (0.7 * abs(n - o) if m else 0) for x, n, o, m in zip(r, new, old, marked, strict=True))


def gpg(r: Tensor, new: Tensor, old: Tensor, marked: Tensor, a: float) -> Tensor:
    return -a * new.sum()


FORMULAS: dict[str, Formula] = {
    "dapo": dapo,
    "cispo": cispo,
    "grpo": grpo,
    "dr_grpo": dapo,
    "gspo": gspo,
    "bnpo": dapo,
    "sapo": sapo,
    "gmpo": gmpo,
    "luspo": luspo,
    "vespo": vespo,
    "dppo_tv": dppo(lambda q, p: abs(p - q)),
    "dppo_kl": dppo(coins),
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "gpg": gpg,
}


def settings(kind: str, **rest: Any) -> PolicyLossSection:
    return PolicyLossSection(
        loss_fn=kind,
        clip_lower=E_LOW,
        clip_higher=E_HIGH,
        sapo_temperature_pos=1.3,
        sapo_temperature_neg=2.1,
        kl_cov_coef=0.7,
        **rest,
    )


def inputs(seed: int, *, spread: float) -> PolicyLossInputs:
    """Completions of 1 to 6 tokens whose log-ratios lie within `spread`; advantages of both signs."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, 6) for _ in range(5)]
    count = sum(lengths)
    old_N = -torch.tensor([chance.uniform(0.01, 4.0) for _ in range(count)], dtype=torch.float64)
    new_N = (old_N + torch.tensor([chance.uniform(-spread, spread) for _ in range(count)])).clamp(max=-1e-3)
    per_completion = [chance.choice([-1, 1]) * chance.uniform(0.1, 3) for _ in lengths]
    return PolicyLossInputs(
        logprobs_N=new_N.requires_grad_(),
        old_logprobs_N=old_N,
        advantages_N=torch.tensor(
            [a for a, n in zip(per_completion, lengths, strict=True) for _ in range(n)], dtype=torch.float64
        ),
        sequence_ids_N=torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)]),
        num_sequences=len(lengths),
        marked_N=torch.tensor([float(chance.random() < 0.4) for _ in range(count)], dtype=torch.float64),
    )


def by_formula(formula: Formula, given: PolicyLossInputs) -> Tensor:
    assert given.marked_N is not None
    total = given.logprobs_N.sum() * 0
    for completion in range(given.num_sequences):
        own = given.sequence_ids_N == completion
        new, old = given.logprobs_N[own], given.old_logprobs_N[own]
        total = total + formula((new - old).exp(), new, old, given.marked_N[own], float(given.advantages_N[own][0]))
    return total


def check(given: PolicyLossInputs, loss: PolicyLossSection, expected: Tensor) -> None:
    ours = policy_loss(given, loss).losses_N.sum()
    (of_ours,) = torch.autograd.grad(ours, given.logprobs_N)
    (of_theirs,) = torch.autograd.grad(expected, given.logprobs_N)
    torch.testing.assert_close(ours.detach(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(of_ours, of_theirs, rtol=1e-6, atol=1e-6)


def test_every_loss_has_a_formula() -> None:
    assert FORMULAS.keys() == POLICY_LOSSES.keys()


@pytest.mark.parametrize("spread", [1e-4, 0.3, 2.0, 12.0])
@pytest.mark.parametrize("kind", FORMULAS)
def test_value_and_gradient(kind: str, spread: float) -> None:
    for seed in range(5):
        given = inputs(seed, spread=spread)
        check(given, settings(kind), by_formula(FORMULAS[kind], given))


@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_two_sided_and_dual_clip_are_one(spread: float) -> None:
    """INTELLECT-2 bounds the ratio before the minimum; dual clip bounds the objective of a bad token from below."""

    def dual(r: Tensor, new: Tensor, old: Tensor, marked: Tensor, a: float) -> Tensor:
        objective = -ppo(r, a)
        return -(torch.maximum(objective, torch.tensor(DELTA * a)) if a < 0 else objective).sum()

    for seed in range(5):
        given = inputs(seed, spread=spread)
        loss = settings("dapo", delta=DELTA)
        check(given, loss, by_formula(dual, given))
        check(given, loss, by_formula(lambda r, new, old, marked, a: ppo(r, a, delta=DELTA).sum(), given))
    is_out_N = (given.log_ratio_N.exp() > DELTA) & (given.advantages_N < 0)
    assert policy_loss(given, loss).is_clipped_N[is_out_N].all() and is_out_N.any() == (spread == 2.0)


@pytest.mark.parametrize("spread", [0.3, 2.0, 12.0])
def test_delta_bounds_the_ratio_where_no_other_clip_does(spread: float) -> None:
    """A rare token may multiply its probability, and have moved by little."""
    for kind, divergence in (("dppo_tv", lambda q, p: abs(p - q)), ("dppo_kl", coins)):
        for seed in range(5):
            given, loss = inputs(seed, spread=spread), settings(kind, delta=DELTA)
            check(given, loss, by_formula(dppo(divergence, DELTA), given))
            outputs = policy_loss(given, loss)
            assert (outputs.losses_N.abs() <= (1 + 1e-6) * DELTA * given.advantages_N.abs()).all()
            assert outputs.is_clipped_N[given.log_ratio_N.exp() > DELTA].all()
        unbounded = policy_loss(given, settings(kind)).losses_N
        assert (unbounded.abs() > DELTA * given.advantages_N.abs()).any() == (spread > 1)


def test_a_token_without_an_advantage_is_not_clipped() -> None:
    """It has no gradient to take."""
    given = inputs(3, spread=2.0)
    without = dataclasses.replace(given, advantages_N=torch.where(given.sequence_ids_N == 1, 0.0, given.advantages_N))
    for kind in POLICY_LOSSES:
        plain, clipped_N = (policy_loss(each, settings(kind)).is_clipped_N for each in (given, without))
        assert torch.equal(clipped_N, plain * (given.sequence_ids_N != 1)), kind
    assert policy_loss(given, settings("gmpo")).is_clipped_N[given.sequence_ids_N == 1].any()


def test_a_clip_covers_what_it_says() -> None:
    """The share of clipped tokens, where it is not that of the plain clip."""
    given = inputs(3, spread=2.0)
    marked = policy_loss(given, settings("clip_cov")).is_clipped_N
    plain = policy_loss(given, settings("dapo")).is_clipped_N
    assert given.marked_N is not None and marked.tolist() == torch.maximum(plain, given.marked_N.float()).tolist()
    for kind in ("dppo_tv", "dppo_kl"):
        outputs = policy_loss(given, settings(kind))
        assert outputs.is_clipped_N.any() and (outputs.losses_N[outputs.is_clipped_N > 0] == 0).all()
