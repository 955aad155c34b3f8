"""What Muon exchanges to orthogonalise the momentum of matrices that FSDP has cut by rows.

Source: `torch.optim._muon`, five Newton-Schulz steps in bfloat16, X <- a X + (b X X^T + c (X X^T)^2) X, on DTensors.
A matrix with more rows than columns is transposed first, so that X X^T is the smaller product.

For a wide X each rank makes its rows of X X^T, for which it gathers X, then their product with the gathered X X^T, and
for the last product gathers X once more. A tall matrix is transposed, so cut by columns: X X^T is a sum over ranks,
taken twice. That is what DTensor does on one axis, call for call. With replicas or tensor ranks it finds other ways
for some products, by its own estimate of their cost: there these numbers are an estimate too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from open_instruct.planning.memory.state import tensor_local_shape, uses_muon
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.workload import Workload
from open_instruct.planning.traffic.collectives import Exchange, exchange_in
from open_instruct.records import ShardLayout

NUM_STEPS = 5
NUMBER_BYTES = 2


def muon_exchanges(shape: ModelShape, layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    """Of all updates of a step; none where nothing is sharded, or another optimizer is used."""
    degree = layout.shard_group_size
    matrices = Counter(
        tensor_local_shape(parameter, layout.tensor_parallel_degree, 0)
        for parameter in shape.parameters
        if uses_muon(parameter, workload)
    )
    if degree == 1 or not matrices:
        return
    num_matrices = matrices.total() * workload.num_updates
    yield exchange_in(layout, "shard", "Muon, norms of momenta", "all_reduce", NUMBER_BYTES, num_matrices)
    for (rows, columns), count in matrices.items():
        num_steps = NUM_STEPS * count * workload.num_updates
        if rows > columns:
            square = columns * columns * NUMBER_BYTES
            yield exchange_in(layout, "shard", "Muon, products of momenta", "all_reduce", square, 2 * num_steps)
            continue
        padded_rows = -(-rows // degree) * degree
        whole, square = padded_rows * columns * NUMBER_BYTES, padded_rows * rows * NUMBER_BYTES
        yield exchange_in(layout, "shard", "Muon, momenta", "all_gather", whole, 2 * num_steps)
        yield exchange_in(layout, "shard", "Muon, products of momenta", "all_gather", square, num_steps)
