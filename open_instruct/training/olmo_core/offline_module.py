"""Train modules of objectives that learn from rows of a data set, and the loader of these."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from olmo_core.distributed.utils import get_rank, get_world_size
from transformers import PreTrainedTokenizerFast

from open_instruct.batching.balance import pack_best_fit
from open_instruct.batching.steps import BatchShape
from open_instruct.config.sections import DataSection
from open_instruct.core.errors import InputError
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.models.build import find_not_finite
from open_instruct.run.console import Console
from open_instruct.training.olmo_core.data_loaders import StepDataLoader
from open_instruct.training.olmo_core.objective_module import ObjectiveTrainModule
from open_instruct.training.rows.datasets import read_rows
from open_instruct.training.rows.sample_loader import SampleLoader
from open_instruct.training.scoring import score_rows

# Of the flags of rows, those of our commands alone.
UNREAD_FLAGS = ("eval_mixer_list", "eval_split", "cache_dataset_only")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """How an objective's rows are read: the class that builds them, and its own arguments."""

    builder: type[RowBuilder]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fills_packs: bool = False
    """Whether a step counts packs of rows, filled before training, in place of rows."""


class OfflineTrainModule(ObjectiveTrainModule):
    """A train module of an objective that learns from rows; `build_data_loader` reads them."""

    needs_reference = False
    """Whether the loss reads frozen log-probs of the start model for each document."""

    @abstractmethod
    def choose_rows(self, data: DataSection) -> RowForm:
        """How the rows that `data` names are read."""

    def check_rows(self, dataset: TokenDataset, rows_per_step: int) -> list[str]:
        """Warnings about the rows, with so many of them in a step.

        :raises InputError: these rows cannot work.
        """
        return []

    def build_data_loader(
        self,
        data: DataSection,
        tokenizer: PreTrainedTokenizerFast,
        *,
        rows_per_step: int,
        work_dir: str | Path,
        seed: int = 42,
        reference_logps_ND: np.ndarray | None = None,
    ) -> StepDataLoader:
        """Read the rows, and plan their steps. Collective.

        A microbatch holds as many rows of full length as `rank_microbatch_size` tokens do. Where
        the loss needs a reference, all rows are scored now, under the weights that the model has:
        call it after `StartModel.load_into`, and before a checkpoint is loaded.

        Args:
            data: which rows, and how they become documents; docs/data.md explains each field.
            rows_per_step: in the global batch; the last one of an epoch may have fewer.
            work_dir: of the Trainer.
            seed: of the order of rows.
            reference_logps_ND: an earlier loader's, so that they are not computed again.

        Raises:
            InputError: a row is bad, `data` has a field that nothing here reads, or rows or tokens
                do not divide.
        """
        self._check_data(data)
        form = self.choose_rows(data)
        dataset = self._read_rows(data, form, tokenizer, seed=seed)
        shape = plan_shape(
            data,
            documents_per_row=form.builder.documents_per_row,
            rank_microbatch_size=self.rank_microbatch_size,
            rows_per_step=rows_per_step,
            num_ranks=get_world_size(self.dp_process_group),
            pad_to_multiple_of=self.model_parallel_degree,
        )
        for warning in self.check_rows(dataset, rows_per_step):
            find_console().warn(warning)
        if self.needs_reference and reference_logps_ND is None:
            reference_logps_ND = self._score_rows(dataset, shape)
        samples = SampleLoader(
            dataset,
            list_samples(dataset, shape, fills_packs=form.fills_packs),
            reference_logps_ND=reference_logps_ND,
            values_class=self.policy.loss.values_class,
            shape=shape,
            seed=seed,
            dp_group=self.dp_process_group,
        )
        return StepDataLoader(samples, work_dir=work_dir)

    def _read_rows(
        self,
        data: DataSection,
        form: RowForm,
        tokenizer: PreTrainedTokenizerFast,
        *,
        seed: int,
    ) -> TokenDataset:
        """The rows; their ids are among the model's. Collective."""
        dataset = read_rows(
            form.builder,
            data,
            tokenizer,
            seed=seed,
            console=find_console(),
            title="training data",
            form_arguments=form.arguments,
        )
        largest = dataset.find_largest_id()
        if largest >= self.model.vocab_size:
            raise InputError(
                f"the rows have a token of id {largest}, and the model {self.model.vocab_size} "
                "tokens: give the tokenizer that belongs to the model",
                kind="bad_model",
            )
        return dataset

    def _score_rows(self, dataset: TokenDataset, shape: BatchShape) -> np.ndarray:
        """The log-probs of all rows under the weights of now, float32 (N, D). Collective.

        :raises InputError: there are no weights yet.
        """
        if find_not_finite(self.model):
            raise InputError(
                "the reference log-probs are those of the start model, whose weights are not there "
                "yet: call `StartModel.load_into(module.model)` before",
                kind="own_code",
            )
        return score_rows(
            self.policy,
            dataset,
            range(len(dataset)),
            shape=shape,
            console=find_console(),
            title="reference log-probs",
        )

    def _check_data(self, data: DataSection) -> None:
        """:raises InputError: a field that nothing here reads is set, or rows are too long."""
        unread = [name for name in UNREAD_FLAGS if getattr(data, name)]
        if unread:
            raise InputError(
                f"{', '.join(unread)}: read by our commands alone; OLMo-core's Trainer scores what "
                "its evaluator callbacks bring",
                kind="conflict",
            )
        if data.max_seq_length > self.max_sequence_length:
            raise InputError(
                f"rows of max_seq_length {data.max_seq_length} tokens are longer than the "
                f"module's max_sequence_length {self.max_sequence_length}: give both the same",
                kind="conflict",
            )


def find_console() -> Console:
    """What prints of this process: rank 0's alone."""
    return Console(speaks=get_rank() == 0)


def plan_shape(
    data: DataSection,
    *,
    documents_per_row: int,
    rank_microbatch_size: int,
    rows_per_step: int,
    num_ranks: int,
    pad_to_multiple_of: int,
) -> BatchShape:
    """How rows are cut into microbatches of at most `rank_microbatch_size` tokens.

    Raises:
        InputError: no row fits, or rows do not divide evenly; the message says what would do.

    Example: pairs of at most 2,048 tokens each, `rank_microbatch_size=16_384`, 64 rows in a step of
    8 ranks: each rank has two microbatches of four pairs.
    """
    tokens_per_row = documents_per_row * data.max_seq_length
    rows_per_microbatch = rank_microbatch_size // tokens_per_row
    if not rows_per_microbatch:
        raise InputError(
            f"rank_microbatch_size {rank_microbatch_size}: a row may have {tokens_per_row} tokens "
            f"({documents_per_row} x max_seq_length {data.max_seq_length}); give at least as many",
            kind="conflict",
        )
    rows_per_rank, rest = divmod(rows_per_step, num_ranks)
    rows_per_microbatch = min(rows_per_microbatch, max(1, rows_per_rank))
    if rest or not rows_per_rank or rows_per_rank % rows_per_microbatch:
        multiple = num_ranks * rows_per_microbatch
        raise InputError(
            f"rows_per_step {rows_per_step}: {num_ranks} data-parallel ranks take microbatches of "
            f"{rows_per_microbatch} rows each; give a multiple of {multiple}",
            kind="conflict",
        )
    return BatchShape(
        documents_per_sample=documents_per_row,
        max_samples_per_microbatch=rows_per_microbatch,
        max_microbatches=rows_per_rank // rows_per_microbatch,
        max_seq_length=data.max_seq_length,
        packing=data.packing,
        pad_to_multiple_of=pad_to_multiple_of,
        prefix_sharing=getattr(data, "prefix_sharing", "off") if data.packing else "off",
    )


def list_samples(
    dataset: TokenDataset, shape: BatchShape, *, fills_packs: bool
) -> Sequence[Sequence[int]]:
    """The rows that stay together: each by itself, or packs of the longest length."""
    if fills_packs:
        return pack_best_fit(range(len(dataset)), dataset.num_tokens.tolist(), shape.max_seq_length)
    return [(row,) for row in range(len(dataset))]
