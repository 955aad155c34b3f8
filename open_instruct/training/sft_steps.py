"""One global batch of conversations as one rank's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from open_instruct.data.sft_dataset import SFTDataset
from open_instruct.packing.documents import lay_out
from open_instruct.records import SFTBatch
from open_instruct.training.sample_loader import BatchShape, samples_of_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTStep:
    """This rank's microbatches of one global batch, and the counts over all ranks.

    `num_label_tokens_global`, the tokens that are learned, is the denominator of the loss.
    """

    microbatches: tuple[SFTBatch, ...]
    num_label_tokens_global: int
    num_tokens_global: int


def sft_step(dataset: SFTDataset, indices: Sequence[int], *, shape: BatchShape, rank: int, num_ranks: int) -> SFTStep:
    """Cut the conversations `indices` (one global batch) into microbatches and build those of `rank`."""
    rows = list(indices)
    num_tokens = dataset.num_tokens[rows].tolist()
    return SFTStep(
        microbatches=tuple(
            SFTBatch(
                packed=lay_out(
                    [dataset[row] for row in of_microbatch],
                    packing=shape.packing,
                    pad_token_id=shape.pad_token_id,
                    pad_to_multiple_of=shape.pad_to_multiple_of,
                ),
                row_ids=tuple(of_microbatch),
            )
            for of_microbatch in samples_of_rank(rows, num_tokens, shape=shape, rank=rank, num_ranks=num_ranks)
        ),
        num_label_tokens_global=int(dataset.num_label_tokens[rows].sum()),
        num_tokens_global=sum(num_tokens),
    )
