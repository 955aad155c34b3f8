"""Samples in the order of the run, cut into global batches and this rank's microbatches.

A sample is what a row of the data set became: a preference pair (two documents) or a conversation (one).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from olmo_core.data.data_loader import DataLoaderBase

from open_instruct.config.sections import DataSection, OptimSection, PrefixSharing
from open_instruct.data.saved_place import check_saved_place
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.packing.steps import plan_step
from open_instruct.records import ShardLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """How many samples and tokens go where.

    A microbatch holds at most `max_samples_per_microbatch` samples of full length, so its token budget is that many
    samples times their documents times `max_seq_length`.
    """

    documents_per_sample: int
    max_samples_per_microbatch: int
    max_microbatches: int
    max_seq_length: int
    packing: bool
    pad_token_id: int
    pad_to_multiple_of: int = 1
    prefix_sharing: PrefixSharing = "off"

    @property
    def max_tokens_per_microbatch(self) -> int:
        return self.documents_per_sample * self.max_samples_per_microbatch * self.max_seq_length

    @property
    def max_samples_per_rank(self) -> int:
        return self.max_samples_per_microbatch * self.max_microbatches

    @classmethod
    def of(
        cls,
        optim: OptimSection,
        data: DataSection,
        layout: ShardLayout,
        *,
        documents_per_sample: int,
        pad_token_id: int,
        prefix_sharing: PrefixSharing = "off",
    ) -> BatchShape:
        """The shape that the flags ask for; tensor and context parallelism split rows, so they must divide evenly."""
        return cls(
            documents_per_sample=documents_per_sample,
            max_samples_per_microbatch=optim.per_device_train_batch_size,
            max_microbatches=optim.gradient_accumulation_steps,
            max_seq_length=data.max_seq_length,
            packing=data.packing,
            pad_token_id=pad_token_id,
            pad_to_multiple_of=layout.model_parallel_degree,
            prefix_sharing=prefix_sharing if data.packing else "off",
        )

    def num_steps(self, num_samples: int, *, optim: OptimSection, layout: ShardLayout) -> int:
        """Optimizer steps of the whole run."""
        if optim.max_train_steps is not None:
            return optim.max_train_steps
        num_samples_per_step = self.max_samples_per_rank * layout.data_parallel_world_size
        return optim.num_epochs * -(-num_samples // num_samples_per_step)


class Step(Protocol):
    """One rank's microbatches of one global batch; `num_tokens_global` counts the tokens of all ranks."""

    @property
    def microbatches(self) -> Sequence[Any]: ...

    @property
    def num_tokens_global(self) -> int: ...


class MakeStep(Protocol):
    """Cuts the samples `indices` (one global batch) into microbatches and builds those of `rank`."""

    def __call__(
        self, dataset: Any, indices: Sequence[int], *, shape: BatchShape, rank: int, num_ranks: int
    ) -> Step: ...


def samples_of_rank(
    indices: Sequence[int], num_tokens: Sequence[int], *, shape: BatchShape, rank: int, num_ranks: int
) -> list[list[int]]:
    """For each microbatch of `rank`, which of the samples `indices` (one global batch) are in it.

    `num_tokens`: what each of them takes in a row. Every rank computes the same plan from that alone, so nothing is
    exchanged.
    """
    plan = plan_step(
        num_tokens,
        num_ranks=num_ranks,
        max_samples_per_microbatch=shape.max_samples_per_microbatch,
        max_tokens_per_microbatch=shape.max_tokens_per_microbatch,
        max_microbatches=shape.max_microbatches,
        packing=shape.packing,
    )
    return [[indices[sample] for sample in microbatch] for microbatch in plan.assignments[rank]]


class SampleLoader(DataLoaderBase):
    """Shuffles by (seed, epoch) alone, so the order does not depend on ranks, microbatches or restarts.

    The last batch of an epoch is the shorter rest: every sample is seen once an epoch.
    """

    def __init__(
        self,
        dataset: TokenDataset[Any],
        make_step: MakeStep,
        *,
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
        self.make_step = make_step
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
                "step": self.make_step(
                    self.dataset, indices, shape=self.shape, rank=self.dp_rank, num_ranks=self.dp_world_size
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
