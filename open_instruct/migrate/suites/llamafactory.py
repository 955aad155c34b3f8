"""LLaMA-Factory's launches: flat YAML behind `llamafactory-cli train FILE.yaml name=value`."""

import json
import os
from pathlib import Path
from typing import Any

from open_instruct.config.parser import YAML_SUFFIXES
from open_instruct.core.errors import InputError
from open_instruct.core.files import read_asked
from open_instruct.migrate.suites.settings import Settings, count_gpus, read_flags, read_yaml
from open_instruct.migrate.suites.shell_script import expand_script

PROGRAMS = ("llamafactory-cli", "lmf", "train.py", "train_bash.py")
KIND = "stage"
LIST_OF_DATA = "dataset_info.json"
MAX_LIST_BYTES = 2**24


def read_settings(words: list[str]) -> Settings:
    """Read the words of a launch.

    :raises InputError: a file cannot be read, or a word is no setting.
    """
    words = expand_script(
        words, lambda command: any(Path(word).name in PROGRAMS for word in command)
    )
    start = next((index for index, word in enumerate(words) if Path(word).name in PROGRAMS), -1)
    launcher, rest = (
        words[: max(start, 0)],
        [word for word in words[start + 1 :] if word != "train"],
    )
    values: dict[str, list[str]] = {}
    folder = Path()
    if rest and rest[0].lower().endswith(YAML_SUFFIXES):
        folder = Path(rest[0]).parent
        values |= read_yaml(rest.pop(0))
    pairs = [word for word in rest if "=" in word and not word.startswith("--")]
    values |= {name: [value] for name, _, value in (pair.partition("=") for pair in pairs)}
    values |= read_flags([word for word in rest if word not in pairs])
    for name in ("dataset", "eval_dataset"):
        if name in values:
            names = [part.strip() for word in values[name] for part in word.split(",")]
            values[name] = [_place_of_data(each, values, folder) for each in names]
    trainer = " ".join(values.pop(KIND, ["sft"]))
    return Settings(
        trainer=trainer,
        values=values,
        num_gpus=count_gpus(launcher) or _gpus_of_environment(launcher),
    )


def _place_of_data(name: str, values: dict[str, list[str]], folder: Path) -> str:
    """The file or the hub's name that a name stands for in the list of data sets; the name itself
    without a list.
    """
    folders = [Path(" ".join(values.get("dataset_dir", ["data"])))]
    folders.append(folder / folders[0])
    listed = next(
        (place / LIST_OF_DATA for place in folders if (place / LIST_OF_DATA).is_file()), None
    )
    if listed is None:
        return name
    try:
        facts: Any = json.loads(read_asked(str(listed), where=str(listed), most=MAX_LIST_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{listed}: not valid JSON: {error}", kind="unreadable_file") from None
    entry = facts.get(name, {}) if isinstance(facts, dict) else {}
    if "hf_hub_url" in entry:
        return str(entry["hf_hub_url"])
    return os.fspath(listed.parent / entry["file_name"]) if "file_name" in entry else name


def _gpus_of_environment(launcher: list[str]) -> int | None:
    """GPUs that `CUDA_VISIBLE_DEVICES=0,1` in front of a command lists."""
    listed = next(
        (word.partition("=")[2] for word in launcher if word.startswith("CUDA_VISIBLE_DEVICES=")),
        "",
    )
    return len(listed.split(",")) if listed else None
