"""AdamW whose moments take 8 bits a value: a code each, and a float32 scale for each block of
neighbours in a row.

Codes and blocks are those of Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv
2110.02861, as in torchao's `AdamW8bit`. Otherwise than there a block lies within a row, so that a
checkpoint is the same however many ranks share a matrix; codes and scales are plain tensors, which
checkpoints save as any other; and nothing is compiled, so no compiler is needed. The step itself is
computed in float32, a chunk of a matrix at a time.
"""

from collections.abc import Callable
from itertools import chain
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from open_instruct.models.shards import local_part
from open_instruct.planning.memory.state import CHUNK_VALUES, values_in_block


def code_values(*, signed: bool) -> tuple[float, ...]:
    """What each of the 256 codes stands for, in ascending order: torchao's `create_dynamic_map`.

    They are fractions of a block's largest number, and ten times as close to each other around a
    tenth of it.
    """
    values = [0.0, 1.0]
    for exponent in range(-6, 1):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + (6 if signed else 7)) + 1)
        middles = (10.0**exponent * (edges[:-1] + edges[1:]) / 2).tolist()
        values += middles + [-middle for middle in middles if signed]
    return tuple(sorted(values))


# AdamW's moments, by torch's names. Beside the codes of one are their scales.
CODE_VALUES = {"exp_avg": code_values(signed=True), "exp_avg_sq": code_values(signed=False)}
SCALES = "_scales"


class Code(NamedTuple):
    """The numbers that codes stand for, and the borders between those that are rounded to one code
    and the next.
    """

    values: Tensor
    borders: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "Code":
        borders = (values[:-1] + values[1:]) / 2
        # A square above 0 stays so: a mean divided by one that was rounded to 0 is a step of any
        # size.
        borders[0].clamp_(max=torch.finfo(borders.dtype).tiny)
        return cls(values, borders)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments of 8 bits where `values_in_block` has it so, and of float32 elsewhere.

    :param has_codes: False has all moments in float32.
    :param on_host: moments are in host memory, and of the rows at work on the device.
    """

    def __init__(
        self, params: Any, *, has_codes: bool = True, on_host: bool = False, **defaults: Any
    ) -> None:
        super().__init__(params, defaults)
        self.has_codes, self.on_host = has_codes, on_host
        self._codes: dict[str, Code] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the train module computes the loss itself"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_one(weight, group)

    def _step_one(self, weight: Tensor, group: dict[str, Any]) -> None:
        if not self._codes:
            values = {
                name: torch.tensor(each, device=weight.device) for name, each in CODE_VALUES.items()
            }
            self._codes = {name: Code.of(each) for name, each in values.items()}
        if not (state := self.state[weight]):
            state.update(
                first_state(
                    weight,
                    has_codes=self.has_codes,
                    device="cpu" if self.on_host else weight.device,
                )
            )
        state["step"] += 1
        rate, (beta, beta_sq), step = group["lr"], group["betas"], float(state["step"])
        own, gradient = rows_of(weight), rows_of(weight.grad)  # type: ignore[arg-type]
        mean, square = (
            [rows_of(state[key]) for key in (name, name + SCALES) if key in state]
            for name in CODE_VALUES
        )
        size = max(1, CHUNK_VALUES // max(1, own.shape[1]))
        for rows in (slice(first, first + size) for first in range(0, len(own), size)):
            target = gradient[rows]
            moved = self._visited("exp_avg", target, 1 - beta, [each[rows] for each in mean])
            target = target.square()
            divisor = self._visited(
                "exp_avg_sq", target, 1 - beta_sq, [each[rows] for each in square]
            ).sqrt()
            divisor.div_(sqrt(1 - beta_sq**step)).add_(group["eps"])
            own[rows].mul_(1 - rate * group["weight_decay"]).addcdiv_(
                moved, divisor, value=-rate / (1 - beta**step)
            )

    def _visited(self, name: str, target: Tensor, fraction: float, moment: list[Tensor]) -> Tensor:
        """`move` a moment, with its scales if it has any, on the device of `target`."""
        there = [each.to(target.device) for each in moment]
        moved = move(self._codes[name], target, fraction, *there)
        for own, visitor in zip(moment, there if self.on_host else (), strict=False):
            own.copy_(visitor)
        return moved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would cast codes to the dtype of the weights."""
        super().load_state_dict(state_dict | {"state": {}})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        weights = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, weight in zip(numbers, weights, strict=True):
            self.state[weight].update(state_dict["state"].get(number, {}))


def move(
    code: Code, target: Tensor, fraction: float, moment: Tensor, scales: Tensor | None = None
) -> Tensor:
    """Move a moment by a fraction of its way to `target`; returned are its numbers before they are
    rounded to codes.
    """
    if scales is None:
        return moment.lerp_(target, fraction)
    of_blocks = scales.unsqueeze(-1)
    numbers = code.values[moment.int()].unflatten(-1, (scales.shape[-1], -1)).mul_(of_blocks)
    numbers.lerp_(target.view_as(numbers), fraction)
    scales.copy_(numbers.abs().amax(-1).clip_(min=1e-12))
    codes = torch.bucketize(numbers / of_blocks, code.borders, out_int32=True, right=True)
    moment.copy_(codes.view_as(moment))
    return numbers.view_as(moment)


def rows_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as the rows of one matrix."""
    local = local_part(tensor)
    return local.reshape(prod(local.shape[:-1]), local.shape[-1])


def first_state(weight: Tensor, *, has_codes: bool, device: Any) -> dict[str, Tensor]:
    """No steps, and moments of 0: in float32, or as codes and scales, sharded as the weight is."""
    cuts = (
        zip(weight.device_mesh.shape, weight.placements, strict=True)
        if isinstance(weight, DTensor)
        else ()
    )
    num_cuts = prod(
        size for size, placement in cuts if getattr(placement, "dim", None) == weight.dim() - 1
    )
    size = values_in_block(weight.shape, num_cuts) if has_codes else 0
    state = {"step": torch.tensor(0.0)}
    for name in CODE_VALUES:
        state[name] = torch.zeros_like(weight, dtype=torch.uint8 if size else None, device=device)
        if size:
            state[name + SCALES] = first_scales(weight, size).to(device)
    return state


def first_scales(weight: Tensor, size: int) -> Tensor:
    """A scale of 0 for each block of so many values."""
    scales = torch.zeros(local_part(weight)[..., ::size].shape, device=weight.device)
    if not isinstance(weight, DTensor):
        return scales
    whole = torch.empty((*weight.shape[:-1], weight.shape[-1] // size), device="meta")
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(
        scales, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
