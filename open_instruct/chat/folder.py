"""The model to talk to, and an adapter beside it, found from the folder that was named."""

from dataclasses import dataclass
from pathlib import Path

from open_instruct.data.files.foreign_json import read_object
from open_instruct.errors import InputError
from open_instruct.models.hf.hf_config import config_fields
from open_instruct.run.first_look import given_folder, local_folder
from open_instruct.run.run_directory import RunDirectory

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkingFolder:
    """A model that writes text, with an `adapter` to add to it, and the `template` that came with that.

    Example: of a run that wrote an adapter alone::

        TalkingFolder(model=Path("models/OLMo-2-1B"), adapter=Path("runs/lora/adapter"))
    """

    model: Path
    adapter: Path | None = None
    template: Path | None = None


def talking_folder(word: str) -> TalkingFolder:
    """The model behind `word`: a folder with one, a run that has exported one, an adapter, or a name on the hub.

    Raises:
        InputError: it is none of them, or a model that gives scores in place of words.
    """
    given = given_folder(word)
    if given is not None and not (given / CONFIG).exists() and given.is_dir():
        run = RunDirectory(path=given)
        exported = next((each for each in (given, run.adapter) if (each / ADAPTER_CONFIG).is_file()), None)
        if (run.hf_model / CONFIG).is_file():
            given = run.hf_model
        elif exported is not None:
            return _with_adapter(exported)
        elif any(given.glob("step*/checkpoint.json")):
            raise InputError(
                f"{given} has checkpoints, and no model yet: write one with open-instruct export {given} "
                "--output_dir DIR, and talk to that"
            )
    folder = given or local_folder(word)
    fields = config_fields(folder)
    if any(str(name).endswith("ForSequenceClassification") for name in fields.get("architectures") or ()):
        raise InputError(f"{folder} is a reward model, which writes nothing: open-instruct score {folder} FILE")
    return TalkingFolder(model=folder)


def _with_adapter(adapter: Path) -> TalkingFolder:
    base = str((read_object(adapter / ADAPTER_CONFIG)).get("base_model_name_or_path"))
    try:
        model = local_folder(base)
        config_fields(model)
    except InputError as error:
        raise InputError(f"{adapter} is an adapter of {base}, which is not there: {error}") from None
    template = adapter / TEMPLATE
    return TalkingFolder(model=model, adapter=adapter, template=template if template.is_file() else None)
