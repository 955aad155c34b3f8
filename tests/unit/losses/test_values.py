"""PPO's advantages, their whitening and the critic's loss against the programs of verl, TRL and
OpenRLHF.

Their formulas are written out here over padded rows, as they have them. Ours take sampled tokens
alone, packed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from open_instruct.losses.values import gae, value_losses, whiten

Estimates = tuple[torch.Tensor, torch.Tensor]
NUM_RANDOM_INPUTS = 200
CLOSE: Any = {"rtol": 1e-6, "atol": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Completions as rows of a table;

    `mask_SL` marks the sampled tokens, of which the last has the reward.
    """

    values_SL: torch.Tensor
    rewards_SL: torch.Tensor
    mask_SL: torch.Tensor
    gamma: float
    lam: float

    def packed(self, table_SL: torch.Tensor) -> torch.Tensor:
        return table_SL[self.mask_SL]

    def ours(self) -> torch.Tensor:
        sequence_ids_N = self.mask_SL.nonzero()[:, 0]
        values_N, rewards_N = self.packed(self.values_SL), self.packed(self.rewards_SL)
        return gae(values_N, rewards_N, sequence_ids_N, gamma=self.gamma, lam=self.lam)


def padded(seed: int, *, shape: str) -> Padded:
    """Random completions: of one length ("full"), of any ("ragged"), or with what a tool wrote
    between ("turns").
    """
    chance = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=chance))

    num_rows, length = draw(1, 5), draw(1, 33)
    mask_SL = torch.zeros(num_rows, length, dtype=torch.bool)
    for row in mask_SL:
        row[: length if shape == "full" else draw(1, length)] = True
        if shape == "turns":
            row &= torch.rand(length, generator=chance) < 0.6
            row[draw(0, length - 1)] = True
    rewards_SL = torch.zeros(num_rows, length, dtype=torch.float64)
    for rewards, row in zip(rewards_SL, mask_SL, strict=True):
        rewards[row.nonzero().max()] = torch.randn(1, generator=chance, dtype=torch.float64)
    return Padded(
        values_SL=torch.randn(num_rows, length, generator=chance, dtype=torch.float64),
        rewards_SL=rewards_SL,
        mask_SL=mask_SL,
        gamma=[1.0, 0.99, 0.5, 0.0][seed % 4],
        lam=[0.95, 1.0, 0.0, 0.3, 0.9][seed % 5],
    )


def cases(shape: str) -> Iterator[Padded]:
    return (padded(seed, shape=shape) for seed in range(NUM_RANDOM_INPUTS))


def verl(case: Padded) -> Estimates:
    """`compute_gae_advantage_return` of verl/trainer/ppo/core_algos.py: a token off the mask hands
    on what it got.
    """
    mask_SL, length = case.mask_SL.double(), case.mask_SL.shape[1]
    next_values = last = torch.zeros(len(mask_SL), dtype=torch.float64)
    reversed_advantages = []
    for t in reversed(range(length)):
        delta = case.rewards_SL[:, t] + case.gamma * next_values - case.values_SL[:, t]
        own = delta + case.gamma * case.lam * last
        next_values = case.values_SL[:, t] * mask_SL[:, t] + (1 - mask_SL[:, t]) * next_values
        last = own * mask_SL[:, t] + (1 - mask_SL[:, t]) * last
        reversed_advantages.append(last)
    advantages_SL = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages_SL, advantages_SL + case.values_SL


def trl(case: Padded) -> Estimates:
    """The loop of trl/experimental/ppo/ppo_trainer.py, whose padding has values and rewards of
    0.
    """
    values_SL, length = case.values_SL * case.mask_SL, case.mask_SL.shape[1]
    last: torch.Tensor | float = 0.0
    reversed_advantages = []
    for t in reversed(range(length)):
        next_values = values_SL[:, t + 1] if t < length - 1 else 0.0
        delta = case.rewards_SL[:, t] + case.gamma * next_values - values_SL[:, t]
        last = delta + case.gamma * case.lam * last
        reversed_advantages.append(last)
    advantages_SL = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages_SL, advantages_SL + values_SL


def openrlhf(case: Padded) -> Estimates:
    """What `get_advantages_and_returns` of OpenRLHF's experience_maker.py says that it computes, as
    a plain sum.

    Adv1 = R1 + γλ R2 + γ²λ² R3 + ... − V1 + γ(1 − λ) V2 + γ²λ(1 − λ) V3 + ..., and Ret1 the same
    without −V1.
    """
    values_SL = case.values_SL * case.mask_SL
    advantages_SL = torch.zeros_like(values_SL)
    length = values_SL.shape[1]
    for t in range(length):
        total = case.rewards_SL[:, t] - values_SL[:, t]
        for k in range(1, length - t):
            total = total + (case.gamma * case.lam) ** k * case.rewards_SL[:, t + k]
            total = (
                total + case.gamma**k * case.lam ** (k - 1) * (1 - case.lam) * values_SL[:, t + k]
            )
        advantages_SL[:, t] = total
    return advantages_SL, advantages_SL + values_SL


@pytest.mark.parametrize(
    ("program", "shape"),
    [
        (verl, "full"),
        (verl, "ragged"),
        (verl, "turns"),
        (trl, "full"),
        (trl, "ragged"),
        (openrlhf, "ragged"),
    ],
)
def test_advantages_and_returns_are_those_of(
    program: Callable[[Padded], Estimates], shape: str
) -> None:
    for case in cases(shape):
        advantages_SL, returns_SL = program(case)
        ours_N = case.ours()
        torch.testing.assert_close(ours_N, case.packed(advantages_SL), **CLOSE)
        torch.testing.assert_close(
            ours_N + case.packed(case.values_SL), case.packed(returns_SL), **CLOSE
        )


def test_completion_does_not_see_those_packed_beside_it() -> None:
    for case in cases("ragged"):
        rows = zip(case.values_SL, case.rewards_SL, case.mask_SL, strict=True)
        alone = [
            Padded(
                values_SL=v[None],
                rewards_SL=r[None],
                mask_SL=m[None],
                gamma=case.gamma,
                lam=case.lam,
            ).ours()
            for v, r, m in rows
        ]
        torch.testing.assert_close(case.ours(), torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_advantage_is_reward_less_value_without_discount() -> None:
    """In float32 too, over a completion of ten thousand tokens, the sum has no drift."""
    values_N = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    rewards_N = torch.zeros_like(values_N)
    rewards_N[-1] = 1.0
    ids_N = torch.zeros(10_000, dtype=torch.int64)
    advantages_N = gae(values_N, rewards_N, ids_N, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages_N, 1.0 - values_N, **CLOSE)


def test_no_tokens() -> None:
    """The rank had no row; its part of the batch holds one document without a label."""
    empty_N = torch.zeros(0)
    assert gae(empty_N, empty_N, empty_N.long(), gamma=1.0, lam=1.0).shape == (0,)
    assert whiten(empty_N, torch.ones(3)).shape == (0,)
    assert whiten(empty_N, empty_N).shape == (0,)


def masked_whiten(values_SL: torch.Tensor, mask_SL: torch.Tensor) -> torch.Tensor:
    """verl's (utils/torch_functional.py) and TRL's: the variance with Bessel's correction, plus
    1e-8.
    """
    count = mask_SL.sum()
    mean = (values_SL * mask_SL).sum() / count
    variance = ((values_SL - mean) ** 2 * mask_SL).sum() / count * (count / (count - 1))
    return (values_SL - mean) * torch.rsqrt(variance + 1e-8)


def normalized_by_openrlhf(values_SL: torch.Tensor, mask_SL: torch.Tensor) -> torch.Tensor:
    """Of `compute_advantages_and_returns`: the variance without Bessel's correction, at least
    1e-8.
    """
    mean = (values_SL * mask_SL).sum() / mask_SL.sum()
    variance = ((values_SL - mean).pow(2) * mask_SL).sum() / mask_SL.sum()
    return (values_SL - mean) * variance.clamp(min=1e-8).rsqrt()


def test_whitened_as_by_verl_and_trl_over_all_ranks() -> None:
    for case in cases("turns"):
        advantages_N = case.ours()
        count = len(advantages_N)
        if count < 2:
            continue
        table_SL = torch.zeros_like(case.values_SL)
        table_SL[case.mask_SL] = advantages_N
        theirs_N = case.packed(masked_whiten(table_SL, case.mask_SL))
        parts = [whiten(part_N, advantages_N) for part_N in advantages_N.tensor_split(3)]
        torch.testing.assert_close(torch.cat(parts), theirs_N, **CLOSE)
        # OpenRLHF's is larger by the root of n / (n - 1), where the variance is not tiny.
        openrlhf_N = (
            case.packed(normalized_by_openrlhf(table_SL, case.mask_SL))
            * ((count - 1) / count) ** 0.5
        )
        if advantages_N.var() > 0.1:
            torch.testing.assert_close(theirs_N, openrlhf_N, **CLOSE)


def test_whitening_gives_zero_for_equal_advantages() -> None:
    for given_N in (torch.tensor([3.0]), torch.full((5,), 0.1)):
        torch.testing.assert_close(
            whiten(given_N, given_N), torch.zeros_like(given_N), rtol=0, atol=1e-6
        )


def verls_value_loss(
    values_SL: torch.Tensor,
    old_SL: torch.Tensor,
    returns_SL: torch.Tensor,
    mask_SL: torch.Tensor,
    clip: float,
) -> Estimates:
    """`compute_value_loss` of verl's core_algos.py; TRL's is the same text with other names."""
    clipped_SL = torch.max(torch.min(values_SL, old_SL + clip), old_SL - clip)
    losses1, losses2 = (values_SL - returns_SL) ** 2, (clipped_SL - returns_SL) ** 2
    count = mask_SL.sum()
    loss = 0.5 * (torch.max(losses1, losses2) * mask_SL).sum() / count
    return loss, (torch.gt(losses2, losses1).double() * mask_SL).sum() / count


def openrlhfs_value_loss(
    values_SL: torch.Tensor,
    old_SL: torch.Tensor,
    returns_SL: torch.Tensor,
    mask_SL: torch.Tensor,
    clip: float | None,
) -> torch.Tensor:
    """`ValueLoss` of OpenRLHF's models/loss.py, with its mean over tokens."""
    losses_SL = (values_SL - returns_SL) ** 2
    if clip is not None:
        clipped_SL = old_SL + (values_SL - old_SL).clamp(-clip, clip)
        losses_SL = torch.max((clipped_SL - returns_SL) ** 2, losses_SL)
    return 0.5 * (losses_SL * mask_SL).sum() / mask_SL.sum()


def test_loss_of_values_and_its_gradient() -> None:
    for seed, case in enumerate(cases("turns")):
        chance = torch.Generator().manual_seed(seed)
        values_SL = torch.randn(
            case.values_SL.shape, generator=chance, dtype=torch.float64, requires_grad=True
        )
        old_SL = values_SL.detach() + 0.3 * torch.randn(
            values_SL.shape, generator=chance, dtype=torch.float64
        )
        returns_SL = case.values_SL
        values_N, old_N, returns_N = (
            case.packed(table) for table in (values_SL, old_SL, returns_SL)
        )
        for clip in (0.2, 0.5, None):
            losses_N, is_clipped_N = value_losses(values_N, old_N, returns_N, clip)
            oracles = [openrlhfs_value_loss(values_SL, old_SL, returns_SL, case.mask_SL, clip)]
            clipped_share = torch.zeros((), dtype=torch.float64)
            if clip is not None:
                loss, clipped_share = verls_value_loss(
                    values_SL, old_SL, returns_SL, case.mask_SL, clip
                )
                oracles.append(loss)
            torch.testing.assert_close(is_clipped_N.mean(), clipped_share, **CLOSE)
            for oracle in oracles:
                torch.testing.assert_close(losses_N.mean(), oracle, **CLOSE)
                (own,) = torch.autograd.grad(losses_N.mean(), values_SL, retain_graph=True)
                (theirs,) = torch.autograd.grad(oracle, values_SL, retain_graph=True)
                torch.testing.assert_close(own, theirs, **CLOSE)
