"""Refuses mistakes before torch is loaded: missing files and folders, wrong templates and rows.

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
from open_instruct.config.sections import DataSection, ModelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.core.errors import InputError
from open_instruct.core.files import near_files
from open_instruct.data.files.opening import refuse_missing_file
from open_instruct.data.mixer import find_entries, select_rows
from open_instruct.data.report import BadRowLog
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.templates.chat_templates import check_syntax, read_template
from open_instruct.data.tokenizer import check_tokenizer_folder, find_local_folder
from open_instruct.models.model_folder import (
    ModelFolder,
    check_model_folder,
    find_tokenizer_name,
    read_model_fields,
)

# Larger files and further rows are checked a little later, by the run itself.
MAX_BYTES = 2**25
MAX_ROWS = 10_000
PADDED_TO = 128  # OLMo-core's TokenizerConfig.padded_vocab_size
DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


def check_paths(config: LearnerConfig) -> None:
    """Look for every file and folder that the flags name.

    Raises:
        InputError: names the first mistake, and a value that would work.
    """
    check_models(config)
    check_row_files(config)
    check_tokenizer(config.model, config.data)


def check_models(config: LearnerConfig) -> None:
    """:raises InputError: a model folder has no config.json, or no weights, that can be read."""
    if config.model.config_name is not None:
        file = Path(config.model.config_name).expanduser()
        if not file.exists():
            raise InputError(
                f"--config_name {file}: no such file.{near_files(file)}", kind="missing_file"
            )
    for flag, value in as_flat_dict(config).items():
        if not flag.endswith("model_name_or_path") or value is None:
            continue
        is_drawn = flag == "model_name_or_path" and config.model.from_scratch
        folder = find_local_folder(config.model.config_path if is_drawn else value)
        if folder is None:
            continue
        if is_drawn:
            read_model_fields(folder)
        else:
            check_model_folder(folder)


def check_row_files(config: LearnerConfig, *flags: str) -> None:
    """:raises InputError: a mixer list in `flags` (default: all) names a missing file."""
    for flag, value in as_flat_dict(config).items():
        if flag.endswith(("mixer_list", "mixer_eval_list")) and (not flags or flag in flags):
            for name in value[::2]:
                refuse_missing_file(name, flag=f"--{flag}")


def check_tokenizer(model: ModelSection, data: DataSection | PromptDataSection) -> None:
    """:raises InputError: the tokenizer is missing, or the named template has an error."""
    name = find_tokenizer_name(model)
    folder = find_local_folder(name, flag="--tokenizer_name_or_path")
    if folder is not None:
        check_tokenizer_folder(folder, flag="--tokenizer_name_or_path")
    template = data.chat_template_name
    if template is not None:
        check_syntax(f"{template} chat template", read_template(template))


def check_sizes(
    tokenizer: Any,
    data: DataSection | PromptDataSection,
    *,
    tokenizer_folder: Path,
    model_folder: Path,
    vocab_size: int | None,
    num_positions: int | None,
) -> None:
    """Compare a tokenizer, and the length of rows, with the sizes of a model; None is no limit.

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


def check_vocabulary(source: ModelFolder, tokenizer: Any, tokenizer_folder: Path) -> None:
    """Compare the tokenizer with the one that an OLMo-core config.json describes.

    OLMo-core rounds the rows of the embeddings up, so the model's own size shows too little.

    Raises:
        InputError: they have other numbers of tokens.
    """
    olmo_core = source.olmo_core
    if olmo_core is None or olmo_core.tokenizer is None:
        return
    described = olmo_core.tokenizer
    num_tokens = len(tokenizer)
    # A description that was made from a model's config.json has the model's rounded size.
    rounded = -(-num_tokens // PADDED_TO) * PADDED_TO
    if described.vocab_size in (num_tokens, rounded):
        return
    name = described.identifier or "no name"
    raise InputError(
        f"the tokenizer in {tokenizer_folder} has {num_tokens} tokens, but config.json in "
        f"{source.path} was trained with one of vocab_size {described.vocab_size} ({name}): give "
        "that one's folder by --tokenizer_name_or_path",
        kind="conflict",
    )


def check_first_rows(
    form: type[RowBuilder],
    data: DataSection | PromptDataSection,
    *flags: str,
    seed: int,
    check: Callable[[dict[str, Any]], object],
) -> None:
    """Check the first of the rows that a run is going to take from files on this machine.

    Args:
        form: the builder of the rows.
        data: the run's data sets.
        flags: the mixer lists to check.
        seed: of the run, which chooses the rows.
        check: reads a row as far as that needs no tokenizer.

    Raises:
        InputError: some are malformed, and are not to be skipped.
    """
    if data.on_bad_row != "error":
        return
    for entry in chain.from_iterable(find_entries(data, flag) for flag in flags):
        path = Path(entry.name).expanduser()
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            continue
        source = form.adapt_source(entry.open(data.columns))
        row_indices = np.unique(select_rows(entry, len(source), seed))[:MAX_ROWS].tolist()
        bad = BadRowLog()
        for row in source.rows(row_indices):
            bad.try_read(row, check)
        if bad.counts:
            raise bad.error(
                len(row_indices),
                row_example=form.row_example,
                columns=form.columns,
                docs_page=form.docs_page,
            )


def fetch_folder(name_or_path: str, *, revision: str | None = None) -> Path:
    """The folder itself, or the local copy of a hub repository, downloaded if need be."""
    path = find_local_folder(name_or_path, revision=revision)
    if path is not None:
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
