"""The rows of an offline run, and how they are cut into steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from open_instruct.batching.balance import pack_best_fit
from open_instruct.batching.steps import BatchShape
from open_instruct.checkpoints.saved_place import read_saved_place
from open_instruct.config.sections import PrefixSharing
from open_instruct.config.training import TrainingConfig
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.objectives.objective import Objective
from open_instruct.parallel.process import run_on_main_process
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.rows.datasets import load_datasets
from open_instruct.training.rows.sample_loader import check_place_of_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """The rows of an offline run, and how they are cut into steps.

    Each of the `samples`, the rows that stay together, comes once an epoch.
    """

    dataset: TokenDataset
    heldout: TokenDataset | None
    shape: BatchShape
    samples: Sequence[Sequence[int]]
    num_steps_per_epoch: int


def read_training_rows(
    config: TrainingConfig,
    objective: Objective,
    pretrained: Pretrained,
    run: Run,
) -> TrainingRows:
    """Read the rows, and plan their steps. Collective.

    :raises InputError: a row is bad, or the newest checkpoint was written with other rows.
    """
    dataset, heldout = load_datasets(objective, config, pretrained.tokenizer, run.console)
    packing = config.data.packing
    prefix_sharing: PrefixSharing = "off"
    if packing:
        prefix_sharing = objective.prefix_sharing(config)
    shape = BatchShape(
        documents_per_sample=objective.choose_rows(config).documents_per_row,
        max_samples_per_microbatch=config.optim.per_device_train_batch_size,
        max_microbatches=config.optim.gradient_accumulation_steps,
        max_seq_length=config.data.max_seq_length,
        packing=packing,
        pad_to_multiple_of=run.layout.model_parallel_degree,
        prefix_sharing=prefix_sharing,
    )
    run_on_main_process(lambda: _refuse_other_rows(dataset, shape, config.optim.seed, run))
    samples: Sequence[Sequence[int]] = [(row,) for row in range(len(dataset))]
    if objective.fills_packs(config):
        samples = pack_best_fit(
            range(len(dataset)), dataset.num_tokens.tolist(), shape.max_seq_length
        )
    return TrainingRows(
        dataset=dataset,
        heldout=heldout,
        shape=shape,
        samples=samples,
        num_steps_per_epoch=shape.num_steps_per_epoch(len(samples), layout=run.layout),
    )


def _refuse_other_rows(
    dataset: TokenDataset,
    shape: BatchShape,
    seed: int,
    run: Run,
) -> None:
    """:raises InputError: the run's newest checkpoint was written with other rows."""
    saved_place = read_saved_place(run.directory.path)
    if saved_place is not None:
        num_ranks = run.layout.data_parallel_world_size
        check_place_of_samples(saved_place, dataset, seed=seed, shape=shape, num_ranks=num_ranks)
