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

    tensor: Tensor
    # None: the gradient of the output is passed on unchanged.
    num_bytes: int | None
    # Alive while it is computed.
    scratch_bytes: int = 0
    # Alive within the kernel, which no tensor shows.
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
        """Record an operation with a new output of `num_bytes`, and return this output.

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
            gradients = [Gradient(tensor=tensor, num_bytes=tensor.num_bytes) for tensor in inputs]
        elif any(tensor.kind == "frozen" for tensor in inputs):
            saved = ()
            gradients = [gradient for gradient in gradients if gradient.tensor.kind != "frozen"]
        all_saved = [*saved]
        if saves_output:
            all_saved.append(output)
        operation = Operation(
            inputs=inputs,
            output=output,
            saved=tuple(all_saved),
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
    def recompute(self, is_recomputed: bool = True) -> Iterator[None]:
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
        keeps_nothing: Keeps = [()] * len(everything)
        keeps = self._kept_at_first()
        scoring_peak, _ = self._forward(everything, keeps=keeps_nothing, alive=set())
        forward_peak, saved = self._forward(everything, keeps=keeps, alive=set())
        return Profile(
            forward_peak=forward_peak,
            scoring_peak=scoring_peak,
            kept_bytes=_count_bytes(saved),
            source_bytes=self.source.num_bytes,
            keeps_source=self.source in saved,
            backward=tuple(self._backward(output, saved)),
        )

    def _kept_at_first(self) -> Keeps:
        """What each operation keeps in a first forward pass: in a region, inputs from outside."""
        regions = {op.output: op.region for op in self.operations}
        keeps: list[Iterable[Tensor]] = []
        for op in self.operations:
            if op.region is None:
                keeps.append(op.saved)
                continue
            from_outside = [each for each in op.inputs if regions.get(each) != op.region]
            keeps.append(from_outside)
        return keeps

    def _find_region(self, region: int) -> list[int]:
        """The indices of the operations of a recomputed region."""
        return [index for index, op in enumerate(self.operations) if op.region == region]

    def _forward(
        self, indices: Iterable[int], *, keeps: Keeps, alive: set[Tensor]
    ) -> tuple[Usage, set[Tensor]]:
        """The peak of running `indices` beside `alive`, and these with what the operations keep."""
        peak = Usage()
        saved = set(alive)
        for index in indices:
            op = self.operations[index]
            alive = alive | {*op.inputs, op.output}
            usage = Usage(activations=_count_bytes(alive), temporaries=op.scratch_bytes)
            peak = max(peak, usage, key=sum)
            saved.update(keeps[index])
            needed_tensors = {
                tensor for tensor in alive if self.needed_until.get(tensor, -1) > index
            }
            alive = saved | needed_tensors
        return peak, saved

    def _backward(self, output: Tensor, saved: set[Tensor]) -> Iterator[Usage]:
        """Every moment: as each gradient is made, and when an operation is done."""
        saved_at_first = self._kept_at_first()
        saved_by_all = [op.saved for op in self.operations]
        # The gradient of each tensor, which is a tensor too: one that is passed on is the gradient
        # of several.
        gradients = {output: Tensor(output.num_bytes)}
        ran_again: set[int] = set()

        def usage(activations: int, scratch_bytes: int = 0, kernel_bytes: int = 0) -> Usage:
            weights = [tensor for tensor in gradients if tensor.kind == "weight"]
            weight_gradients = {gradients[weight] for weight in weights}
            other_gradients = {*gradients.values()} - weight_gradients
            return Usage(
                activations=activations,
                temporaries=_count_bytes(other_gradients) + scratch_bytes,
                weight_gradients=_count_bytes(weight_gradients),
                kernels=kernel_bytes,
            )

        yield usage(_count_bytes(saved))
        for index, op in reversed([*enumerate(self.operations)]):
            if op.region is not None and op.region not in ran_again:
                ran_again.add(op.region)
                indices = self._find_region(op.region)
                again, saved = self._forward(indices, keeps=saved_by_all, alive=saved)
                yield usage(again.activations, again.temporaries)
            output_gradient = gradients.get(op.output)
            if output_gradient is None:
                continue
            op_gradients: list[tuple[Tensor, Tensor]] = []
            for gradient in op.gradients:
                buffer = output_gradient
                if gradient.num_bytes is not None:
                    buffer = Tensor(gradient.num_bytes)
                op_gradients.append((gradient.tensor, buffer))
                new_buffers = {each for _, each in op_gradients} - {output_gradient}
                scratch_bytes = _count_bytes(new_buffers) + gradient.scratch_bytes
                yield usage(_count_bytes(saved), scratch_bytes, gradient.kernel_bytes)
            del gradients[op.output]
            for tensor, buffer in op_gradients:
                gradients.setdefault(tensor, buffer)
            # What a region was given stays until the last of it has run backward.
            needed_tensors: set[Tensor] = set()
            for before in range(index):
                needed_tensors.update(saved_at_first[before])
                if self.operations[before].region in ran_again:
                    needed_tensors.update(saved_by_all[before])
            saved = saved & needed_tensors
            yield usage(_count_bytes(saved))


def _count_bytes(tensors: set[Tensor]) -> int:
    """Bytes of the tensors that the piece itself has made."""
    return sum(tensor.num_bytes for tensor in tensors if tensor.kind == "made")
