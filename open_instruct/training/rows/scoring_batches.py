"""The microbatches of rows that are scored, and not learned from."""

from collections.abc import Iterator, Sequence

import torch.distributed as dist

from open_instruct.batching.steps import BatchShape, build_step_batch
from open_instruct.core.batch_values import BatchValues, RowValues
from open_instruct.core.records import Batch, StepBatch
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.parallel.status import this_process
from open_instruct.run.console import Console
from open_instruct.training.rows.sample_loader import build_ahead


def scoring_batches(
    dataset: TokenDataset,
    rows: Sequence[int],
    *,
    shape: BatchShape,
    dp_process_group: dist.ProcessGroup | None,
    console: Console,
    title: str,
    values_class: type[BatchValues] = RowValues,
) -> Iterator[Batch]:
    """This rank's microbatches of `rows`: as many on every rank, which go through them together."""
    this_process.begin(f"scoring rows ({title})")
    rank = dist.get_rank(dp_process_group)
    num_ranks = dist.get_world_size(dp_process_group)
    # Rows of like length share a step, so that padding and waiting are short.
    ordered_rows = sorted(rows, key=lambda row: -int(dataset.num_tokens[row]))
    size = shape.max_samples_per_rank * num_ranks

    def build(start: int) -> StepBatch:
        samples = [(row,) for row in ordered_rows[start : start + size]]
        return build_step_batch(
            dataset,
            samples,
            shape=shape,
            rank=rank,
            num_ranks=num_ranks,
            values_class=values_class,
        )

    with console.counting(title) as on_progress:
        for num_done, step in enumerate(
            build_ahead(build, range(0, len(ordered_rows), size)), start=1
        ):
            yield from step.microbatches
            on_progress(min(num_done * size, len(ordered_rows)), len(ordered_rows))
