"""Finds the model that a word means: of a run, a folder or a repository of the hub."""

from dataclasses import dataclass
from pathlib import Path

from open_instruct.core.errors import InputError
from open_instruct.data.files.foreign_json import read_object
from open_instruct.models.model_folder import refuse_olmo_core
from open_instruct.run.first_look import fetch_folder
from open_instruct.run.run_directory import RunDirectory
from open_instruct.run.saved_settings import read_settings

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkingModel:
    """A causal language model on this machine.

    Example: of a run with `--export adapter`, `adapter` is its folder `adapter/`, and `folder` the
    start model's.
    """

    name: str
    """The name as the user gave it."""

    folder: Path
    """The folder with config.json, weights and tokenizer."""

    adapter: Path | None = None
    """The folder with the adapter beside those weights, if there is one."""

    @property
    def tokenizer_folder(self) -> Path:
        has_own = self.adapter is not None and (self.adapter / "tokenizer.json").is_file()
        return self.adapter if has_own and self.adapter is not None else self.folder


def find_model(name: str) -> TalkingModel:
    """The model that a run has left, or that a folder or a repository of the hub holds.

    :raises InputError: there is none, or none that talks.
    """
    folder = Path(name).expanduser()
    if (folder / "config.yaml").is_file():
        return _find_model_of_run(name, RunDirectory(path=folder))
    if (folder / ADAPTER_CONFIG).is_file():
        return _model_with_adapter(name, folder)
    return TalkingModel(name=name, folder=_talking_folder(fetch_folder(name)))


def find_start_model(run: str) -> TalkingModel:
    """The model that a run began with.

    :raises InputError: there is no such run, or its start model is not there any more.
    """
    if not (Path(run).expanduser() / "config.yaml").is_file():
        raise InputError(
            f"--beside start: {run} is not the --output_dir of a run, so it has no start model; "
            "name a model",
            kind="conflict",
            flag="beside",
        )
    section = read_settings(Path(run).expanduser()).config.model
    if section.from_scratch:
        raise InputError(
            f"--beside start: {run} began with random weights (--from_scratch), which do not talk",
            kind="conflict",
            flag="beside",
        )
    return find_model(section.model_name_or_path)


def _find_model_of_run(name: str, directory: RunDirectory) -> TalkingModel:
    if (directory.hf_model / "config.json").is_file():
        return TalkingModel(name=name, folder=_talking_folder(directory.hf_model))
    if (directory.adapter / ADAPTER_CONFIG).is_file():
        return _model_with_adapter(name, directory.adapter)
    raise InputError(
        f"{name} is a run that has left no model yet: `open-instruct export {name}` writes one "
        "from its newest checkpoint",
        kind="missing_file",
    )


def _model_with_adapter(name: str, adapter: Path) -> TalkingModel:
    fields = read_object(adapter / ADAPTER_CONFIG)
    task = fields.get("task_type")
    base = fields.get("base_model_name_or_path")
    if task not in (None, "CAUSAL_LM"):
        raise InputError(
            f"{adapter} is an adapter for {task}, which does not talk", kind="bad_model"
        )
    if not isinstance(base, str):
        raise InputError(
            f"{adapter / ADAPTER_CONFIG} names no base_model_name_or_path: `open-instruct merge` "
            "takes the base as a flag",
            kind="bad_model",
        )
    return TalkingModel(name=name, folder=_talking_folder(fetch_folder(base)), adapter=adapter)


def _talking_folder(folder: Path) -> Path:
    refuse_olmo_core(str(folder), "transformers")
    architectures = (
        read_object(folder / "config.json").get("architectures") if folder.is_dir() else None
    )
    if architectures and "CausalLM" not in str(architectures):
        raise InputError(
            f"{folder} is a {architectures[0]}, which does not talk: `open-instruct score` has it "
            "score a file",
            kind="bad_model",
        )
    return folder
