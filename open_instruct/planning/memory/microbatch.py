"""The sizes of one microbatch on one rank, which decide what a block and the head keep of it."""

from dataclasses import dataclass

from open_instruct.planning.memory.state import MASTER_BYTES
from open_instruct.planning.subject.workload import Workload
from open_instruct.shard_layout import ShardLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The sizes of one microbatch on one rank, and the modules that are recomputed."""

    num_tokens: int
    num_rows: int  # tokens between tensor-parallel matrices; each tensor rank has a part of them
    longest_document: int
    num_labels: int
    compute_bytes: int
    on_cuda: bool
    tensor_degree: int
    recomputed_modules: tuple[str, ...]
    casts_adapters: bool = False  # they are float32, and copied to the dtype that is computed in
    expert_degree: int = 1  # of ranks that split experts
    temperature: float = 1.0
    records_entropy: bool = False
    multiplies_in_float8: bool = False  # matrices of blocks
    num_gathered_keys: int | None = None  # with those of a shared prefix before each document; None: nothing is shared


def pass_of(layout: ShardLayout, workload: Workload, *, splits_rows: bool = True) -> Pass:
    """The sizes of one microbatch of `workload`, whose rows are taken to be full; a context degree splits its tokens.

    Between matrices that tensor ranks split, they may have a part of the tokens each.
    """
    workload, tensor_degree = workload.with_full_rows(), layout.tensor_parallel_degree
    num_tokens = -(-workload.tokens_per_microbatch // layout.context_parallel_degree)
    some = {"none": (), "selected_modules": workload.checkpointing_modules}
    num_labels = -(-workload.label_tokens_per_microbatch // layout.context_parallel_degree)
    num_rows = -(-num_tokens // tensor_degree) if splits_rows else num_tokens
    return Pass(
        num_tokens=num_tokens,
        num_rows=num_rows,
        longest_document=min(num_tokens, workload.longest_sequence),
        # Where tokens are split the head runs at every position.
        num_labels=num_labels if num_rows == num_tokens else num_rows,
        compute_bytes=workload.compute_bytes,
        on_cuda=workload.on_cuda,
        tensor_degree=tensor_degree,
        recomputed_modules=some.get(workload.checkpointing, ("blocks.*",)),
        # FSDP gathers them in the dtype that is computed in.
        casts_adapters=layout.single_device and workload.compute_bytes < MASTER_BYTES,
        expert_degree=layout.expert_parallel_degree,
        temperature=workload.temperature,
        records_entropy=workload.records_entropy,
        multiplies_in_float8=workload.multiplies_in_float8,
        num_gathered_keys=_gathered_keys(layout, workload),
    )


def _gathered_keys(layout: ShardLayout, workload: Workload) -> int | None:
    """Keys of a row with those of a shared prefix before each of its documents but the first, which follows it.

    None where none is shared.
    """
    if not workload.shared_prefix_tokens:
        return None
    num_documents = workload.documents_per_group
    keys_of_group = num_documents * workload.longest_sequence
    num_keys = workload.tokens_per_microbatch * keys_of_group // workload.rows.tokens_of(num_documents)
    return -(-num_keys // layout.context_parallel_degree)
