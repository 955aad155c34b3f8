"""Samples in the order of the run, cut into global batches, of which each rank builds its own part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from olmo_core.data.data_loader import DataLoaderBase

from open_instruct.data.saved_place import check_saved_place
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.packing.steps import BatchShape, step_batch


class SampleLoader(DataLoaderBase):
    """Shuffles by (seed, epoch) alone, so the order does not depend on ranks, microbatches or restarts.

    The last batch of an epoch is the shorter rest: every sample is seen once an epoch. `scores` are frozen values of
    the samples that the loss is given; see `collate`.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        scores: Mapping[str, np.ndarray] | None = None,
        shape: BatchShape,
        seed: int,
        work_dir: Path,
        dp_group: dist.ProcessGroup | None,
    ) -> None:
        dp_world_size, dp_rank = dist.get_world_size(dp_group), dist.get_rank(dp_group)
        # OLMo-core counts batches in tokens; ours are counted in samples, and this is their upper bound.
        super().__init__(
            work_dir=work_dir,
            global_batch_size=shape.max_tokens_per_microbatch * shape.max_microbatches * dp_world_size,
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
        )
        self.dataset = dataset
        self.scores = scores
        self.shape = shape
        self.seed = seed
        self.num_samples_per_step = shape.max_samples_per_rank * dp_world_size
        self._order: np.ndarray | None = None

    @property
    def total_batches(self) -> int:
        return -(-len(self.dataset) // self.num_samples_per_step)

    def reshuffle(self, epoch: int | None = None, **kwargs: Any) -> None:
        del kwargs
        self._epoch = epoch if epoch is not None else (self._epoch or 0) + 1
        self._order = np.random.default_rng([self.seed, self._epoch]).permutation(len(self.dataset))

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        assert self._order is not None, "reshuffle() comes before iteration"
        for batch in range(self.batches_processed, self.total_batches):
            start = batch * self.num_samples_per_step
            indices = self._order[start : start + self.num_samples_per_step].tolist()
            yield {
                "step": step_batch(
                    self.dataset,
                    indices,
                    shape=self.shape,
                    rank=self.dp_rank,
                    num_ranks=self.dp_world_size,
                    scores=self.scores,
                )
            }

    def get_mock_batch(self) -> dict[str, Any]:
        # The trainer's dry run is skipped: it would enter the gradient and random state of a bitwise run.
        raise NotImplementedError

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        return batch["step"].counts["tokens"]

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "batches_processed": self.batches_processed,
            "num_samples_per_step": self.num_samples_per_step,
            "data_fingerprint": self.dataset.fingerprint,
            "seed": self.seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_saved_place(
            state_dict,
            ("data_fingerprint", self.dataset.fingerprint, "give the same data, template and --max_seq_length"),
            ("seed", self.seed, f"give --seed {state_dict['seed']}"),
            (
                "num_samples_per_step",
                self.num_samples_per_step,
                "choose --per_device_train_batch_size and --gradient_accumulation_steps so that their product "
                f"times {self.dp_world_size} data-parallel ranks is {state_dict['num_samples_per_step']}",
            ),
        )
        self._epoch = state_dict["epoch"]
        self.batches_processed = state_dict["batches_processed"]
