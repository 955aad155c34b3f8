"""What a CPU computes in its own way, attention in blocks and products by oneDNN, is what it is otherwise."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from open_instruct.families import FAMILIES
from open_instruct.models.attention import attention, blocks
from open_instruct.models.attention.segments import Segment, documents_of
from open_instruct.models.on_cpu import products
from open_instruct.packing.documents import pack_documents, pad_documents
from tests.unit.small_models import random_model
from tests.unit.test_prefix_sharing import group, results

pytestmark = pytest.mark.usefixtures("one_thread")

NEVER = blocks.FEWEST_KEYS * 1000


DOCUMENTS = group(14, (27, 40, 33), seed=3)
LAYOUTS = {
    "packed": pack_documents(DOCUMENTS),
    "shared": pack_documents(DOCUMENTS, groups=[(0, 1, 2)]),
    "padded": pad_documents(DOCUMENTS, pad_token_id=0),
}


def assert_near(ours: Any, expected: Any) -> None:
    """Log-probs and gradients, see `results`."""
    for tensor, other in zip((ours[0], *ours[1].values()), (expected[0], *expected[1].values()), strict=True):
        assert (tensor - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_flash_attentions(family: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows (of 7 tokens, in OLMo 3's sliding layers), shared heads and shared prompts; several blocks a document."""
    model, batch = random_model(family), LAYOUTS[layout]
    monkeypatch.setattr(blocks, "FEWEST_KEYS", NEVER)
    expected = results(model, batch)

    for name, value in {"FEWEST_KEYS": 1, "MOST_SHARED_KEYS": 1.0, "MOST_QUERIES": 20, "FEWEST_TOKENS": 5}.items():
        monkeypatch.setattr(blocks, name, value)
    with patch.object(attention, "attend_in_blocks", wraps=blocks.attend_in_blocks) as in_blocks:
        ours = results(model, batch)
    assert in_blocks.call_count == 4
    assert_near(ours, expected)


def row(*lengths: int) -> tuple[Segment, ...]:
    return documents_of(lengths, (0,) * len(lengths))


PAYS = {
    "long documents": (row(512, 512), -1, True),
    "one that is long enough": (row(blocks.FEWEST_KEYS), -1, True),
    "and one that is not": (row(blocks.FEWEST_KEYS - 1), -1, False),
    "a few short ones beside long ones": (row(60, 500, 500), -1, True),
    "many short ones": (row(*[40] * 20, 400), -1, False),
    "a wide window": (row(2048), 511, True),
    "one that is too long": (row(blocks.MOST_KEYS + 1), -1, False),
    "one that is too long with its prompt": (documents_of((300, *[750] * 2), (0, *[300] * 2)), -1, False),
    "a narrow window": (row(2048), 63, False),
    "a pair with a short prompt": (documents_of((50, 460, 460), (0, 50, 50)), -1, True),
    "a pair whose prompt is much of it": (documents_of((200, 312, 312), (0, 200, 200)), -1, True),
    "a group behind a long prompt": (documents_of((1000, *[200] * 8), (0, *[1000] * 8)), -1, False),
}


@pytest.mark.parametrize(("documents", "left", "expected"), PAYS.values(), ids=PAYS)
def test_when_blocks_are_taken(documents: tuple[Segment, ...], left: int, expected: bool) -> None:
    assert blocks.pays(torch.empty(0, 6, 32), documents, left) is expected
    assert not blocks.pays(torch.empty(0, 6, 32, dtype=torch.bfloat16), documents, left)
    assert not blocks.pays(torch.empty(0, 6, 32, device="meta"), documents, left)


def test_no_more_scores_than_a_block_has() -> None:
    """Little is computed of what causality or a window hides: 192 queries, as whole tokens, against what they see."""
    (document,) = row(1000)
    for left, most_keys in ((-1, 1000), (300, 364)):
        of_document = [*blocks.blocks_of(document, left, 3)]
        assert [each.first for each in of_document] == [*range(0, 1000, 64)]
        assert of_document[-1].end == 1000
        assert max(each.end_of_keys - each.first_key for each in of_document) == most_keys


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_plain_products(
    family: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = random_model(family), LAYOUTS[layout]
    expected = results(model, batch)
    monkeypatch.setattr(products, "FEWEST_TOKENS", 1)
    with patch.object(products, "_product", wraps=products._product) as product:
        ours = results(model, batch)
    assert product.call_count == 2 * (4 * 7 + 1)  # forward and backward of seven matrices a layer, and the head's
    assert_near(ours, expected)


def test_when_products_are_onednns() -> None:
    x, weight = torch.empty(1, products.FEWEST_TOKENS, 8), torch.empty(4, 8)
    assert products.pays(x, weight)
    assert not products.pays(x[:, 1:], weight)
    assert not products.pays(x.bfloat16(), weight.bfloat16())
    assert not products.pays(x.to("meta"), weight.to("meta"))


def test_a_frozen_weight_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "FEWEST_TOKENS", 1)
    linear = torch.nn.Linear(3, 2, bias=False).requires_grad_(False)
    model = torch.nn.Sequential(linear)
    products.install_products(model)
    assert model[0].weight is linear.weight
    x = torch.randn(4, 3, requires_grad=True)
    model(x).sum().backward()
    assert linear.weight.grad is None
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(4, 3))


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_product_keeps_what_its_gradients_need(is_trained: bool) -> None:
    """The input of a matrix that is frozen is not kept, nor what multiplies an input without a gradient."""
    x, weight = torch.randn(8, 4, requires_grad=not is_trained), torch.randn(3, 4, requires_grad=is_trained)
    product = products.by_onednn(x, weight)
    assert [each is not None for each in product.grad_fn.saved_tensors] == [is_trained, not is_trained]  # type: ignore[union-attr]
    product.sum().backward()
    expected = torch.autograd.grad((x @ weight.T).sum(), weight if is_trained else x)
    torch.testing.assert_close(weight.grad if is_trained else x.grad, *expected)
