"""The memory that a layer of the gated delta rule keeps and needs, in the place of a block's attention.

Source: `models/delta_rule/mixer.py`; its operations around the rule are recorded one by one, the rule is not.
"""

from open_instruct.models.delta_rule.shape import CHUNK, DeltaShape
from open_instruct.planning.memory.autograd_sizes import Gradient, Tensor
from open_instruct.planning.memory.pieces import FLOAT32, Piece, whole


def delta_layer(piece: Piece, shape: DeltaShape, x: Tensor) -> Tensor:
    """The output of the layer for x."""
    d_model, num_tokens = piece.shape.d_model, piece.num_tokens
    values = shape.widths[-1]
    convolved = []
    for part, width in shape.parts.items():
        projected = piece.linear(f"attention.w_{part}", x, d_model, width)
        weight = Tensor(width * shape.kernel * piece.c, kind=piece.kind)
        laid_out = piece.tape.run(projected.num_bytes, piece.tape.run(projected.num_bytes, projected))
        saved, gradients = [laid_out, weight], [whole(laid_out), whole(weight)]
        given = piece.tape.run(laid_out.num_bytes, laid_out, weight, saved=saved, gradients=gradients)
        given = piece.tape.run(given.num_bytes, given)
        convolved.append(piece.tape.run(given.num_bytes, given, saved=[given]))
    heads = [piece.linear(f"attention.w_{one}", x, d_model, shape.value_heads) for one in "ba"]
    weights = [Tensor(shape.value_heads * piece.c, kind=piece.kind) for _ in range(2)]
    read = _rule(piece, shape, [*convolved, *heads, *weights])
    gate = piece.linear("attention.w_g", x, d_model, values)
    norm = Tensor(shape.value_dim * piece.c, kind=piece.kind)
    # What is normalised, by what, and the gate, in float32.
    inner = Tensor(3 * num_tokens * values * FLOAT32)
    gradients = [whole(read), whole(gate), whole(norm)]
    gated = piece.tape.run(read.num_bytes, read, gate, norm, saved=[inner, gate, read], gradients=gradients)
    piece.tape.hold(x)
    return piece.linear(f"attention.{shape.output}", gated, values, d_model)


def _rule(piece: Piece, shape: DeltaShape, inputs: list[Tensor]) -> Tensor:
    """The rule by chunks, as a whole: what it keeps and needs is a fit to what was measured, to about a tenth.

    A kernel on CUDA keeps less, and is counted as this.
    """
    heads, keys, values = shape.value_heads, shape.key_dim, shape.value_dim
    longest_document = min(piece.num_tokens, piece.workload.longest_sequence)
    num_chunks = -(-longest_document // CHUNK) * -(-piece.num_tokens // longest_document)
    per_chunk = CHUNK * (10 * keys + 2 * values + 6 * CHUNK) + keys * (2 * values + 5 * keys)
    per_number = num_chunks * heads * FLOAT32
    kept = piece.tape.run(per_number * per_chunk, *inputs)
    forward_bytes, backward_bytes = (per_number * CHUNK * each for each in (4 * (keys + values), 3 * values + CHUNK))
    gradients = [Gradient(of=kept, num_bytes=backward_bytes)]
    num_bytes = piece.num_tokens * shape.widths[-1] * piece.c
    return piece.tape.run(num_bytes, kept, saved=[kept], gradients=gradients, scratch_bytes=forward_bytes)
