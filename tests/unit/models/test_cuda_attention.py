"""The way that attention takes on CUDA gives what the one on a CPU gives; its kernel is replaced by
an exact one.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from open_instruct.batching.documents import pack_documents
from open_instruct.core.families import FAMILIES
from open_instruct.models.attention import attention
from open_instruct.models.attention.attention import attend_by_segment, attend_over_segments
from open_instruct.models.attention.segments import QKV, Segments
from tests.tiers import num_examples
from tests.unit.batching.test_prefix_sharing import DOCUMENTS, GROUPS, assert_same, results
from tests.unit.models.test_shared_attention import LEFTS, rows, tensors
from tests.unit.small_models import random_model
from tests.unit.varlen_on_cpu import as_on_cuda, varlen_kernels

__all__ = ["as_on_cuda", "varlen_kernels"]  # fixtures

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("groups", [GROUPS, None], ids=["shared", "unshared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_cpu(
    family: str, groups: Any, request: pytest.FixtureRequest
) -> None:
    model, batch = (
        random_model(family),
        pack_documents(DOCUMENTS, groups=groups, pad_to_multiple_of=8),
    )
    expected = results(model, batch)
    request.getfixturevalue("as_on_cuda")
    assert_same(results(model, batch), expected)


@settings(
    max_examples=num_examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(of=rows(), left=st.sampled_from(LEFTS), heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]))
def test_any_row_any_window_any_heads(
    of: Segments, left: int, heads: tuple[int, int], as_on_cuda: None
) -> None:
    qkv = QKV(*tensors(sum(of.lengths), heads=heads[0], groups=heads[1], dim=8))
    grad_out = torch.randn(
        qkv.query.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    places = torch.arange(len(qkv.key)) if of.key_index_K is None else of.key_index_K
    gathered = QKV(qkv.query, qkv.key[places], qkv.value[places])
    ours, expected = (
        (out, *torch.autograd.grad(out, qkv, grad_out))
        for out in (
            attend_over_segments(qkv, of, left=left),
            attend_by_segment(gathered, of, left=left),
        )
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradients_of_many_branches_are_added_up_in_float32() -> None:
    """In bfloat16 a sum of ones ends at 256, where one more is rounded away."""
    prompt = torch.ones(2, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    gathered = attention.GatherRows.apply(prompt, torch.tensor([0] * 1000 + [1]))
    (gradient,) = torch.autograd.grad(gathered.sum(), prompt)
    assert gradient.dtype == torch.bfloat16
    assert gradient[:, 0, 0].tolist() == [1000, 1]
