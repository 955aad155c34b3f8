"""Matrices of the blocks that multiply in float8, by torchao through OLMo-core's `Float8Config`.

Weights stay what they are, so that shards, optimizer, checkpoints, export and weight sync know
nothing of it: a layer casts its input, its weight and the gradient of its output each time it
multiplies. Passes over a data set without gradients, among them the reference's, compute in
--param_dtype.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from olmo_core.float8 import AOFloat8LinearConfig, Float8Config
from olmo_core.nn.transformer import Transformer
from torch import nn

from open_instruct.core.errors import InputError

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

FIRST_CAPABILITY = (8, 9)
# Sizes of a matrix are multiples of this, by which its float8 kernels load.
MULTIPLE = 16


@dataclass
class Recipe(AOFloat8LinearConfig):
    """torchao's recipe of a name, as in Recipe(name="rowwise"); it can be emulated.

    A row of documents has any number of tokens, which is the inner dimension of a weight's
    gradient: it is padded.
    """

    name: str = "tensorwise"

    def to_ao_type(self) -> "Float8LinearConfig":
        from torchao.float8 import Float8LinearConfig

        return replace(
            Float8LinearConfig.from_recipe_name(self.name),
            emulate=bool(self.emulate),
            pad_inner_dim=True,
        )


def build_float8_config(
    recipe: str, *, model: Transformer, device: torch.device
) -> Float8Config | None:
    """OLMo-core's config of --float8_linears; None for "off".

    Without CUDA the products are emulated.

    :raises InputError: torchao is missing, the GPU has no float8, or a matrix cannot be multiplied
        so.
    """
    if recipe == "off":
        return None
    flag = f"--float8_linears {recipe}"
    if find_spec("torchao") is None:
        raise InputError(
            f"{flag}: the package torchao is not installed; pip install 'open-instruct[float8]'",
            kind="missing_package",
        )
    on_cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_cuda else FIRST_CAPABILITY
    if capability < FIRST_CAPABILITY:
        least = ".".join(map(str, FIRST_CAPABILITY))
        here = ".".join(map(str, capability))
        raise InputError(
            f"{flag} needs a GPU of compute capability {least} or newer, this one has {here}: "
            "use off",
            kind="machine",
        )
    for name, module in model.blocks.named_modules():
        if isinstance(module, nn.Linear) and any(size % MULTIPLE for size in module.weight.shape):
            sizes = " x ".join(map(str, module.weight.shape))
            raise InputError(
                f"{flag}: blocks.{name} is {sizes}, and float8 takes multiples of {MULTIPLE}: "
                "use off",
                kind="unsupported_model",
            )
    return Float8Config(ao=Recipe(name=recipe, emulate=not on_cuda))


@contextmanager
def float8_off(model: Transformer) -> Iterator[None]:
    """A context in which `model` multiplies as if there were no float8, to the bit.

    For passes without gradients.
    """
    layers: list[Any] = [
        each for each in model.modules() if model.fp8_enabled and hasattr(each, "linear_mm_config")
    ]
    recipes = [layer.config for layer in layers]
    for layer in layers:
        layer.config = build_recipe_without_casts()
    try:
        yield
    finally:
        for layer, recipe in zip(layers, recipes, strict=True):
            layer.config = recipe


@cache
def build_recipe_without_casts() -> "Float8LinearConfig":
    """torchao's recipe of a layer that casts nothing."""
    from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingType

    no_cast = CastConfig(scaling_type=ScalingType.DISABLED)
    return Float8LinearConfig(
        cast_config_input=no_cast, cast_config_weight=no_cast, cast_config_grad_output=no_cast
    )
