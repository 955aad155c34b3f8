"""The memory of a feed-forward of experts, operation by operation.

Source: `models/experts/routed.py`: tokens, each as often as it has experts, are sorted by these.
"""

from open_instruct.planning.memory.autograd_sizes import Tensor
from open_instruct.planning.memory.piece import FLOAT32, Piece, full_gradient


def record_experts(
    block: Piece,
    x: Tensor,
    *,
    num_experts: int,
    width: int,
) -> Tensor:
    """Record the router, the experts, and the sum of what a token's experts put out.

    Args:
        width: features of one expert.
    """
    shape = block.shape
    run = block.tape.run
    is_split = block.degrees.expert_degree > 1
    num_local = num_experts // block.degrees.expert_degree
    num_pairs = block.num_tokens * shape.experts_per_token

    logits, weights = _route(block, x, num_experts, num_pairs)
    sorted_by = block.index(num_pairs)
    order = block.index(num_pairs)
    back = block.index(num_pairs)
    repeated_bytes = num_pairs * shape.d_model * block.item_bytes
    repeated = run(repeated_bytes, x, gradients=[full_gradient(x)])
    sent = block.copy(repeated, order)
    received = sent
    if is_split:  # rows arrive, as many as were sent, and are put in another order
        order_there = block.index(num_pairs)
        back_there = block.index(num_pairs)
        arrived = block.copy(sent)
        received = block.copy(arrived, order_there)

    def multiply_experts(rows: Tensor, num_inputs: int, num_outputs: int) -> Tensor:
        return block.product(
            rows,
            num_inputs,
            num_outputs,
            block.kind,
            num_matrices=num_local,
            num_rows=num_pairs,
        )

    gate = multiply_experts(received, shape.d_model, width)
    up = multiply_experts(received, shape.d_model, width)
    active = block.copy(gate, gate)
    product = block.multiply(active, up)
    block.tape.hold(gate, up)
    by_expert = multiply_experts(product, width, shape.d_model)
    if is_split:
        block.tape.hold(received)
        returned = block.copy(by_expert, back_there)
        by_expert = block.copy(returned)
        block.tape.hold(arrived)
    by_token = block.copy(by_expert, back)
    block.tape.hold(x, sent, by_expert, sorted_by, logits)
    factors = [weights, by_token]
    gradients = [full_gradient(factor) for factor in factors]
    output_bytes = block.num_tokens * shape.d_model * block.item_bytes
    return run(output_bytes, *factors, saved=factors, gradients=gradients)


def _route(
    block: Piece,
    x: Tensor,
    num_experts: int,
    num_pairs: int,
) -> tuple[Tensor, Tensor]:
    """The router's logits, and the weight of each pair of a token and its expert."""
    run = block.tape.run
    num_logits = block.num_tokens * num_experts
    logits = block.product(x, block.shape.d_model, num_experts, block.kind)
    float_logits = block.cast(logits, num_logits, FLOAT32)
    probs = run(num_logits * FLOAT32, float_logits, saves_output=True)
    chosen = block.index(num_pairs)
    gradients = [full_gradient(probs)]
    weights = run(num_pairs * FLOAT32, probs, saved=[chosen], gradients=gradients)
    scaled = block.copy(weights, weights)
    return logits, block.cast(scaled, num_pairs, block.item_bytes)
