"""AdamW whose moments take 8 bits a value, with a float32 scale for each block of neighbours.

Codes and blocks are those of Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv
2110.02861, as in torchao's `AdamW8bit`. Otherwise than there a block lies within a row, so that a
checkpoint is the same however many ranks share a matrix; codes and scales are plain tensors, which
checkpoints save as any other; and nothing is compiled, so no compiler is needed. The step itself is
computed in float32, a chunk of a matrix at a time.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from open_instruct.models.shards import local_part
from open_instruct.planning.memory.state import CHUNK_VALUES, values_in_block


def list_code_values(*, signed: bool) -> tuple[float, ...]:
    """What each of the 256 codes stands for, in ascending order: torchao's `create_dynamic_map`.

    They are fractions of a block's largest number, and ten times as close to each other around a
    tenth of it.
    """
    values = [0.0, 1.0]
    num_bits = 6 if signed else 7
    for exponent in range(-6, 1):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + num_bits) + 1)
        middles = (10.0**exponent * (edges[:-1] + edges[1:]) / 2).tolist()
        values += middles
        if signed:
            values += [-middle for middle in middles]
    return tuple(sorted(values))


# AdamW's moments, by torch's names. Beside the codes of one are their scales.
CODE_VALUES = {
    "exp_avg": list_code_values(signed=True),
    "exp_avg_sq": list_code_values(signed=False),
}
SCALES = "_scales"


class Code(NamedTuple):
    """The numbers that codes stand for, in ascending order.

    Numbers between one of `borders` and the next are rounded to the same code.
    """

    values: Tensor
    borders: Tensor

    @classmethod
    def from_values(cls, values: Tensor) -> "Code":
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
        self,
        params: Any,
        *,
        has_codes: bool = True,
        on_host: bool = False,
        **defaults: Any,
    ) -> None:
        super().__init__(params, defaults)
        self.has_codes = has_codes
        self.on_host = on_host
        self._codes: dict[str, Code] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the train module computes the loss itself"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_one(weight, group)

    def _step_one(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self._prepare_state(weight)
        state["step"] += 1
        step = float(state["step"])
        rate = group["lr"]
        beta, beta_sq = group["betas"]
        weights = view_as_rows(weight)
        gradient = view_as_rows(weight.grad)  # type: ignore[arg-type]
        mean = select_moment(state, "exp_avg")
        square = select_moment(state, "exp_avg_sq")
        num_rows = max(1, CHUNK_VALUES // max(1, weights.shape[1]))
        for first in range(0, len(weights), num_rows):
            rows = slice(first, first + num_rows)
            mean_rows = [each[rows] for each in mean]
            square_rows = [each[rows] for each in square]
            target = gradient[rows]
            moved_rows = self._move("exp_avg", mean_rows, target, 1 - beta)
            target = target.square()
            divisor = self._move("exp_avg_sq", square_rows, target, 1 - beta_sq).sqrt()
            divisor.div_(sqrt(1 - beta_sq**step)).add_(group["eps"])
            chunk = weights[rows].mul_(1 - rate * group["weight_decay"])
            chunk.addcdiv_(moved_rows, divisor, value=-rate / (1 - beta**step))

    def _prepare_state(self, weight: Tensor) -> dict[str, Any]:
        """The state of a weight, which its first step makes."""
        if not self._codes:
            for name, values in CODE_VALUES.items():
                self._codes[name] = Code.from_values(torch.tensor(values, device=weight.device))
        state: dict[str, Any] = self.state[weight]
        if not state:
            device = torch.device("cpu") if self.on_host else weight.device
            state.update(build_first_state(weight, has_codes=self.has_codes, device=device))
        return state

    def _move(
        self,
        name: str,
        moment: list[Tensor],
        target: Tensor,
        fraction: float,
    ) -> Tensor:
        """`move` a moment, with its scales if it has any, on the device of `target`."""
        on_device = [each.to(target.device) for each in moment]
        moved_codes = move(self._codes[name], target, fraction, *on_device)
        if self.on_host:
            for on_host, copy in zip(moment, on_device, strict=True):
                on_host.copy_(copy)
        return moved_codes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, but without casting codes to the dtype of the weights."""
        super().load_state_dict(state_dict | {"state": {}})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        weights = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, weight in zip(numbers, weights, strict=True):
            self.state[weight].update(state_dict["state"].get(number, {}))


def move(
    code: Code,
    target: Tensor,
    fraction: float,
    moment: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """Move a moment by a fraction of its way to `target`.

    Returned are its numbers before they are rounded to codes.
    """
    if scales is None:
        return moment.lerp_(target, fraction)
    block_scales = scales.unsqueeze(-1)
    numbers = code.values[moment.int()].unflatten(-1, (scales.shape[-1], -1)).mul_(block_scales)
    numbers.lerp_(target.view_as(numbers), fraction)
    scales.copy_(numbers.abs().amax(-1).clip_(min=1e-12))  # and so `block_scales`, its view
    codes = torch.bucketize(numbers / block_scales, code.borders, out_int32=True, right=True)
    moment.copy_(codes.view_as(moment))
    return numbers.view_as(moment)


def view_as_rows(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as the rows of one matrix."""
    local = local_part(tensor)
    return local.reshape(prod(local.shape[:-1]), local.shape[-1])


def select_moment(state: Mapping[str, Tensor], name: str) -> list[Tensor]:
    """This rank's rows of a moment, and then of its scales if it has any."""
    tensors = [state[name]]
    if name + SCALES in state:
        tensors.append(state[name + SCALES])
    return [view_as_rows(each) for each in tensors]


def build_first_state(
    weight: Tensor, *, has_codes: bool, device: torch.device
) -> dict[str, Tensor]:
    """No steps, and moments of 0: in float32, or as codes and scales, sharded as the weight is."""
    size = values_in_block(weight.shape, count_row_cuts(weight)) if has_codes else 0
    state = {"step": torch.tensor(0.0)}
    for name in CODE_VALUES:
        if size:
            state[name] = torch.zeros_like(weight, dtype=torch.uint8, device=device)
            state[name + SCALES] = build_first_scales(weight, size).to(device)
        else:
            state[name] = torch.zeros_like(weight, device=device)
    return state


def count_row_cuts(weight: Tensor) -> int:
    """The number of ranks that share a row of `weight`."""
    num_cuts = 1
    if isinstance(weight, DTensor):
        for size, placement in zip(weight.device_mesh.shape, weight.placements, strict=True):
            if getattr(placement, "dim", None) == weight.dim() - 1:
                num_cuts *= size
    return num_cuts


def build_first_scales(weight: Tensor, size: int) -> Tensor:
    """A scale of 0 for each block of so many values."""
    scales = torch.zeros(local_part(weight)[..., ::size].shape, device=weight.device)
    if not isinstance(weight, DTensor):
        return scales
    whole = torch.empty((*weight.shape[:-1], weight.shape[-1] // size), device="meta")
    return DTensor.from_local(
        scales,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
