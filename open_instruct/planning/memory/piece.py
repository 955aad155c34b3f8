"""The operations that a block and the head of a model share, recorded on a tape of sizes.

Sources, in OLMo-core 3.0 and PyTorch 2.13: `RMSNorm` and `QwenRMSNorm` for the norms,
`derivatives.yaml` of PyTorch for what each operation saves.

Norms compute in float32 whatever dtype the rest uses, and keep float32 copies of their inputs; in
bfloat16 these copies are most of what a block keeps. A matrix that is frozen keeps nothing for its
gradient; an adapter beside it keeps its own few features.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

from open_instruct.planning.memory.autograd_sizes import Gradient, Kind, Tape, Tensor
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.workload import Workload, is_wrapped

FLOAT32 = 4
INDEX_BYTES = 8
# A cast to float8 has two float32 copies beside the result: what torchao's `_ToFloat8ConstrFunc`
# makes, uncompiled.
BYTES_OF_CAST = 2 * FLOAT32 + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSplit:
    """How ranks divide a block or the head: all of a layout that its memory depends on."""

    tensor_degree: int
    context_degree: int
    expert_degree: int
    is_single_device: bool  # which has master weights, and gathers nothing


class Piece:
    """A block or the head: it records its operations on `tape`, from the source on."""

    def __init__(
        self,
        shape: ModelShape,
        degrees: PieceSplit,
        workload: Workload,
        splits_rows: bool,
    ) -> None:
        self.shape = shape
        self.degrees = degrees
        self.workload = workload
        self.item_bytes = workload.compute_bytes
        # Of the model's own parameters.
        self.kind: Kind = "weight" if shape.adapters is None else "frozen"
        self.num_tokens = -(-workload.tokens_per_microbatch // degrees.context_degree)
        self.num_rows = self.num_tokens  # between matrices
        if splits_rows:
            self.num_rows = self.split(self.num_tokens)
        stream_bytes = self.num_rows * shape.d_model * self.item_bytes
        self.tape = Tape(Tensor(stream_bytes, kind="source"))

    def split(self, count: int) -> int:
        """A tensor rank's share of `count`."""
        return -(-count // self.degrees.tensor_degree)

    def recompute(self, module: str) -> AbstractContextManager[None]:
        """A context for a module of the block, which may be checkpointed; "" is the block itself.

        All blocks are alike.
        """
        is_recomputed = is_wrapped(self.workload.recomputed_modules, 0, module)
        return self.tape.recompute(is_recomputed)

    def cast(self, tensor: Tensor, num_elements: int, to_bytes: int) -> Tensor:
        """A copy of `num_elements` in another dtype; the tensor itself if it has that size."""
        num_bytes = num_elements * to_bytes
        if tensor.num_bytes == num_bytes:
            return tensor
        return self.tape.run(num_bytes, tensor)

    def copy(self, tensor: Tensor, *saved: Tensor) -> Tensor:
        """A tensor as large as the given one, whose operation keeps `saved`."""
        return self.tape.run(tensor.num_bytes, tensor, saved=saved)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """An elementwise product, which keeps both factors."""
        return self.tape.run(left.num_bytes, left, right, saved=[left, right])

    def index(self, num_entries: int) -> Tensor:
        """A tensor of int64 without a gradient."""
        return self.tape.run(num_entries * INDEX_BYTES, gradients=())

    def linear(
        self,
        module: str,
        x: Tensor,
        num_inputs: int,
        num_outputs: int,
    ) -> Tensor:
        """The output of one of the block's matrices for all tokens, plus its adapter's output."""
        adapters = self.shape.adapters
        output = self.product(x, num_inputs, num_outputs, self.kind)
        if adapters is None or module not in adapters.modules:
            return output
        adapter_input = x
        if adapters.drops:
            adapter_input = self._dropout(x, num_inputs)
        low = self.product(adapter_input, num_inputs, adapters.rank)
        high = self.product(low, adapters.rank, num_outputs)
        output = self.sum(output, self.copy(high))
        self.tape.hold(x, low)
        return output

    def _dropout(self, x: Tensor, width: int) -> Tensor:
        """Dropout; its mask is one byte a value on CUDA, elsewhere one factor."""
        num_values = self.num_tokens * width
        mask_item_bytes = 1 if self.workload.on_cuda else self.item_bytes
        mask = self.tape.run(num_values * mask_item_bytes, gradients=())
        num_bytes = num_values * self.item_bytes
        gradients = [full_gradient(x)]
        return self.tape.run(num_bytes, x, mask, saved=[mask], gradients=gradients)

    def product(
        self,
        x: Tensor,
        num_inputs: int,
        num_outputs: int,
        kind: Kind = "weight",
        *,
        num_matrices: int = 1,
        num_rows: int = 0,
    ) -> Tensor:
        """x W^T: keeps x. Its backward makes the gradient of W first, then that of x.

        Args:
            num_matrices: so many matrices, each of which multiplies some of the rows.
            num_rows: of x; 0: the tokens.
        """
        num_rows = num_rows or self.num_tokens
        weight_bytes = num_matrices * num_inputs * num_outputs * self.item_bytes
        weight = Tensor(weight_bytes, kind=kind)
        # A single device has them in float32; FSDP gathers them in the dtype that is computed in.
        has_masters = self.degrees.is_single_device and self.item_bytes < FLOAT32
        if has_masters and kind != self.kind:
            passed_on = Gradient(tensor=weight, num_bytes=None)
            weight = self.tape.run(weight_bytes, weight, gradients=[passed_on])

        cast_bytes = 0
        index_bytes = 0
        if self.workload.multiplies_in_float8:
            cast_bytes = BYTES_OF_CAST * num_rows * max(num_inputs, num_outputs)
        # Values, and before the product an index of each two of them.
        if self.shape.in_4_bits and kind == "frozen":
            cast_bytes = weight_bytes
            index_bytes = weight_bytes * 2 // self.item_bytes
        in_bytes = num_rows * num_inputs * self.item_bytes
        out_bytes = num_rows * num_outputs * self.item_bytes
        backward_bytes = cast_bytes + max(0, index_bytes - in_bytes)
        forward_bytes = cast_bytes + max(0, index_bytes - out_bytes)

        gradients = [
            full_gradient(weight),
            Gradient(tensor=x, num_bytes=in_bytes, scratch_bytes=backward_bytes),
        ]
        return self.tape.run(
            out_bytes,
            x,
            weight,
            saved=[x, weight],
            gradients=gradients,
            scratch_bytes=forward_bytes,
        )

    def norm(self, x: Tensor, num_rows: int, width: int) -> Tensor:
        """RMSNorm. float32 inside; keeps its input and what is scaled by the weight."""
        run = self.tape.run
        num_elements = num_rows * width
        float_bytes = FLOAT32 * num_elements
        row_bytes = FLOAT32 * num_rows
        weight = Tensor(width * self.item_bytes, kind=self.kind)
        x_float = self.cast(x, num_elements, FLOAT32)
        # The backward of a square makes x, then 2x, before it multiplies by the gradient.
        square_gradient = Gradient(
            tensor=x_float, num_bytes=float_bytes, scratch_bytes=2 * float_bytes
        )
        square = run(float_bytes, x_float, saved=[x_float], gradients=[square_gradient])
        inverse = run(row_bytes, run(row_bytes, square), saves_output=True)
        scaled = run(float_bytes, x_float, inverse, saved=[x_float, inverse])
        # OLMo multiplies by the weight in float32 and rounds then, the others round first.
        traits = self.shape.traits
        if not traits.in_float32 and not traits.norms_from_zero:
            scaled = self.cast(scaled, num_elements, self.item_bytes)
        gradients = [full_gradient(scaled), full_gradient(weight)]
        weighted = run(scaled.num_bytes, weight, scaled, saved=[scaled], gradients=gradients)
        normed = self.cast(weighted, num_elements, self.item_bytes)
        self.tape.hold(x)  # the caller's
        return normed

    def sum(self, residual: Tensor, x: Tensor) -> Tensor:
        """The residual stream; both summands get the gradient of the sum unchanged."""
        summands = [residual, x]
        gradients = [Gradient(tensor=summand, num_bytes=None) for summand in summands]
        return self.tape.run(residual.num_bytes, *summands, gradients=gradients)


def full_gradient(tensor: Tensor) -> Gradient:
    """A gradient as large as its tensor."""
    return Gradient(tensor=tensor, num_bytes=tensor.num_bytes)
