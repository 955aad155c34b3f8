"""A checkpoint that is written before the optimizer's first step changes nothing of the run that
goes on.
"""

from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from open_instruct.config.sections import OptimSection
from open_instruct.training.olmo_core.fsdp2 import FSDP2Backend
from open_instruct.training.optim.optimizers import build_optimizer_config
from tests.unit.small_models import CPU, new_model

OPTIMIZERS = get_args(get_type_hints(OptimSection)["optimizer"])
NUM_STEPS = 3


def build_module(optimizer: str) -> FSDP2Backend:
    model = new_model("olmo2")
    names = tuple(name for name, _ in model.named_parameters())
    section = OptimSection(optimizer=optimizer, learning_rate=1e-2)  # type: ignore[arg-type]
    module = FSDP2Backend(
        model=model,
        optim=build_optimizer_config(section, device=CPU, names=names, has_dtensors=True),
        rank_microbatch_size=32,
        max_sequence_length=32,
        max_grad_norm=1.0,
        device=CPU,
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.model.parameters():  # NaN until a checkpoint is loaded
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def take_steps(module: FSDP2Backend) -> dict[str, torch.Tensor]:
    """The weights after a few steps of made-up gradients, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        for parameter in module.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        module.step(loss=1.0, grad_norm=1.0)
    return {name: each.detach().clone() for name, each in module.model.named_parameters()}


def flat_names(state: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for name, value in state.items():
        is_part = isinstance(value, dict) and name in ("model", "optim")
        names += flat_names(value, f"{name}.") if is_part else [f"{prefix}{name}"]
    return names


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saving_before_the_first_step_changes_no_step(optimizer: str) -> None:
    undisturbed = take_steps(build_module(optimizer))
    saved = build_module(optimizer)
    saved.state_dict_to_save()
    torch.testing.assert_close(take_steps(saved), undisturbed, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resuming_from_before_the_first_step_changes_no_step(optimizer: str) -> None:
    undisturbed = take_steps(build_module(optimizer))
    state = build_module(optimizer).state_dict_to_save()
    resumed = build_module(optimizer)
    metadata = Metadata(state_dict_metadata=dict.fromkeys(flat_names(state)))  # type: ignore[arg-type]
    filled = resumed.state_dict_to_load(metadata)
    for name, tensor in filled["model"].items():
        tensor.copy_(state["model"][name])
    resumed.load_state_dict(filled)
    torch.testing.assert_close(take_steps(resumed), undisturbed, rtol=0, atol=0)
