"""The tokenised rows of a run, built once by rank 0 and read from the cache by all."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from open_instruct.config.rollout_sections import PromptDataSection
from open_instruct.config.sections import DataSection
from open_instruct.config.training import TrainingConfig
from open_instruct.data.chat import ChatFormat
from open_instruct.data.eval_split import Side
from open_instruct.data.mixer import find_entries
from open_instruct.data.report import DataReport
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.objectives.objective import Objective
from open_instruct.parallel.process import run_on_main_process
from open_instruct.parallel.status import this_process
from open_instruct.run.console import Console


def load_datasets(
    objective: Objective,
    config: TrainingConfig,
    tokenizer: PreTrainedTokenizerFast,
    console: Console,
) -> tuple[TokenDataset, TokenDataset | None]:
    """The training rows, and the held-out rows if any are named, or split off; see `read_rows`."""
    data = config.data
    form = objective.choose_rows(config)
    form_arguments = objective.row_arguments(config)
    read = partial(
        read_rows,
        form,
        data,
        tokenizer,
        seed=config.optim.seed,
        console=console,
        form_arguments=form_arguments,
    )
    this_process.begin("reading the rows")
    training = read(title="training data")
    if not data.has_held_out_rows:
        return training, None
    flag = "mixer_list"
    if data.eval_mixer_list:
        flag = "eval_mixer_list"
    return training, read(title="held-out data", flag=flag, is_held_out=True)


def read_rows(
    form: type[RowBuilder],
    data: DataSection,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    console: Console,
    title: str,
    form_arguments: Mapping[str, Any],
    flag: str = "mixer_list",
    is_held_out: bool = False,
) -> TokenDataset:
    """The rows that `flag` lists, as token ids. Collective.

    Rank 0 reads and tokenises; the others find its work in the cache (or do it again, where a node
    does not share the cache folder).

    :param form_arguments: of the class of rows, beyond those of every `RowBuilder`.
    :raises InputError: for a bad row, a missing file, a bad amount; on every rank.
    """
    arguments = build_load_arguments(data, tokenizer, flag, seed=seed, is_held_out=is_held_out)
    arguments |= {"max_seq_length": data.max_seq_length, **form_arguments}

    def load(*, speaks: bool) -> tuple[TokenDataset, DataReport]:
        with Console(speaks=speaks).counting(title) as on_progress:
            return load_token_dataset(form, on_progress=on_progress, **arguments)

    def load_and_report() -> Sequence[str]:
        _, report = load(speaks=console.speaks)
        return report.lines()

    console.report(title, run_on_main_process(load_and_report))
    dataset, _ = load(speaks=False)
    return dataset


def build_load_arguments(
    data: DataSection | PromptDataSection,
    tokenizer: PreTrainedTokenizerFast,
    flag: str,
    *,
    seed: int,
    is_held_out: bool = False,
) -> dict[str, Any]:
    """Arguments of `load_token_dataset` for the rows that `flag` lists, without their form.

    With --eval_split they are one side of the training mixture: the rows to train on, or those held
    out.
    """
    side: Side | None = None
    if data.eval_split and flag in ("mixer_list", "dataset_mixer_list"):
        side = Side(share=data.eval_split, is_held_out=is_held_out)
    return {
        "entries": find_entries(data, flag),
        "chat": ChatFormat.from_flags(tokenizer, data),
        "on_bad_row": data.on_bad_row,
        "seed": seed,
        "cache_dir": data.cache_dir,
        "columns": data.columns,
        "side": side,
    }
