"""8-bit AdamW computes what torchao's does, learns what AdamW learns, and has a quarter of its
state.
"""

from functools import partial
from typing import Any

import pytest
import torch

from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.config.sections import OptimSection
from open_instruct.models.build import build_model
from open_instruct.training.optim import eight_bit
from open_instruct.training.optim.eight_bit import CODE_VALUES, SCALES, AdamW8bit
from open_instruct.training.optim.optimizers import build_optimizer_config
from tests.unit.planning.test_planning_state import storage_bytes

# A matrix in blocks of 256, which are then torchao's; a vector; a matrix that is too small.
SHAPES = ((64, 512), (512,), (16, 128))
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def trained(build: Any, num_steps: int = 20, saves_at: int | None = None) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = build(weights, **SETTINGS)
    for step in range(num_steps):
        torch.manual_seed(step)
        for weight in weights:
            weight.grad = torch.randn_like(weight) * torch.randn_like(weight)
            weight.grad += weight.grad.sign() / 100  # squares of less torchao rounds to 0
        optimizer.step()
        if step == saves_at:
            state = optimizer.state_dict()
            optimizer = build(weights, **SETTINGS)
            optimizer.load_state_dict(state)
    return weights, optimizer


@pytest.mark.parametrize("chunk", [2**22, 1024])
def test_adamw_8bit_equals_that_of_torchao(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose step is compiled, with a compiler that may not be there."""
    torchao = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(eight_bit, "CHUNK_VALUES", chunk)
    (theirs, of_torchao), (ours, own) = trained(torchao.AdamW8bit), trained(AdamW8bit)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    matrix, *others = zip(ours, theirs, strict=True)
    for name, values in CODE_VALUES.items():
        state, expected = own.state[matrix[0]], of_torchao.state[matrix[1]][name]
        assert values == tuple(expected.qmap.tolist())
        # Both round to the nearest; they may differ where two are as near.
        assert (state[name] != expected.codes).sum() <= 2
        torch.testing.assert_close(state[name + SCALES].flatten(), expected.scale)
        for weight, their_weight in others:
            torch.testing.assert_close(
                own.state[weight][name], of_torchao.state[their_weight][name]
            )


@pytest.mark.parametrize("beta_sq", [0.95, 0.999])
def test_small_numbers_of_a_row_that_is_seen_once_take_steps_of_adamws_size(beta_sq: float) -> None:
    """As of embeddings: their mean is not 0 while later gradients are, and must not be divided by a
    square of 0.
    """
    torch.manual_seed(0)
    gradient, longest = torch.randn(64, 256), {}
    for build in (AdamW8bit, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.zeros_like(gradient))
        optimizer = build([weight], **SETTINGS | {"lr": 1.0, "betas": (0.9, beta_sq)})
        for step in range(10):
            weight.grad = gradient * (step == 0)
            optimizer.step()
        longest[build] = float(weight.detach().abs().max())
    assert longest[AdamW8bit] < 1.5 * longest[torch.optim.AdamW]


def test_codes_are_loaded_as_they_were_saved() -> None:
    (at_once, _), (stopped, optimizer) = trained(AdamW8bit), trained(AdamW8bit, saves_at=9)
    assert all(torch.equal(*both) for both in zip(at_once, stopped, strict=True))
    assert optimizer.state[stopped[0]]["exp_avg"].dtype == torch.uint8


@pytest.mark.parametrize("has_codes", [True, False])
def test_moments_of_the_host_visit_the_device(has_codes: bool) -> None:
    """Which is the host, too, here; tests/fake_cuda has another."""
    (here, _), (there, _) = (
        trained(partial(AdamW8bit, has_codes=has_codes, on_host=on_host), saves_at=9)
        for on_host in (False, True)
    )
    assert all(torch.equal(*both) for both in zip(here, there, strict=True))
    if not has_codes:
        torch.testing.assert_close(here, trained(torch.optim.AdamW)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.extended
def test_adamw_8bit_learns_as_adamw_with_a_quarter_of_its_state() -> None:
    """Fifty steps over one row of a tiny model."""
    hf_config = tiny_config("olmo2", SIZES["tiny"], vocab_size=512, tie=False)
    losses, state_bytes = {}, {}
    for name in ("adamw", "adamw_8bit"):
        torch.manual_seed(0)
        model: Any = build_model(hf_config, init_device="cpu")
        for parameter in model.parameters():
            torch.nn.init.normal_(
                parameter, std=0.02
            ) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
        section = OptimSection(optimizer=name, learning_rate=1e-3, weight_decay=0.1)
        config = build_optimizer_config(
            section, device=torch.device("cpu"), names=dict(model.named_parameters())
        )
        optimizer = config.build(model)
        row_BT = torch.randint(512, (1, 64))
        compute = partial(
            model, row_BT, labels=row_BT.roll(-1), loss_reduction="mean", return_logits=False
        )
        for _ in range(50):
            optimizer.zero_grad()
            loss = compute().loss
            loss.backward()
            optimizer.step()
        losses[name] = float(compute().loss.detach())
        held = [value for state in optimizer.state.values() for value in state.values()]
        state_bytes[name] = storage_bytes(held)
    assert 0.1 < losses["adamw"] < 5.5, "it has learned, and not all there is"
    assert losses["adamw_8bit"] == pytest.approx(losses["adamw"], rel=0.01)
    assert state_bytes["adamw_8bit"] < 0.27 * state_bytes["adamw"]
