"""Where float8 products are refused, and that a model without them is what it was.

`tests/ranks` learns with them.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from open_instruct.batching.documents import pack_documents
from open_instruct.core.errors import RunError
from open_instruct.training.model import float8
from open_instruct.training.model.float8 import build_float8_config, float8_off
from open_instruct.training.model.forward import token_logprobs
from open_instruct.training.policy import Policy
from tests.refusals import refused
from tests.unit.batching.test_prefix_sharing import group
from tests.unit.small_models import CPU, new_model

GPU = torch.device("cuda", 0)


def test_float8_is_refused_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("olmo2")
    assert build_float8_config("off", model=model, device=GPU) is None
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with refused("missing_package", "float8_linears", "torchao"):
        build_float8_config("rowwise", model=model, device=CPU)
    monkeypatch.setattr(float8, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with refused("machine", "float8_linears", "8.9", "8.6"):
        build_float8_config("tensorwise", model=model, device=GPU)
    with refused("unsupported_model", "float8_linears", "feed_forward.w1", "40 x 32", "16"):
        build_float8_config(
            "tensorwise", model=new_model("olmo2", intermediate_size=40), device=CPU
        )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_gpu = build_float8_config("tensorwise", model=model, device=GPU)
    assert on_gpu is not None and on_gpu.ao is not None and not on_gpu.ao.emulate


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_recipes_are_those_of_torchao(recipe: str) -> None:
    training = pytest.importorskip("torchao.float8")
    ours = float8.Recipe(name=recipe, emulate=True).to_ao_type()
    assert replace(
        ours, emulate=False, pad_inner_dim=False
    ) == training.Float8LinearConfig.from_recipe_name(recipe)
    assert ours.emulate and ours.pad_inner_dim


@pytest.mark.parametrize("family", ["olmo2", "qwen3", "llama"])
def test_model_is_unchanged_without_float8(family: str) -> None:
    pytest.importorskip("torchao")
    model = new_model(family).bfloat16()
    batch = pack_documents([*group(9, (5, 6), seed=1), *group(13, (7, 4), seed=2)])

    def logprobs() -> torch.Tensor:
        return token_logprobs(model, batch, device=CPU).logprobs_N.detach()

    plain, names = logprobs(), [*model.state_dict()]
    config = build_float8_config("tensorwise", model=model, device=CPU)
    assert config is not None
    model.apply_fp8(config)
    assert [*model.state_dict()] == names
    with float8_off(model):
        assert torch.equal(logprobs(), plain)
    off = (logprobs() - plain).norm() / plain.norm()
    assert 0 < off < 0.2


def test_first_loss_may_be_further_from_that_of_the_reference_without_float8() -> None:
    def first_loss_is(loss: float, *, fp8_enabled: bool) -> None:
        policy: Any = SimpleNamespace(
            loss=SimpleNamespace(
                first_loss=lambda counts: 0.69, checks_first_loss=True, remedy="look"
            ),
            trainer=SimpleNamespace(global_step=1),
            backend=SimpleNamespace(compute_dtype=torch.bfloat16),
            computing_model=SimpleNamespace(fp8_enabled=fp8_enabled),
        )
        Policy._check_first_loss(policy, loss, {})

    first_loss_is(0.72, fp8_enabled=False)
    first_loss_is(0.85, fp8_enabled=True)
    for loss, fp8_enabled in ((0.85, False), (1.0, True)):
        with pytest.raises(RunError, match="the first loss is"):
            first_loss_is(loss, fp8_enabled=fp8_enabled)
