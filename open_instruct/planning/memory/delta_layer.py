"""The memory of a layer of the gated delta rule, which stands in the place of attention.

Source: `models/delta_rule/`. The matrices are recorded one by one, all else as one operation. Its
numbers are those of plain PyTorch; on CUDA the kernel keeps less, and is counted as this.
"""

from math import prod
from typing import NamedTuple

from open_instruct.models.delta_rule.shape import CHUNK, DeltaShape
from open_instruct.planning.memory.autograd_sizes import Gradient, Tensor
from open_instruct.planning.memory.piece import FLOAT32, Piece


class ChunkBytes(NamedTuple):
    """Bytes of all chunks of a rank."""

    # What the forward pass keeps for its backward.
    kept_bytes: int
    # Scratch of the forward pass, before there is an output, and beside it.
    alone: int
    beside: int
    # Scratch of the backward pass.
    backward: int


def record_delta_rule(block: Piece, delta: DeltaShape, x: Tensor) -> Tensor:
    """Record the layer, from the normed stream to what is added to the residual stream."""
    d_model = block.shape.d_model
    item_bytes = block.item_bytes
    num_tokens = block.num_tokens
    sizes = {}
    for name, size in delta.tensors(d_model).items():
        sizes[name.removesuffix(".weight")] = size
    matrices = {name: size for name, size in sizes.items() if len(size) == 2}
    output, (_, width) = matrices.popitem()
    x = block.cast(x, num_tokens * d_model, item_bytes)
    inputs = []
    for name, (num_outputs, _) in matrices.items():
        inputs.append(block.linear(f"attention.{name}", x, d_model, block.split(num_outputs)))
    if block.kind == "weight":
        num_small = sum(prod(size) for size in sizes.values() if len(size) != 2)
        inputs.append(Tensor(block.split(num_small) * item_bytes, kind="weight"))

    chunks = _chunk_bytes(block, delta)
    # Convolutions keep what they are given and put out; the norm what it is given, its gate, and
    # more in float32.
    in_out_bytes = 2 * item_bytes * (sum(delta.widths) + width)
    value_bytes = in_out_bytes + 3 * FLOAT32 * width
    kept_tensor = Tensor(chunks.kept_bytes + block.split(num_tokens * value_bytes))
    gradients = []
    for each in inputs:
        gradient = Gradient(tensor=each, num_bytes=each.num_bytes, scratch_bytes=chunks.backward)
        gradients.append(gradient)
    width = block.split(width)
    gated = block.tape.run(
        num_tokens * width * item_bytes,
        *inputs,
        saved=[kept_tensor],
        gradients=gradients,
        scratch_bytes=chunks.alone,
    )
    block.tape.run(0, gated, gradients=(), scratch_bytes=chunks.beside)
    block.tape.hold(x)
    stream = block.linear(f"attention.{output}", gated, width, d_model)
    return block.cast(stream, block.num_rows * d_model, item_bytes)


def _chunk_bytes(block: Piece, delta: DeltaShape) -> ChunkBytes:
    """Bytes of the chunks in which the rule walks a row.

    The last chunk of a document is half full, on average. A context rank walks whole rows for its
    heads.
    """
    row_tokens = block.workload.tokens_per_microbatch
    document_tokens = min(row_tokens, block.workload.rows.length)
    num_documents = -(-row_tokens // document_tokens)
    num_chunks = -(-row_tokens // CHUNK) + num_documents // 2
    degree = block.degrees.tensor_degree * block.degrees.context_degree
    counts = delta.chunk_value_counts
    return ChunkBytes(*(FLOAT32 * num_chunks * count // degree for count in counts))
