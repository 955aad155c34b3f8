"""One global batch of preference pairs as one rank's tensors, with the reference log-probs of its pairs.

Legend: N rows of the data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from open_instruct.data.preference_dataset import PreferenceDataset
from open_instruct.packing.preference_pairs import num_packed_tokens, preference_batch
from open_instruct.records import PreferenceBatch
from open_instruct.training.sample_loader import BatchShape, samples_of_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceStep:
    """This rank's microbatches of one global batch, and the denominators that every rank agrees on."""

    microbatches: tuple[PreferenceBatch, ...]
    num_pairs_global: int
    num_tokens_global: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLogprobs:
    """Log-probs of every row of a data set: sums over the reply, float32, one entry a row (N rows)."""

    chosen_N: np.ndarray
    rejected_N: np.ndarray

    @classmethod
    def of(cls, values_N2: np.ndarray) -> PairLogprobs:
        """From an array of two columns: chosen, rejected."""
        return cls(chosen_N=values_N2[:, 0].copy(), rejected_N=values_N2[:, 1].copy())


def preference_step(
    dataset: PreferenceDataset,
    indices: Sequence[int],
    *,
    shape: BatchShape,
    rank: int,
    num_ranks: int,
    reference: PairLogprobs | None = None,
) -> PreferenceStep:
    """Cut the pairs `indices` (one global batch) into microbatches and build those of `rank`.

    `reference` holds the log-probs of the frozen start model for every row; None for losses that have no reference.
    """
    row_tokens = dataset.num_tokens[list(indices)].tolist()
    prompt_tokens = dataset.prompt_lengths[list(indices)].tolist()
    num_tokens = [
        num_packed_tokens(*tokens, shape.prefix_sharing) for tokens in zip(row_tokens, prompt_tokens, strict=True)
    ]
    return PreferenceStep(
        microbatches=tuple(
            _with_reference(
                preference_batch(
                    [dataset[pair] for pair in pairs],
                    packing=shape.packing,
                    pad_token_id=shape.pad_token_id,
                    pad_to_multiple_of=shape.pad_to_multiple_of,
                    prefix_sharing=shape.prefix_sharing,
                ),
                reference,
            )
            for pairs in samples_of_rank(indices, num_tokens, shape=shape, rank=rank, num_ranks=num_ranks)
        ),
        num_pairs_global=len(indices),
        num_tokens_global=sum(row_tokens),
    )


def _with_reference(batch: PreferenceBatch, reference: PairLogprobs | None) -> PreferenceBatch:
    if reference is None:
        return batch
    rows = list(batch.row_ids)
    return replace(
        batch,
        reference_chosen_logps_P=torch.from_numpy(reference.chosen_N[rows]),
        reference_rejected_logps_P=torch.from_numpy(reference.rejected_N[rows]),
    )
