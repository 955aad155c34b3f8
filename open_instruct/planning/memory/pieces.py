"""What one block and the head are recorded with: the sizes of a microbatch, and the operations that they share."""

from contextlib import AbstractContextManager

from open_instruct.planning.memory.autograd_sizes import Gradient, Kind, Tape, Tensor
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.workload import Workload, is_wrapped
from open_instruct.shard_layout import ShardLayout

FLOAT32 = 4

# A cast to float8 has two float32 copies beside the result: what torchao's `_ToFloat8ConstrFunc` makes, uncompiled.
BYTES_OF_CAST = 2 * FLOAT32 + 1


class Piece:
    """Operations shared by a block and the head, recorded on a tape."""

    def __init__(self, shape: ModelShape, layout: ShardLayout, workload: Workload, splits_rows: bool) -> None:
        self.shape, self.layout, self.workload, self.c = shape, layout, workload, workload.compute_bytes
        self.kind: Kind = "weight" if shape.adapters is None else "frozen"  # of the model's own parameters
        self.num_tokens = -(-workload.tokens_per_microbatch // layout.context_parallel_degree)
        self.num_rows = self.split(self.num_tokens) if splits_rows else self.num_tokens  # tokens between matrices
        self.tape = Tape(Tensor(self.num_rows * shape.d_model * self.c, kind="source"))

    def split(self, count: int) -> int:
        """A tensor rank's share of `count`."""
        return -(-count // self.layout.tensor_parallel_degree)

    def recomputed(self, module: str) -> AbstractContextManager[None]:
        """Within runs a module of the block, which may be checkpointed; "" is the block itself. All are alike."""
        return self.tape.recomputed(is_wrapped(self.workload.recomputed_modules, 0, module))

    def cast(self, tensor: Tensor, num_elements: int, to_bytes: int) -> Tensor:
        """A copy of `num_elements` in another dtype; the tensor itself if it has that size."""
        num_bytes = num_elements * to_bytes
        return tensor if tensor.num_bytes == num_bytes else self.tape.run(num_bytes, tensor)

    def linear(self, module: str, x: Tensor, num_inputs: int, num_outputs: int) -> Tensor:
        """The output of a matrix of the block for all tokens, with that of its adapter."""
        adapters, num_tokens = self.shape.adapters, self.num_tokens
        given = x
        output = self.product(x, num_inputs, num_outputs, self.kind)
        if adapters is None or module not in adapters.modules:
            return output
        if adapters.drops:
            # Dropout's mask is one byte a value on CUDA, elsewhere one factor.
            mask = self.tape.run(num_tokens * num_inputs * (1 if self.workload.on_cuda else self.c), gradients=())
            x = self.tape.run(num_tokens * num_inputs * self.c, x, mask, saved=[mask], gradients=[whole(x)])
        low = self.product(x, num_inputs, adapters.rank)
        added = self.product(low, adapters.rank, num_outputs)
        output = self.sum(output, self.tape.run(added.num_bytes, added))
        self.tape.hold(given, low)
        return output

    def product(
        self, x: Tensor, num_inputs: int, num_outputs: int, kind: Kind = "weight", *, of: int = 1, num_rows: int = 0
    ) -> Tensor:
        """x W^T: keeps x. Its backward makes the gradient of W first, then that of x.

        :param of: so many matrices, each of which multiplies some of the rows.
        """
        num_tokens = num_rows or self.num_tokens
        weight = Tensor(of * num_inputs * num_outputs * self.c, kind=kind)
        # A single device has them in float32; FSDP gathers them in the dtype that is computed in.
        if self.layout.single_device and self.c < FLOAT32 and kind != self.kind:
            weight = self.tape.run(weight.num_bytes, weight, gradients=[Gradient(of=weight, num_bytes=None)])
        in_bytes, out_bytes = (num_tokens * size * self.c for size in (num_inputs, num_outputs))
        num_cast = num_tokens * max(num_inputs, num_outputs) if self.workload.multiplies_in_float8 else 0
        cast_bytes = BYTES_OF_CAST * num_cast
        gradients = [whole(weight), Gradient(of=x, num_bytes=in_bytes, scratch_bytes=cast_bytes)]
        saved = [x, weight]
        return self.tape.run(out_bytes, x, weight, saved=saved, gradients=gradients, scratch_bytes=cast_bytes)

    def norm(self, x: Tensor, num_rows: int, width: int) -> Tensor:
        """RMSNorm. float32 inside; keeps its input and what is scaled by the weight."""
        run = self.tape.run
        elements = num_rows * width
        float_bytes = FLOAT32 * elements
        row_bytes = FLOAT32 * num_rows
        weight = Tensor(width * self.c, kind=self.kind)
        x_float = self.cast(x, elements, FLOAT32)
        # The backward of a square makes x, then 2x, before it multiplies by the gradient.
        square_gradient = Gradient(of=x_float, num_bytes=float_bytes, scratch_bytes=2 * float_bytes)
        square = run(float_bytes, x_float, saved=[x_float], gradients=[square_gradient])
        inverse = run(row_bytes, run(row_bytes, square), saves_output=True)
        scaled = run(float_bytes, x_float, inverse, saved=[x_float, inverse])
        # OLMo multiplies by the weight in float32 and rounds then, the others round first.
        if not (self.shape.traits.in_float32 or self.shape.traits.norms_from_zero):
            scaled = self.cast(scaled, elements, self.c)
        weighted = run(scaled.num_bytes, weight, scaled, saved=[scaled], gradients=[whole(scaled), whole(weight)])
        normed = self.cast(weighted, elements, self.c)
        self.tape.hold(x)  # the caller's
        return normed

    def sum(self, residual: Tensor, x: Tensor) -> Tensor:
        """The residual stream; both summands get the gradient of the sum unchanged."""
        handed_on = [Gradient(of=tensor, num_bytes=None) for tensor in (residual, x)]
        return self.tape.run(residual.num_bytes, residual, x, gradients=handed_on)


def whole(tensor: Tensor) -> Gradient:
    return Gradient(of=tensor, num_bytes=tensor.num_bytes)
