"""A small autograd on sizes alone: which bytes are alive while a piece of a model runs forward and backward.

Operations are recorded in the order in which they run. A tensor lives while a later operation needs it, while a
variable of the function that made it holds it, or while it is saved for the backward pass; gradients are added up in
place where a tensor is used more than once. The backward pass takes the operations in reverse order, as PyTorch does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

Kind = Literal["made", "source", "weight", "frozen"]


@dataclass(eq=False, slots=True)
class Tensor:
    """One storage; views of it are the same `Tensor`. Only those that are "made" by the piece itself are counted.

    A product with a "frozen" tensor keeps nothing for its gradient, and makes none.
    """

    num_bytes: int
    kind: Kind = "made"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of one input. `num_bytes` None: the gradient of the output is passed on unchanged.

    `scratch_bytes` are alive while it is computed.
    """

    of: Tensor
    num_bytes: int | None
    scratch_bytes: int = 0


class Operation(NamedTuple):
    """`region`: which of the recomputed regions it belongs to, if any."""

    inputs: tuple[Tensor, ...]
    output: Tensor
    saved: tuple[Tensor, ...]
    gradients: tuple[Gradient, ...]
    scratch_bytes: int
    region: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes at one moment: what a forward saved or passed on, temporaries (most are gradients), weights' gradients."""

    activations: int = 0
    temporaries: int = 0
    weight_gradients: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.temporaries + self.weight_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The memory that a piece needs beside its source.

    `forward_peak` is that of a forward pass which keeps `kept_bytes` for its backward, `scoring_peak` that of one
    without a backward; the output counts in both. `keeps_source` says whether the source must live until the backward
    pass. `backward_peak` counts what was kept, and the gradient of the output from the start.
    """

    forward_peak: Usage
    scoring_peak: Usage
    kept_bytes: int
    keeps_source: bool
    backward_peak: Usage
    weight_gradient_bytes: int


@dataclass(slots=True)
class Tape:
    """Records a piece of a model that begins with `source`."""

    source: Tensor
    operations: list[Operation] = field(default_factory=list)
    held_until: dict[Tensor, int] = field(default_factory=dict)
    _region: int | None = None

    def run(
        self,
        num_bytes: int,
        *inputs: Tensor,
        saved: Sequence[Tensor] = (),
        saves_output: bool = False,
        gradients: Sequence[Gradient] | None = None,
        scratch_bytes: int = 0,
    ) -> Tensor:
        """Record an operation that puts out a new tensor of `num_bytes`, and return that.

        Args:
            inputs: what it reads, weights too.
            saved: what it keeps for its backward.
            saves_output: whether it keeps its output too.
            gradients: in the order they are made; default: of each input, as large as the input.
            scratch_bytes: alive beside inputs and output in the forward pass.
        """
        output = Tensor(num_bytes)
        if gradients is not None and any(tensor.kind == "frozen" for tensor in inputs):
            saved, gradients = (), [gradient for gradient in gradients if gradient.of.kind != "frozen"]
        kept = (*saved, output) if saves_output else tuple(saved)
        whole = (Gradient(of=tensor, num_bytes=tensor.num_bytes) for tensor in inputs)
        made = tuple(whole if gradients is None else gradients)
        self.operations.append(Operation(inputs, output, kept, made, scratch_bytes, self._region))
        return output

    def hold(self, *tensors: Tensor) -> None:
        """Keep variables of a function alive until this point, where the function ends."""
        for tensor in tensors:
            self.held_until[tensor] = len(self.operations)

    @contextmanager
    def recomputed(self, is_recomputed: bool = True) -> Iterator[None]:
        """A context whose operations run again in the backward pass, and keep only their inputs from outside."""
        if not is_recomputed or self._region is not None:
            yield
            return
        self._region = len(self.operations)
        yield
        self._region = None

    def profile(self, output: Tensor) -> Profile:
        """Run forward and backward; `output` is what the piece passes on."""
        return _Run(self, output).profile()


# What each operation keeps for its backward.
Keeps = Sequence[Sequence[Tensor]]


class _Run:
    def __init__(self, tape: Tape, output: Tensor) -> None:
        self.source, self.output, self.operations = tape.source, output, tape.operations
        last_use = {tensor: index for index, op in enumerate(self.operations) for tensor in op.inputs}
        last_use[output] = len(self.operations)
        held = tape.held_until
        self.alive_until = {each: max(held.get(each, -1), last_use.get(each, -1)) for each in held | last_use}
        self.regions: dict[int, list[int]] = {}
        for index, op in enumerate(self.operations):
            if op.region is not None:
                self.regions.setdefault(op.region, []).append(index)
        # At first a region keeps what its operations are given from outside; run again, what every operation does.
        made = {region: {self.operations[i].output for i in indices} for region, indices in self.regions.items()}
        self.kept_at_first: Keeps = [
            op.saved if op.region is None else [each for each in op.inputs if each not in made[op.region]]
            for op in self.operations
        ]

    def profile(self) -> Profile:
        everything = range(len(self.operations))
        scoring_peak, _ = self._forward(everything, keeps=[()] * len(everything), alive=set())
        forward_peak, kept = self._forward(everything, keeps=self.kept_at_first, alive=set())
        backward_peak, weight_gradient_bytes = self._backward(kept)
        return Profile(
            forward_peak=forward_peak,
            scoring_peak=scoring_peak,
            kept_bytes=_made(kept),
            keeps_source=self.source in kept,
            backward_peak=backward_peak,
            weight_gradient_bytes=weight_gradient_bytes,
        )

    def _forward(self, indices: Iterable[int], *, keeps: Keeps, alive: set[Tensor]) -> tuple[Usage, set[Tensor]]:
        """The peak of running `indices` beside the `alive` tensors, and these with the tensors that they keep."""
        peak, kept, alive = Usage(), set(alive), set(alive)
        for index in indices:
            op = self.operations[index]
            alive |= {*op.inputs, op.output}
            usage = Usage(activations=_made(alive), temporaries=op.scratch_bytes)
            peak = max(peak, usage, key=lambda moment: moment.total)
            kept |= set(keeps[index])
            alive = kept | {tensor for tensor in alive if self.alive_until.get(tensor, -1) > index}
        return peak, kept

    def _backward(self, kept: set[Tensor]) -> tuple[Usage, int]:
        """The peak, and the bytes of the weights' gradients at the end."""
        # Buffers are tensors too: one that is handed on is the gradient of several.
        gradient_of: dict[Tensor, Tensor] = {self.output: Tensor(self.output.num_bytes)}
        ran_again: set[int] = set()
        peak = Usage()

        def look(scratch_bytes: int = 0, activations: int | None = None) -> None:
            nonlocal peak
            weight_gradients = {gradient for tensor, gradient in gradient_of.items() if tensor.kind == "weight"}
            usage = Usage(
                activations=_made(kept) if activations is None else activations,
                temporaries=_made(set(gradient_of.values()) - weight_gradients) + scratch_bytes,
                weight_gradients=_made(weight_gradients),
            )
            peak = max(peak, usage, key=lambda moment: moment.total)

        look()
        for index in reversed(range(len(self.operations))):
            op = self.operations[index]
            if op.region is not None and op.region not in ran_again:
                ran_again.add(op.region)
                saved = [each.saved for each in self.operations]
                again, kept = self._forward(self.regions[op.region], keeps=saved, alive=kept)
                look(again.temporaries, again.activations)
            gradient_of_output = gradient_of.get(op.output)
            if gradient_of_output is None:
                continue
            made: list[tuple[Tensor, Tensor]] = []
            for gradient in op.gradients:
                buffer = gradient_of_output if gradient.num_bytes is None else Tensor(gradient.num_bytes)
                made.append((gradient.of, buffer))
                look(_made({buffer for _, buffer in made} - {gradient_of_output}) + gradient.scratch_bytes)
            del gradient_of[op.output]
            for tensor, buffer in made:
                gradient_of.setdefault(tensor, buffer)
            before = zip(self.operations[:index], self.kept_at_first, strict=False)
            ran = (op.saved if op.region in ran_again else at_first for op, at_first in before)
            kept = kept & set(chain.from_iterable(ran))
        return peak, _made({gradient for tensor, gradient in gradient_of.items() if tensor.kind == "weight"})


def _made(tensors: set[Tensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors if tensor.kind == "made")
