"""Products of linear layers by oneDNN on a CPU, where PyTorch would take them to MKL.

In float32 oneDNN was faster for a layer's output and for the gradient of its input, and slower for the gradient of its
weight. PyTorch's operator for it has no gradient, so it gets one here.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# With fewer tokens, compiling oneDNN's code for a new shape costs the time that it saves.
FEWEST_TOKENS = 1024


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN is faster: many tokens in float32 on a CPU. A tensor-parallel layer's weight is not one matrix."""
    if torch.compiler.is_compiling() or isinstance(weight, DTensor) or isinstance(x, DTensor):
        return False
    is_float32_on_cpu = all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in (x, weight))
    return is_float32_on_cpu and x.shape[:-1].numel() >= FEWEST_TOKENS and torch.backends.mkldnn.is_available()


class ChoosingLinear(nn.Linear):
    """A linear layer that chooses oneDNN or PyTorch at each call, with the parameters of `nn.Linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not pays(x, self.weight):
            return super().forward(x)
        product = by_onednn(x, self.weight)
        if self.bias is not None:
            product = product + self.bias
        return product


def install_products(model: nn.Module) -> None:
    """Replace the linear layers of `model` by `ChoosingLinear`s before it is sharded; they take over the parameters."""
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                has_bias = child.bias is not None
                linear = ChoosingLinear(child.in_features, child.out_features, bias=has_bias, device="meta")
                linear.weight, linear.bias = child.weight, child.bias
                setattr(module, name, linear)


def by_onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x times the transpose of `weight`, both float32 on a CPU; with gradient."""
    return cast(torch.Tensor, _Product.apply(x, weight))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x_needs_grad, weight_needs_grad = ctx.needs_input_grad
        ctx.save_for_backward(x if weight_needs_grad else None, weight if x_needs_grad else None)
        return _product(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = None if weight is None else _product(grad, weight.T)
        return grad_x, None if x is None else grad.flatten(0, -2).T @ x.flatten(0, -2)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x times the transpose of `weight`."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product
