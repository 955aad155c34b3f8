import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.losses.logprobs import per_token, sum_by_sequence


def test_sums_and_counts_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -4.0, -0.5, -8.0, -16.0, -0.25], requires_grad=True)
    sums, counts = sum_by_sequence(logprobs, torch.tensor([2, 2, 0, 0, 0, 2]), 3)
    assert sums.tolist() == [-24.5, 0.0, -5.25]
    assert counts.tolist() == [3, 0, 3]
    assert sums.dtype == torch.float32 and counts.dtype == torch.int64
    (2.0 * sums[0] + 5.0 * sums[2]).backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [5.0, 5.0, 2.0, 2.0, 2.0, 5.0]


def test_means_by_hand_and_zero_for_a_sequence_without_labels() -> None:
    assert per_token(
        *sum_by_sequence(torch.tensor([-1.0, -2.0, -6.0]), torch.tensor([0, 0, 2]), 3)
    ).tolist() == [
        -1.5,
        0.0,
        -6.0,
    ]
    assert per_token(torch.tensor([0.0, -9.0]), torch.tensor([0, 3])).tolist() == [0.0, -3.0]


def test_no_sequences() -> None:
    sums, counts = sum_by_sequence(
        torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.long), 0
    )
    assert sums.shape == counts.shape == (0,)
    sums.sum().backward()


def test_bfloat16_is_summed_and_returned_in_float32() -> None:
    # 300 times -1 is not reachable in bfloat16 steps: above 256 its neighbours are 2 apart.
    sums, counts = sum_by_sequence(
        -torch.ones(300, dtype=torch.bfloat16), torch.zeros(300, dtype=torch.long), 1
    )
    assert sums.dtype == torch.float32
    assert sums.item() == -300.0 and counts.item() == 300


def test_float64_stays_float64() -> None:
    sums, _ = sum_by_sequence(torch.tensor([-0.1], dtype=torch.float64), torch.tensor([0]), 1)
    assert sums.dtype == torch.float64 and sums.item() == -0.1


def test_order_of_tokens_does_not_show_in_the_sum() -> None:
    logprobs = -10.0 * torch.rand(4096, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(4096, dtype=torch.long)
    forward, _ = sum_by_sequence(logprobs, ids, 1)
    backward, _ = sum_by_sequence(logprobs.flip(0), ids, 1)
    assert forward.item() == backward.item()


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(AssertionError):
        sum_by_sequence(torch.zeros(1, 4), torch.zeros(4, dtype=torch.long), 1)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1000, 0)), max_size=40))
def test_equals_a_loop(labels: list[tuple[int, int]]) -> None:
    expected = [
        float(sum(logprob for owner, logprob in labels if owner == sequence))
        for sequence in range(5)
    ]
    logprobs = torch.tensor([float(logprob) for _, logprob in labels])
    ids = torch.tensor([owner for owner, _ in labels], dtype=torch.long)
    sums, counts = sum_by_sequence(logprobs, ids, 5)
    assert sums.tolist() == expected
    assert counts.tolist() == [
        sum(owner == sequence for owner, _ in labels) for sequence in range(5)
    ]
