"""OLMo-core's data loaders over our steps, for its own `Trainer`.

A batch is `{"step": StepBatch}`: this rank's microbatches of one optimizer update, and the counts
over all ranks that its loss is divided by.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypedDict

import torch.distributed as dist
from olmo_core.data.data_loader import DataLoaderBase
from olmo_core.distributed.utils import get_rank, get_world_size

from open_instruct.batching.rollouts import build_rollout_minibatches, plan_steps_of_ranks
from open_instruct.config.sections import PrefixSharing
from open_instruct.core.errors import InputError
from open_instruct.core.records import RolloutSample, StepBatch
from open_instruct.training.rows.sample_loader import SampleLoader

SampleStep = Callable[[int], Sequence[RolloutSample]]
"""Gives all completions of a step, by its number from 1: the same list on every rank."""


class TrainerBatch(TypedDict):
    """What OLMo-core's Trainer passes from a loader to a train module."""

    step: StepBatch


class StepLoader(DataLoaderBase):
    """A loader of `TrainerBatch`es; a subclass brings them, and says where it stands.

    It has `total_batches`, `_iter_batches`, `state_dict` and `load_state_dict`.
    """

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        """The real tokens of the step on all ranks; padding is none of them."""
        step: StepBatch = batch["step"]
        return step.counts["tokens"]

    def reshuffle(self, epoch: int | None = None, **_: object) -> None:
        """Begin an epoch, or go on in one that was loaded; its order follows from its number."""
        self._epoch = epoch or self._epoch or 1

    def get_mock_batch(self) -> NoReturn:
        """:raises NotImplementedError: always; the Trainer then begins without a dry run."""
        raise NotImplementedError("the first step allocates what all steps need")


class StepDataLoader(StepLoader):
    """The rows of a data set, shuffled by seed and epoch; the last step of an epoch may be short.

    Args:
        samples: the rows in their order, cut into steps.
        work_dir: of the Trainer; nothing is written there.
    """

    def __init__(self, samples: SampleLoader, *, work_dir: str | Path) -> None:
        self.samples = samples
        num_tokens = int(samples.dataset.num_tokens.sum())
        super().__init__(
            work_dir=work_dir,
            # In tokens, as OLMo-core counts; steps differ, so it is their mean.
            global_batch_size=max(1, num_tokens // self.total_batches),
            dp_world_size=samples.dp_world_size,
            dp_rank=samples.dp_rank,
        )

    @property
    def total_batches(self) -> int:
        return -(-len(self.samples.samples) // self.samples.num_samples_per_step)

    def reshuffle(self, epoch: int | None = None, **_: object) -> None:
        super().reshuffle(epoch)
        self.samples.epoch = self.epoch

    def reset(self) -> None:
        super().reset()
        self.samples.batches_processed = 0

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        for step in self.samples.rest_of_epoch():
            yield {"step": step}

    def state_dict(self) -> dict[str, Any]:
        return self.samples.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Stand where a checkpoint stood.

        :raises InputError: it was written with other rows, another seed or number of rows in a
            step.
        """
        num_now = self.samples.num_samples_per_step
        num_before = state_dict.get("num_samples_per_step", num_now)
        if num_before != num_now:
            raise InputError(
                f"the checkpoint was written with {num_before} rows in a step, and rows_per_step "
                f"is {num_now}: give {num_before} again, or start in another save_folder",
                kind="other_run",
            )
        self.samples.load_state_dict(state_dict)
        self._epoch = self.samples.epoch
        self.batches_processed = self.samples.batches_processed


class RolloutDataLoader(StepLoader):
    """Steps of completions, each asked for when it is due: an epoch is all of them.

    Every rank plans the whole step from the same completions, and builds its own part.

    Args:
        sample_step: gives the completions of a step; to resume exactly, the same ones again for
            the same number.
        num_steps: of the run.
        max_tokens_per_microbatch: of a packed row; the longest completion must fit.
        pad_to_multiple_of: what packed rows are padded to, where ranks split them.
        prefix_sharing: whether completions of a prompt share it in the row.
        dp_group: the ranks that see other completions.
        work_dir: of the Trainer; nothing is written there.
    """

    def __init__(
        self,
        sample_step: SampleStep,
        *,
        num_steps: int,
        max_tokens_per_microbatch: int,
        pad_to_multiple_of: int = 1,
        prefix_sharing: PrefixSharing = "off",
        dp_group: dist.ProcessGroup | None,
        work_dir: str | Path,
    ) -> None:
        num_ranks = get_world_size(dp_group)
        super().__init__(
            work_dir=work_dir,
            global_batch_size=max_tokens_per_microbatch * num_ranks,  # of one microbatch each
            dp_world_size=num_ranks,
            dp_rank=get_rank(dp_group),
        )
        self.sample_step = sample_step
        self.num_steps = num_steps
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.pad_to_multiple_of = pad_to_multiple_of
        self.prefix_sharing = prefix_sharing

    @property
    def total_batches(self) -> int:
        return self.num_steps

    def build_step(self, number: int) -> StepBatch:
        """This rank's part of the step that learns from the completions of that number."""
        rank_steps = plan_steps_of_ranks(
            self.sample_step(number),
            num_ranks=self.dp_world_size,
            max_tokens_per_microbatch=self.max_tokens_per_microbatch,
            num_mini_batches=1,
            prefix_sharing=self.prefix_sharing,
        )
        (step,) = build_rollout_minibatches(
            rank_steps[self.dp_rank], pad_to_multiple_of=self.pad_to_multiple_of
        )
        return step

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        for number in range(self.batches_processed, self.num_steps):
            yield {"step": self.build_step(number + 1)}

    def state_dict(self) -> dict[str, Any]:
        return {"batches_processed": self.batches_processed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches_processed = state_dict["batches_processed"]
