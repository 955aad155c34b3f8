"""The memory that one block and the head keep and need temporarily, profiled once for each kind.

`block.py` and `head.py` record their operations one by one; `autograd_sizes.py` runs them.
"""

from functools import lru_cache

from open_instruct.core.shard_layout import ShardLayout
from open_instruct.planning.memory.autograd_sizes import Profile
from open_instruct.planning.memory.block import Block
from open_instruct.planning.memory.head import Head
from open_instruct.planning.memory.piece import PieceSplit
from open_instruct.planning.subject.model import LayerShape, ModelShape
from open_instruct.planning.subject.workload import Workload


def profile_piece(
    kind: LayerShape | None,
    shape: ModelShape,
    layout: ShardLayout,
    workload: Workload,
    *,
    splits_rows: bool,
) -> Profile:
    """Profile one block, or the last norm and the head up to the labels' log-probs.

    Args:
        kind: of the block; None: the head.
        workload: of one microbatch, whose rows are taken to be full; a context degree splits its
            tokens.
        splits_rows: tensor ranks have a part of the tokens each between the matrices that they
            split.
    """
    degrees = PieceSplit(
        tensor_degree=layout.tensor_parallel_degree,
        context_degree=layout.context_parallel_degree,
        expert_degree=layout.expert_parallel_degree,
        is_single_device=layout.single_device,
    )
    return _run_piece(kind, shape, degrees, workload.with_full_rows(), splits_rows)


@lru_cache(maxsize=512)
def _run_piece(
    kind: LayerShape | None,
    shape: ModelShape,
    degrees: PieceSplit,
    workload: Workload,
    splits_rows: bool,
) -> Profile:
    piece: Block | Head
    if kind is None:
        piece = Head(shape, degrees, workload, splits_rows)
    else:
        piece = Block(kind, shape, degrees, workload, splits_rows)
    return piece.tape.profile(piece.record())


def clear_profiles() -> None:
    """Drop all cached profiles: a test that changes a limit of a kernel calls this."""
    _run_piece.cache_clear()
