"""Muon's exchanges, by which one rank gets the whole momentum of a matrix to orthogonalise it.

Source: `learner/optim/muon.py`. The ranks that hold one copy of the matrices take as many at a time as they are,
the largest first, and give each rank one of them, in bfloat16; then it gives them their parts back. Replicas do the
same beside them. With tensor parallelism calls are of the group of all ranks, where other copies are sent nothing.
"""

from collections import Counter
from collections.abc import Iterator

from open_instruct.planning.memory.state import local_size, uses_muon
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.workload import Workload
from open_instruct.planning.traffic.collectives import Axis, Exchange, exchange_in
from open_instruct.shard_layout import ShardLayout

NUMBER_BYTES = 2


def muon_exchanges(shape: ModelShape, layout: ShardLayout, workload: Workload) -> Iterator[Exchange]:
    """Muon's exchanges in all updates of a step."""
    matrices = [each for each in shape.parameters if uses_muon(each, workload)]
    matrices.sort(key=lambda matrix: -matrix.num_params)
    num_owners, calls = layout.shard_group_size * layout.tensor_parallel_degree, Counter[int]()
    for first in range(0, len(matrices), num_owners):
        given = sum(local_size(each, layout).own for each in matrices[first : first + num_owners])
        calls.update([given, matrices[first].num_params])
    axis: Axis = "all" if layout.tensor_parallel_degree > 1 else "shard"
    what, times = "momenta of Muon, orthogonalised", workload.num_updates
    for size, count in calls.items():
        yield exchange_in(layout, axis, what, "all_to_all", NUMBER_BYTES * size, times * count, num_owners)
