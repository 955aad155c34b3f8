"""The plan of one global batch over ranks and microbatches, and the tensors of this rank's part.

A sample is a row of the data set, such as a preference pair (two documents) or a conversation (one
document), or a pack of several rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from open_instruct.batching.balance import Microbatches, balance_microbatches, pack_best_fit
from open_instruct.batching.documents import pack_documents
from open_instruct.batching.prefixes import (
    count_saved_tokens,
    cut_shared_prefix,
    is_worth_sharing,
    split_unshared_groups,
)
from open_instruct.config.sections import PrefixSharing
from open_instruct.core.batch_values import BatchValues, RowValues
from open_instruct.core.records import Batch, Document, StepBatch
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.data.token_dataset import TokenDataset

NO_NUMBERS = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The largest number of samples and tokens in a microbatch and in a step.

    A microbatch holds at most `max_samples_per_microbatch` samples of full length, so its token
    budget is that many samples times their documents times `max_seq_length`. Where ranks split
    rows, these must divide evenly, so they are padded to a multiple of `pad_to_multiple_of`.
    """

    documents_per_sample: int
    max_samples_per_microbatch: int
    max_microbatches: int
    max_seq_length: int
    packing: bool
    pad_to_multiple_of: int = 1
    prefix_sharing: PrefixSharing = "off"

    @property
    def max_tokens_per_microbatch(self) -> int:
        return self.documents_per_sample * self.max_samples_per_microbatch * self.max_seq_length

    @property
    def max_samples_per_rank(self) -> int:
        return self.max_samples_per_microbatch * self.max_microbatches

    def num_steps_per_epoch(self, num_samples: int, *, layout: ShardLayout) -> int:
        """Optimizer steps in which each sample comes once; the last may have fewer of them."""
        return -(-num_samples // (self.max_samples_per_rank * layout.data_parallel_world_size))


def plan_step(
    num_tokens_of_sample: Sequence[int], shape: BatchShape, *, num_ranks: int
) -> tuple[Microbatches, ...]:
    """`[rank][microbatch]`: the samples of one optimisation step, as indices within the global
    batch, ascending.

    A pure function of its arguments: every rank computes the whole plan and takes its own part.

    - Ranks: numbers of samples differ by at most one, numbers of tokens by at most the longest
      sample's.
    - Packed, a microbatch holds at most `max_tokens_per_microbatch` tokens, any number of samples.
      These must hold `max_samples_per_microbatch` of the longest sample.
    - Otherwise a microbatch holds at most `max_samples_per_microbatch` samples, of similar length.
    - The number of microbatches is the smallest that suffices for every rank, between 1 and
      `max_microbatches`; there may be at most `num_ranks` times `max_samples_per_rank` samples.
      Every rank has equally many; some may be empty. They go from many tokens to few, so that ranks
      meet in each collective after about the same work.

    Example: samples of 90, 10, 50 and 40 tokens over two ranks, two samples a microbatch::

        (((0, 1),), ((2, 3),))
    """
    most = shape.max_samples_per_microbatch
    most_tokens = shape.max_tokens_per_microbatch
    assert num_ranks >= 1 and shape.max_samples_per_rank >= 1
    assert len(num_tokens_of_sample) <= num_ranks * shape.max_samples_per_rank, "too many samples"
    longest = max(num_tokens_of_sample, default=0)
    assert not shape.packing or most_tokens >= most * longest, (
        f"{most_tokens} tokens do not hold {most} samples of {longest}"
    )

    def cut(samples: list[int]) -> list[list[int]]:
        if shape.packing:
            return pack_best_fit(samples, num_tokens_of_sample, most_tokens)
        return [samples[start : start + most] for start in range(0, len(samples), most)]

    plan = balance_microbatches(num_tokens_of_sample, num_ranks=num_ranks, cut=cut)
    assert len(plan[0]) <= shape.max_microbatches
    return plan


def build_step_batch(
    dataset: TokenDataset,
    samples: Sequence[Sequence[int]],
    *,
    shape: BatchShape,
    rank: int,
    num_ranks: int,
    reference_logps_ND: np.ndarray | None = None,
    values_class: type[BatchValues] = RowValues,
) -> StepBatch:
    """Divide `samples`, a global batch, into microbatches and `collate` those of `rank`.

    Each sample lists its rows. Every rank computes the same plan from the rows alone, so nothing is
    exchanged. The counts are of all ranks: `rows`, `labels` (tokens that are learned), `tokens`.
    """
    rows = list(chain.from_iterable(samples))
    packed_tokens = []
    for sample in samples:
        row_tokens = [num_packed_tokens(dataset, row, shape.prefix_sharing) for row in sample]
        packed_tokens.append(sum(row_tokens))
    plan = plan_step(packed_tokens, shape, num_ranks=num_ranks)
    has_numbers = len(dataset.details_C) > 0
    microbatches = []
    for microbatch in plan[rank]:
        row_ids = [*chain.from_iterable(samples[sample] for sample in microbatch)]
        row_numbers = [dataset.values(row) for row in row_ids] if has_numbers else None
        microbatches.append(
            collate(
                [dataset[row] for row in row_ids],
                row_ids,
                shape=shape,
                reference_logps_ND=reference_logps_ND,
                row_numbers=row_numbers,
                values_class=values_class,
            )
        )
    counts = {
        "rows": len(rows),
        "labels": int(dataset.num_label_tokens[rows].sum()),
        "tokens": int(dataset.num_tokens[rows].sum()),
    }
    return StepBatch(microbatches=tuple(microbatches), counts=counts)


def collate(
    rows: Sequence[tuple[Document, ...]],
    row_ids: Sequence[int],
    *,
    shape: BatchShape,
    reference_logps_ND: np.ndarray | None = None,
    row_numbers: Sequence[np.ndarray] | None = None,
    values_class: type[BatchValues] = RowValues,
) -> Batch:
    """The tensors of one microbatch of R rows: sequence d * R + r is document d of the row at r.

    Packed, all documents lie in one row, with no padding between them; the documents of a row that
    share what they begin with lie together. Without rows it is a batch of one unlabelled document.

    The values of the batch are a `values_class` of the frozen log-probs of its documents, out of
    `reference_logps_ND` (float32, those of all N rows of the data set), and of the numbers that
    came with each row.
    """
    documents = [*chain.from_iterable(zip(*rows, strict=True))]
    groups = None
    if shape.prefix_sharing != "off":
        together = [tuple(range(row, len(documents), len(rows))) for row in range(len(rows))]
        groups = split_unshared_groups(documents, together, shape.prefix_sharing)
    packed = pack_documents(
        documents,
        packing=shape.packing,
        pad_to_multiple_of=shape.pad_to_multiple_of,
        groups=groups,
    )
    reference_logps_S = None
    if reference_logps_ND is not None:
        reference_logps_S = torch.from_numpy(reference_logps_ND[list(row_ids)].T.flatten())
    numbers = None
    if row_numbers is not None:
        numbers = torch.from_numpy(np.concatenate([NO_NUMBERS, *row_numbers]))
    values = values_class.from_rows(reference_logps_S=reference_logps_S, row_numbers=numbers)
    return Batch(
        packed=packed,
        row_ids=tuple(row_ids),
        values=values,
        documents=tuple(documents),
    )


def num_packed_tokens(dataset: TokenDataset, row: int, sharing: PrefixSharing) -> int:
    """Tokens that a row's documents take when packed.

    Example: two conversations of 60 tokens with a prompt of 40 take 120 tokens, or 81 sharing their
    prompt.
    """
    num_tokens = int(dataset.num_tokens[row])
    num_documents = dataset.documents_per_row
    if sharing == "off" or num_documents == 1:
        return num_tokens
    prefix_length = cut_shared_prefix(
        dataset.num_common_tokens(row), int(dataset.prompt_lengths[row])
    )
    num_saved = count_saved_tokens(prefix_length, num_documents)
    if not is_worth_sharing(num_saved, num_tokens, sharing):
        return num_tokens
    return num_tokens - num_saved
