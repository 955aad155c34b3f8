"""Samples in the order of the run, cut into global batches, of which each rank builds its own part.

The host builds the next batch in a thread while the device is busy.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from open_instruct.batching.steps import BatchShape, build_step_batch
from open_instruct.core.batch_values import BatchValues, RowValues
from open_instruct.core.records import StepBatch
from open_instruct.data.saved_place import (
    PlaceFact,
    check_saved_place,
    make_rows_fact,
    make_seed_fact,
)
from open_instruct.data.token_dataset import TokenDataset

T = TypeVar("T")
V = TypeVar("V")


@dataclass(eq=False)
class SampleLoader:
    """The steps of an epoch, which each data-parallel rank builds its own part of.

    Rows are shuffled by (seed, epoch) alone, so the order does not depend on ranks, microbatches or
    restarts. The last batch of an epoch is the shorter rest, and each of `samples` (rows that stay
    together) comes once an epoch. `reference_logps_ND` and `values_class` are explained at
    `collate`.
    """

    dataset: TokenDataset
    samples: Sequence[Sequence[int]]
    _: KW_ONLY
    reference_logps_ND: np.ndarray | None = None
    values_class: type[BatchValues] = RowValues
    shape: BatchShape
    seed: int
    dp_group: dist.ProcessGroup | None
    epoch: int = field(default=1, init=False)
    batches_processed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.dp_world_size = dist.get_world_size(self.dp_group)
        self.dp_rank = dist.get_rank(self.dp_group)
        self.num_samples_per_step = self.shape.max_samples_per_rank * self.dp_world_size

    def rest_of_epoch(self) -> Iterator[StepBatch]:
        """The steps left in the epoch; `state_dict` counts every step given out so far as taken."""
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.samples))

        size = self.num_samples_per_step

        def build(start: int) -> StepBatch:
            indices = order[start : start + size].tolist()
            return build_step_batch(
                self.dataset,
                [self.samples[index] for index in indices],
                shape=self.shape,
                rank=self.dp_rank,
                num_ranks=self.dp_world_size,
                reference_logps_ND=self.reference_logps_ND,
                values_class=self.values_class,
            )

        starts = range(self.batches_processed * size, len(self.samples), size)
        # A step that the thread has built ahead is not given out yet, so a checkpoint does not
        # count it.
        for step in build_ahead(build, starts):
            self.batches_processed += 1
            yield step

    def begin_next_epoch(self) -> None:
        self.epoch += 1
        self.batches_processed = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "batches_processed": self.batches_processed,
            "num_samples_per_step": self.num_samples_per_step,
            "data_fingerprint": self.dataset.fingerprint,
            "seed": self.seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_place_of_samples(
            state_dict, self.dataset, seed=self.seed, shape=self.shape, num_ranks=self.dp_world_size
        )
        self.epoch = state_dict["epoch"]
        self.batches_processed = state_dict["batches_processed"]


def check_place_of_samples(
    saved: Mapping[str, Any],
    dataset: TokenDataset,
    *,
    seed: int,
    shape: BatchShape,
    num_ranks: int,
) -> None:
    """Refuse a saved `SampleLoader.state_dict` if `num_ranks` would take other rows from there on.

    :raises InputError: rows, seed or the number of rows in a step are others.
    """
    num_now = shape.max_samples_per_rank * num_ranks
    num_before = saved.get("num_samples_per_step")
    size_fact = PlaceFact(
        key="num_samples_per_step",
        value=num_now,
        flag="gradient_accumulation_steps",
        problem=(
            f"the checkpoint was written with {num_before} samples in a step, this run has "
            f"{num_now}"
        ),
        remedy=(
            "choose --per_device_train_batch_size and --gradient_accumulation_steps so that "
            f"their product times {num_ranks} data-parallel ranks is {num_before}"
        ),
    )
    check_saved_place(
        saved,
        make_rows_fact(dataset.fingerprint, flag="mixer_list", limit="--max_seq_length"),
        make_seed_fact(saved, seed),
        size_fact,
    )


def build_ahead(build: Callable[[T], V], items: Iterable[T]) -> Generator[V]:
    """Build each of `items` in order; a thread builds the next one while the caller is busy.

    It builds no more than that one. An error of `build` is raised when its result is asked for.
    Closing the iterator early waits for the thread.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="built-ahead") as thread:
        ready: Future[V] | None = None
        for item in items:
            following = thread.submit(build, item)
            if ready is not None:
                yield ready.result()
            ready = following
        if ready is not None:
            yield ready.result()
