"""Mistakes refused before torch is loaded: missing files and folders, wrong templates, wrong rows.

The full checks come later, when the model, its tokenizer with its own template, and the rows are
opened.
"""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from open_instruct.config.resolved import as_flat_dict
from open_instruct.config.rollout_sections import PromptDataSection
from open_instruct.config.sections import DataSection
from open_instruct.config.training import LearnerConfig
from open_instruct.core.errors import InputError
from open_instruct.data.files.opening import refuse_missing_file
from open_instruct.data.mixer import find_entries, select_rows
from open_instruct.data.report import BadRowLog
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.templates.chat_templates import check_syntax, read_template
from open_instruct.data.tokenizer import check_tokenizer_folder, find_local_folder
from open_instruct.models.hf.hf_config import find_weights_file, read_config_fields

# Larger files and further rows are checked a little later, by the run itself.
MOST_BYTES = 2**25
MOST_ROWS = 10_000
DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


def check_paths(config: LearnerConfig) -> None:
    """Look for everything that the flags name.

    Raises:
        InputError: names the first mistake, and a value that would work.
    """
    check_models(config)
    check_row_files(config)
    check_tokenizer(config)


def check_models(config: LearnerConfig) -> None:
    """:raises InputError: a model folder has no config.json, or no weights, that can be read."""
    for flag, value in as_flat_dict(config).items():
        if (
            flag.endswith("model_name_or_path")
            and value is not None
            and (folder := find_local_folder(value)) is not None
        ):
            read_config_fields(folder)
            find_weights_file(folder)


def check_row_files(config: LearnerConfig, *flags: str) -> None:
    """:raises InputError: a mixer list in `flags` (default: all) names a missing file."""
    for flag, value in as_flat_dict(config).items():
        if flag.endswith(("mixer_list", "mixer_eval_list")) and (not flags or flag in flags):
            for name in value[::2]:
                refuse_missing_file(name, flag=f"--{flag}")


def check_tokenizer(config: LearnerConfig) -> None:
    """:raises InputError: the tokenizer is missing, or the named template has an error."""
    asked = config.model.tokenizer_name_or_path or config.model.model_name_or_path
    if (tokenizer := find_local_folder(asked, flag="--tokenizer_name_or_path")) is not None:
        check_tokenizer_folder(tokenizer, flag="--tokenizer_name_or_path")
    if (name := config.data.chat_template_name) is not None:
        check_syntax(f"{name} chat template", read_template(name))


def check_sizes(
    tokenizer: Any,
    data: DataSection | PromptDataSection,
    *,
    tokenizer_folder: Path,
    model_folder: Path,
    vocab_size: int | None,
    num_positions: int | None,
) -> None:
    """Hold a tokenizer, and the length of rows, against the sizes of a model; None is no limit.

    Raises:
        InputError: the tokenizer has more tokens, or the rows have more positions, than the model.
    """
    num_tokens = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    if vocab_size is not None and num_tokens > vocab_size:
        raise InputError(
            f"the tokenizer in {tokenizer_folder} has {num_tokens} tokens, but the model in "
            f"{model_folder} has vocab_size {vocab_size}: they do not belong together",
            kind="conflict",
        )
    if num_positions is not None and data.max_seq_length > num_positions:
        raise InputError(
            f"{data.length_flags} {data.max_seq_length} is more than the {num_positions} "
            f"positions the model in {model_folder} has; use at most {num_positions}",
            kind="out_of_range",
        )


def check_first_rows(
    form: type[RowBuilder],
    config: LearnerConfig,
    *flags: str,
    check: Callable[[dict[str, Any]], object],
) -> None:
    """Look at the first of the rows that a run is going to take from files on this machine.

    Args:
        form: what the rows must be.
        config: of the run.
        flags: those of the mixer lists.
        check: reads a row as far as that needs no tokenizer.

    Raises:
        InputError: some are malformed, and are not to be skipped.
    """
    if config.data.on_bad_row != "error":
        return
    for entry in chain.from_iterable(find_entries(config.data, flag) for flag in flags):
        path = Path(entry.name).expanduser()
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            continue
        source = form.adapt_source(entry.open(config.data.columns))
        taken = np.unique(select_rows(entry, len(source), config.optim.seed))[:MOST_ROWS].tolist()
        bad = BadRowLog()
        for row in source.rows(taken):
            bad.try_read(row, check)
        if bad.counts:
            raise bad.error(
                len(taken),
                row_example=form.row_example,
                columns=form.columns,
                docs_page=form.docs_page,
            )


def local_folder(name_or_path: str, *, revision: str | None = None) -> Path:
    """The folder itself, or the local copy of a hub repository, downloaded if need be."""
    if (path := find_local_folder(name_or_path, revision=revision)) is not None:
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name_or_path, revision=revision, allow_patterns=DOWNLOADED))
    except Exception as error:
        raise InputError(
            f"{name_or_path}: there is no such folder, and the hub did not give it "
            f"({type(error).__name__}); give a local folder, or check the name and the network",
            kind="missing_file",
        ) from error
