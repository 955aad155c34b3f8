"""Reads what a model's folder says of the model, before torch is loaded.

The folder is a Hugging Face checkpoint, or one of OLMo-core's Trainer: `config.json` with the
sections of the model and its tokenizer, and `model_and_optim`. Either way the fields are those of a
Hugging Face config.json.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.sections import ModelSection
from open_instruct.core.errors import InputError
from open_instruct.data.files.foreign_json import check_files, read_object
from open_instruct.data.tokenizer import TOKENIZER_NAME
from open_instruct.models.hf.hf_config import (
    build_hf_config,
    check_config_fields,
    find_weights_file,
    load_hf_config,
    read_config_fields,
)
from open_instruct.models.olmo_core.dcp_names import METADATA_NAME, WEIGHTS_FOLDER
from open_instruct.models.olmo_core.model_config import (
    OLMoCoreConfig,
    is_olmo_core_config,
    read_olmo_core_config,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_NAME = "config.json"
_STEP = re.compile(r"step(\d+)")


def find_config_file(path: Path) -> Path:
    """The config.json of a model's folder; of a file, which is one, that itself."""
    return path if path.is_file() else path / CONFIG_NAME


def find_olmo_core_config(folder: Path) -> OLMoCoreConfig | None:
    """The config.json of a checkpoint of OLMo-core in `folder`; None for any other folder.

    As everywhere here, the folder may be the file of a config.json alone.

    Raises:
        InputError: it is of OLMo-core, and cannot be read or is not supported; or the folder lies
            beside the one that holds a checkpoint.
    """
    _refuse_other_part(folder)
    file = find_config_file(folder)
    if not file.is_file():
        return None
    fields = read_object(file)
    if not is_olmo_core_config(fields):
        return None
    return read_olmo_core_config(fields, str(file))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model's folder, or the file of a config.json alone, of which it is known whose form it has.

    Example: `ModelFolder(path=Path("olmo3-7B/step1000"), olmo_core=OLMoCoreConfig(...))`; of a
    Hugging Face folder `olmo_core` is None.
    """

    path: Path
    olmo_core: OLMoCoreConfig | None

    @property
    def config_file(self) -> Path:
        return find_config_file(self.path)

    def check_fields(self) -> dict[str, Any]:
        """The fields of config.json, checked as far as possible without transformers.

        Raises:
            InputError: see `load_config`.
        """
        file = self.config_file
        if self.olmo_core is None and file != self.path:
            return read_config_fields(self.path)
        if file != self.path:
            check_files(self.path)
        fields = self.read_fields()
        check_config_fields(fields, file)
        return fields

    def read_fields(self) -> dict[str, Any]:
        """The fields of a config.json that was checked before."""
        if self.olmo_core is None:
            return read_object(self.config_file)
        return dict(self.olmo_core.fields)

    def load_config(self) -> PretrainedConfig:
        """The configuration of the model.

        Raises:
            InputError: there is no such folder or file, it is damaged, or the model is not
                supported; the message names the field, its value and what is supported.
        """
        if self.olmo_core is None and not self.path.is_file():
            return load_hf_config(str(self.path))
        return build_hf_config(self.check_fields(), self.config_file)


def open_model_folder(path: Path) -> ModelFolder:
    """A model's folder, whose config.json is read as far as to know whose form it has.

    :raises InputError: see `find_olmo_core_config`.
    """
    path = path.expanduser()
    return ModelFolder(path=path, olmo_core=find_olmo_core_config(path))


def read_model_fields(folder: Path) -> dict[str, Any]:
    """Read the fields of a config.json, checked as far as possible without transformers.

    :raises InputError: see `ModelFolder.load_config`.
    """
    return open_model_folder(folder).check_fields()


def load_model_config(folder: Path) -> PretrainedConfig:
    """Read the configuration of the model in a folder.

    :raises InputError: see `ModelFolder.load_config`.
    """
    return open_model_folder(folder).load_config()


def check_model_folder(folder: Path) -> None:
    """:raises InputError: the folder has no config.json, or no weights, that can be read."""
    if folder.is_file():
        read_config_fields(folder)  # which names what a folder holds
    source = open_model_folder(folder)
    source.check_fields()
    if source.olmo_core is None:
        find_weights_file(folder)
        return
    file = folder / WEIGHTS_FOLDER / METADATA_NAME
    if not file.is_file():
        raise InputError(
            f"{file}: no such file; a checkpoint of OLMo-core holds its weights in "
            f"{WEIGHTS_FOLDER}: fetch the whole checkpoint",
            kind="missing_file",
        )


def find_tokenizer_name(section: ModelSection) -> str:
    """The folder or hub name of a model's tokenizer.

    Without --tokenizer_name_or_path it is the model's own. A checkpoint of OLMo-core holds none,
    but may have one beside it, and names one in its config.json.

    Raises:
        InputError: an OLMo-core config.json names no tokenizer.
    """
    if section.tokenizer_name_or_path:
        return section.tokenizer_name_or_path
    name = section.model_name_or_path
    folder = Path(name).expanduser()
    olmo_core = find_olmo_core_config(folder) if folder.is_dir() else None
    if olmo_core is None:
        return name
    for nearby in (folder, folder.parent / "tokenizer"):
        if (nearby / TOKENIZER_NAME).is_file():
            return str(nearby)
    if olmo_core.tokenizer is None or not olmo_core.tokenizer.identifier:
        raise InputError(
            f"{folder / CONFIG_NAME} names no tokenizer: give its folder by "
            "--tokenizer_name_or_path",
            kind="missing_flag",
        )
    return olmo_core.tokenizer.identifier


def refuse_olmo_core(name_or_path: str, reader: str) -> None:
    """Refuse a checkpoint of OLMo-core where another library opens it.

    :raises InputError: the folder holds one.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir() and find_olmo_core_config(folder) is not None:
        raise InputError(
            f"{folder} is a checkpoint of OLMo-core, which {reader} does not open: `open-instruct "
            f"convert {folder} DIR` writes a Hugging Face folder that it does",
            kind="unsupported_model",
        )


def _refuse_other_part(folder: Path) -> None:
    """:raises InputError: the folder is above or within the one that holds a checkpoint."""
    whole = None
    if (folder / METADATA_NAME).is_file() and (folder.parent / CONFIG_NAME).is_file():
        whole = folder.parent
    elif not (folder / CONFIG_NAME).is_file():
        steps = {
            int(match[1]): path.parent
            for path in folder.glob(f"step*/{WEIGHTS_FOLDER}")
            if (match := _STEP.fullmatch(path.parent.name))
        }
        if steps:
            whole = steps[max(steps)]
    if whole is not None:
        raise InputError(
            f"{folder} is a part of what OLMo-core's Trainer saves, or holds several; did you mean "
            f"{whole}?",
            kind="bad_model",
        )
    if (folder / WEIGHTS_FOLDER).is_dir() and not (folder / CONFIG_NAME).is_file():
        raise InputError(
            f"{folder / CONFIG_NAME}: no such file; OLMo-core's ConfigSaverCallback writes it: put "
            "the config.json of the experiment there, with its model and tokenizer",
            kind="missing_file",
        )
