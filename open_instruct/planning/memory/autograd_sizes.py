"""A small autograd on sizes alone: the bytes alive while a piece of a model runs.

Operations are recorded in the order in which they run. A tensor lives while a later operation needs
it, while a variable of the function that made it holds it, or while it is saved for the backward
pass; gradients are added up in place where a tensor is used more than once. The backward pass takes
the operations in reverse order, as PyTorch does.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["made", "source", "weight", "frozen"]


@dataclass(eq=False, slots=True)
class Tensor:
    """One storage; views of it are the same `Tensor`.

    Only those that are "made" by the piece itself are counted. A product with a "frozen" tensor
    keeps nothing for its gradient, and makes none.
    """

    num_bytes: int
    kind: Kind = "made"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of one input of an operation."""

    of: Tensor
    # None: the gradient of the output is passed on unchanged.
    num_bytes: int | None
    # Alive while it is computed; the second within the kernel, which no tensor shows.
    scratch_bytes: int = 0
    kernel_bytes: int = 0


class Operation(NamedTuple):
    """One operation on the tape, with what it keeps for its backward."""

    inputs: tuple[Tensor, ...]
    output: Tensor
    saved: tuple[Tensor, ...]
    gradients: tuple[Gradient, ...]
    scratch_bytes: int
    # The recomputed region that it belongs to, if any.
    region: int | None


class Usage(NamedTuple):
    """Bytes at one moment; their `sum` is what is alive."""

    # What a forward pass saved or passed on.
    activations: int = 0
    # Most are gradients of activations.
    temporaries: int = 0
    weight_gradients: int = 0
    # Within a kernel.
    kernels: int = 0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The memory that a piece needs beside its source."""

    # Of a forward pass that keeps `kept_bytes` for its backward; the output counts too.
    forward_peak: Usage
    # Of a forward pass without a backward; the output counts too.
    scoring_peak: Usage
    kept_bytes: int
    source_bytes: int
    # Whether the source must live until the backward pass.
    keeps_source: bool
    # Moment by moment, with what was kept, and the gradient of the output from the start.
    backward: tuple[Usage, ...]

    def find_forward_peak(self, *, keeps: bool) -> Usage:
        """The peak of a forward pass; without `keeps` no backward pass follows."""
        if keeps:
            return self.forward_peak
        return self.scoring_peak

    @cached_property
    def backward_peak(self) -> Usage:
        return max(self.backward, key=sum)


# What each operation keeps for its backward.
Keeps = Sequence[Iterable[Tensor]]


@dataclass(slots=True)
class Tape:
    """Records a piece of a model that begins with `source`, and runs it forward and backward."""

    source: Tensor
    operations: list[Operation] = field(default_factory=list)
    # The index of the last operation that reads a tensor, or that runs while a variable holds it.
    needed_until: dict[Tensor, int] = field(default_factory=dict)
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
        self.hold(*inputs)
        if gradients is None:
            gradients = [Gradient(of=tensor, num_bytes=tensor.num_bytes) for tensor in inputs]
        elif any(tensor.kind == "frozen" for tensor in inputs):
            saved = ()
            gradients = [gradient for gradient in gradients if gradient.of.kind != "frozen"]
        kept = [*saved]
        if saves_output:
            kept.append(output)
        operation = Operation(
            inputs=inputs,
            output=output,
            saved=tuple(kept),
            gradients=tuple(gradients),
            scratch_bytes=scratch_bytes,
            region=self._region,
        )
        self.operations.append(operation)
        return output

    def hold(self, *tensors: Tensor) -> None:
        """Keep variables of a function alive until this point, where the function ends."""
        for tensor in tensors:
            self.needed_until[tensor] = len(self.operations)

    @contextmanager
    def recomputed(self, is_recomputed: bool = True) -> Iterator[None]:
        """A context whose operations run again in backward, and keep inputs from outside alone."""
        if not is_recomputed or self._region is not None:
            yield
            return
        self._region = len(self.operations)
        yield
        self._region = None

    def profile(self, output: Tensor) -> Profile:
        """Run forward and backward; `output` is what the piece passes on."""
        self.hold(output)
        everything = range(len(self.operations))
        scoring_peak, _ = self._forward(everything, keeps=[()] * len(everything), alive=set())
        forward_peak, kept = self._forward(everything, keeps=self._kept_at_first(), alive=set())
        return Profile(
            forward_peak=forward_peak,
            scoring_peak=scoring_peak,
            kept_bytes=_made(kept),
            source_bytes=self.source.num_bytes,
            keeps_source=self.source in kept,
            backward=tuple(self._backward(output, kept)),
        )

    def _kept_at_first(self) -> Keeps:
        """What each operation keeps in a first forward pass: in a region, inputs from outside."""
        regions = {op.output: op.region for op in self.operations}
        keeps: list[Iterable[Tensor]] = []
        for op in self.operations:
            if op.region is None:
                keeps.append(op.saved)
            else:
                keeps.append([each for each in op.inputs if regions.get(each) != op.region])
        return keeps

    def _forward(
        self, indices: Iterable[int], *, keeps: Keeps, alive: set[Tensor]
    ) -> tuple[Usage, set[Tensor]]:
        """The peak of running `indices` beside `alive`, and these with what the operations keep."""
        peak = Usage()
        kept = set(alive)
        for index in indices:
            op = self.operations[index]
            alive = alive | {*op.inputs, op.output}
            usage = Usage(activations=_made(alive), temporaries=op.scratch_bytes)
            peak = max(peak, usage, key=sum)
            kept.update(keeps[index])
            alive = kept | {tensor for tensor in alive if self.needed_until.get(tensor, -1) > index}
        return peak, kept

    def _backward(self, output: Tensor, kept: set[Tensor]) -> Iterator[Usage]:
        """Every moment: as each gradient is made, and when an operation is done."""
        kept_at_first = self._kept_at_first()
        saved = [op.saved for op in self.operations]
        # Buffers are tensors too: one that is handed on is the gradient of several.
        gradient_of = {output: Tensor(output.num_bytes)}
        ran_again: set[int] = set()

        def usage(activations: int, scratch_bytes: int = 0, kernel_bytes: int = 0) -> Usage:
            of_weights = {
                gradient for tensor, gradient in gradient_of.items() if tensor.kind == "weight"
            }
            return Usage(
                activations=activations,
                temporaries=_made({*gradient_of.values()} - of_weights) + scratch_bytes,
                weight_gradients=_made(of_weights),
                kernels=kernel_bytes,
            )

        yield usage(_made(kept))
        for index, op in reversed([*enumerate(self.operations)]):
            if op.region is not None and op.region not in ran_again:
                ran_again.add(op.region)
                region = [at for at, each in enumerate(self.operations) if each.region == op.region]
                again, kept = self._forward(region, keeps=saved, alive=kept)
                yield usage(again.activations, again.temporaries)
            output_gradient = gradient_of.get(op.output)
            if output_gradient is None:
                continue
            made: list[tuple[Tensor, Tensor]] = []
            for gradient in op.gradients:
                buffer = output_gradient
                if gradient.num_bytes is not None:
                    buffer = Tensor(gradient.num_bytes)
                made.append((gradient.of, buffer))
                new = _made({each for _, each in made} - {output_gradient})
                yield usage(_made(kept), new + gradient.scratch_bytes, gradient.kernel_bytes)
            del gradient_of[op.output]
            for tensor, buffer in made:
                gradient_of.setdefault(tensor, buffer)
            # What a region was given stays until the last of it has run backward.
            needed: set[Tensor] = set()
            for before in range(index):
                needed.update(kept_at_first[before])
                if self.operations[before].region in ran_again:
                    needed.update(saved[before])
            kept = kept & needed
            yield usage(_made(kept))


def _made(tensors: set[Tensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors if tensor.kind == "made")
