"""The state dict of a model and its optimizer, with the names of PyTorch's distributed checkpoints.

PyTorch's own functions take five times as long to list it, and the training waits for that.
"""

from typing import Any

import torch
from torch import nn

from open_instruct.models.hf.names import clean_name


def state_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """The present state of both, without frozen weights and with the optimizer's names flat.

    The optimizer must have taken a step.
    """
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    frozen = {name for parameter, name in names.items() if not parameter.requires_grad}
    held = {clean_name(name): tensor for name, tensor in model.state_dict().items()}
    return {
        "model": {name: tensor for name, tensor in held.items() if name not in frozen},
        "optim": {
            f"{kind}.{names[parameter]}.{key}": value
            for group in optim.param_groups
            for parameter in group["params"]
            for kind, values in (("state", optim.state.get(parameter, {})), ("param_groups", group))
            for key, value in values.items()
            if key != "params"
        },
    }
