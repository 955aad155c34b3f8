"""The parts that a GPU's memory is shown in: their order, their letters, and what each is."""

from __future__ import annotations

from open_instruct.parallel.wording import counted
from open_instruct.planning.memory import BUFFERS, CUDA, ENGINE, OPTIMIZER, PARAMETERS, REFERENCE, Phase
from open_instruct.planning.passes import ACTIVATIONS, GATHERED, GRADIENTS, HEAD, REDUCED, TEMPORARIES
from open_instruct.planning.plan import Plan
from open_instruct.planning.state import MASTER_BYTES, cast_copy_bytes
from open_instruct.planning.wording import GIB

# First what stays from step to step, then what comes and goes.
LETTERS = {
    PARAMETERS: "P",
    GRADIENTS: "G",
    OPTIMIZER: "O",
    REFERENCE: "R",
    ENGINE: "E",
    GATHERED: "W",
    REDUCED: "S",
    ACTIVATIONS: "A",
    HEAD: "H",
    TEMPORARIES: "T",
    BUFFERS: "B",
    CUDA: "C",
}


def unit_of(plan: Plan) -> tuple[str, int]:
    """The unit that suits a plan, by name and in bytes."""
    return ("GiB", GIB) if plan.peak.total_bytes >= GIB else ("MiB", 2**20)


def parts_of(phase: Phase, plan: Plan) -> list[tuple[str, int]]:
    """Label and bytes of what is there, in the order of `LETTERS`, but for what would read as 0.00."""
    parts, least = dict(phase.parts), 0.005 * unit_of(plan)[1]
    return [(label, parts[label]) for label in LETTERS if parts.get(label, 0) >= least]


def parts_in_any(plan: Plan) -> list[str]:
    """The labels that any phase shows, in the same order."""
    found = {label for phase in plan.phases for label, _ in parts_of(phase, plan)}
    return [label for label in LETTERS if label in found]


def meaning_of(label: str, plan: Plan) -> str:
    """What a part is, for somebody who has not met it."""
    layout, workload = plan.layout, plan.workload
    num_tokens = workload.with_full_rows().tokens_per_microbatch
    split = layout.shard_group_size * layout.tensor_parallel_degree
    share = f"this GPU's 1/{split}" if split > 1 else "all of them"
    with_copy = f" and {size} in the copy that computes" if (size := cast_copy_bytes(layout, workload)) else ""
    reference_bytes = workload.compute_bytes if layout.single_device else MASTER_BYTES
    moments = "Muon's one or AdamW's two moments" if workload.optimizer == "muon" else "AdamW's two moments"
    return {
        PARAMETERS: f"the weights that are trained, {share}, {MASTER_BYTES} bytes each{with_copy}",
        GRADIENTS: f"what the backward pass finds for each weight, {share}, {MASTER_BYTES} bytes each",
        OPTIMIZER: f"{moments} of each weight, {share}, {MASTER_BYTES} bytes a moment",
        REFERENCE: f"the weights of the policy that is compared with, {share}, {reference_bytes} bytes each",
        ENGINE: "the engine that shares this GPU: all weights, and its key-value cache",
        GATHERED: (
            f"whole weights of the block at work, put together from {counted(layout.shard_group_size, 'GPU')} in "
            f"{workload.param_dtype} and freed after it; with those of the head, and of the block that is fetched ahead"
        ),
        REDUCED: "whole gradients of the block at work, until they are summed and cut into shards",
        ACTIVATIONS: f"what the forward pass keeps of {num_tokens:,} tokens for the backward pass",
        HEAD: "scores of the whole vocabulary for each labelled token, a chunk at a time, and what they are made from",
        TEMPORARIES: "results that are needed only while an operation runs",
        BUFFERS: "tables of positions, and pieces of tensors that are being read, sent or written",
        CUDA: "an allowance for CUDA, cuBLAS and NCCL",
    }[label]
