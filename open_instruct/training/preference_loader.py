"""Preference pairs in the order of the run, cut into global batches and this rank's microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from olmo_core.data.data_loader import DataLoaderBase

from open_instruct.config.sections import OptimSection, PreferenceDataSection
from open_instruct.data.preference_dataset import PreferenceDataset
from open_instruct.errors import InputError
from open_instruct.packing.preference_pairs import plan_step, preference_batch
from open_instruct.records import PreferenceBatch, ShardLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """How many pairs and tokens go where.

    A microbatch holds at most `max_pairs_per_microbatch` pairs of full length, so its token budget is
    that many pairs times two replies times `max_seq_length`.
    """

    max_pairs_per_microbatch: int
    max_microbatches: int
    max_seq_length: int
    packing: bool
    pad_token_id: int
    pad_to_multiple_of: int = 1

    @property
    def max_tokens_per_microbatch(self) -> int:
        return 2 * self.max_pairs_per_microbatch * self.max_seq_length

    @property
    def max_pairs_per_rank(self) -> int:
        return self.max_pairs_per_microbatch * self.max_microbatches

    @classmethod
    def of(
        cls, optim: OptimSection, data: PreferenceDataSection, layout: ShardLayout, *, pad_token_id: int
    ) -> BatchShape:
        """The shape that the flags ask for; tensor parallelism splits rows, so they must divide evenly."""
        return cls(
            max_pairs_per_microbatch=optim.per_device_train_batch_size,
            max_microbatches=optim.gradient_accumulation_steps,
            max_seq_length=data.max_seq_length,
            packing=data.packing,
            pad_token_id=pad_token_id,
            pad_to_multiple_of=layout.tensor_parallel_degree,
        )

    def num_steps(self, num_pairs: int, *, optim: OptimSection, layout: ShardLayout) -> int:
        """Optimizer steps of the whole run."""
        if optim.max_train_steps is not None:
            return optim.max_train_steps
        num_pairs_per_step = self.max_pairs_per_rank * layout.data_parallel_world_size
        return optim.num_epochs * -(-num_pairs // num_pairs_per_step)


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


def rank_step(
    dataset: PreferenceDataset,
    indices: Sequence[int],
    *,
    shape: BatchShape,
    rank: int,
    num_ranks: int,
    reference: PairLogprobs | None = None,
) -> PreferenceStep:
    """Cut the pairs `indices` (one global batch) into microbatches and build those of `rank`.

    Every rank computes the same plan from the lengths alone, so nothing is exchanged.
    """
    num_tokens = [int(dataset.num_tokens[i]) for i in indices]
    plan = plan_step(
        num_tokens,
        num_ranks=num_ranks,
        max_pairs_per_microbatch=shape.max_pairs_per_microbatch,
        max_tokens_per_microbatch=shape.max_tokens_per_microbatch,
        max_microbatches=shape.max_microbatches,
        packing=shape.packing,
    )
    return PreferenceStep(
        microbatches=tuple(
            _with_reference(
                preference_batch(
                    [dataset[indices[pair]] for pair in pairs],
                    packing=shape.packing,
                    pad_token_id=shape.pad_token_id,
                    pad_to_multiple_of=shape.pad_to_multiple_of,
                ),
                reference,
            )
            for pairs in plan.assignments[rank]
        ),
        num_pairs_global=len(indices),
        num_tokens_global=sum(num_tokens),
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


class PreferenceLoader(DataLoaderBase):
    """Shuffles by (seed, epoch) alone, so the order does not depend on ranks, microbatches or restarts.

    The last batch of an epoch is the shorter rest: every pair is seen once an epoch. `reference` holds the
    log-probs of the frozen start model for every row; None for losses that have no reference.
    """

    def __init__(
        self,
        dataset: PreferenceDataset,
        *,
        reference: PairLogprobs | None,
        shape: BatchShape,
        seed: int,
        work_dir: Path,
        dp_group: dist.ProcessGroup | None,
    ) -> None:
        dp_world_size, dp_rank = dist.get_world_size(dp_group), dist.get_rank(dp_group)
        # OLMo-core counts batches in tokens; ours are counted in pairs, and this is their upper bound.
        super().__init__(
            work_dir=work_dir,
            global_batch_size=shape.max_tokens_per_microbatch * shape.max_microbatches * dp_world_size,
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
        )
        self.dataset = dataset
        self.reference = reference
        self.shape = shape
        self.seed = seed
        self.num_pairs_per_step = shape.max_pairs_per_rank * dp_world_size
        self._order: np.ndarray | None = None

    @property
    def total_batches(self) -> int:
        return -(-len(self.dataset) // self.num_pairs_per_step)

    def reshuffle(self, epoch: int | None = None, **kwargs: Any) -> None:
        del kwargs
        self._epoch = epoch if epoch is not None else (self._epoch or 0) + 1
        self._order = np.random.default_rng([self.seed, self._epoch]).permutation(len(self.dataset))

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        assert self._order is not None, "reshuffle() comes before iteration"
        for batch in range(self.batches_processed, self.total_batches):
            start = batch * self.num_pairs_per_step
            indices = self._order[start : start + self.num_pairs_per_step].tolist()
            yield {
                "step": rank_step(
                    self.dataset,
                    indices,
                    shape=self.shape,
                    rank=self.dp_rank,
                    num_ranks=self.dp_world_size,
                    reference=self.reference,
                )
            }

    def get_mock_batch(self) -> dict[str, Any]:
        # The trainer's dry run is skipped: it would enter the gradient and random state of a bitwise run.
        raise NotImplementedError

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        return batch["step"].num_tokens_global

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "batches_processed": self.batches_processed,
            "num_pairs_per_step": self.num_pairs_per_step,
            "data_fingerprint": self.dataset.fingerprint,
            "seed": self.seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for key, ours, remedy in (
            ("data_fingerprint", self.dataset.fingerprint, "give the same data, template and --max_seq_length"),
            ("seed", self.seed, f"give --seed {state_dict['seed']}"),
            (
                "num_pairs_per_step",
                self.num_pairs_per_step,
                "choose --per_device_train_batch_size and --gradient_accumulation_steps so that their product "
                f"times {self.dp_world_size} data-parallel ranks is {state_dict['num_pairs_per_step']}",
            ),
        ):
            if state_dict[key] != ours:
                raise InputError(
                    f"the checkpoint was written with {key} {state_dict[key]}, this run has {ours}: {remedy}, "
                    "or start afresh with another --output_dir or --overwrite_output_dir"
                )
        self._epoch = state_dict["epoch"]
        self.batches_processed = state_dict["batches_processed"]
