"""LLaMA-Factory's launches: flat YAML behind `llamafactory-cli train FILE.yaml name=value`."""

import json
import os
from pathlib import Path
from typing import Any

from open_instruct.config.parser import YAML_SUFFIXES
from open_instruct.core.errors import InputError
from open_instruct.core.files import read_user_file
from open_instruct.migrate.suites.settings import Settings, count_gpus, read_flags, read_yaml
from open_instruct.migrate.suites.shell_script import expand_script

PROGRAMS = ("llamafactory-cli", "lmf", "train.py", "train_bash.py")
KIND = "stage"
DATA_LIST_FILE = "dataset_info.json"
MAX_LIST_BYTES = 2**24


def read_settings(words: list[str]) -> Settings:
    """Read the words of a launch.

    :raises InputError: a file cannot be read, or a word is no setting.
    """
    words = expand_script(words, _starts_trainer)
    launcher, rest = _split_at_program(words)
    rest = [word for word in rest if word != "train"]
    values: dict[str, list[str]] = {}
    folder = Path()
    if rest and rest[0].lower().endswith(YAML_SUFFIXES):
        folder = Path(rest[0]).parent
        values |= read_yaml(rest.pop(0))
    pairs = [word for word in rest if "=" in word and not word.startswith("--")]
    for pair in pairs:
        name, _, value = pair.partition("=")
        values[name] = [value]
    values |= read_flags([word for word in rest if word not in pairs])
    for name in ("dataset", "eval_dataset"):
        if name in values:
            data_sets = ",".join(values[name]).split(",")
            values[name] = [_find_data(each.strip(), values, folder) for each in data_sets]
    trainer = " ".join(values.pop(KIND, ["sft"]))
    num_gpus = count_gpus(launcher) or _count_visible_gpus(launcher)
    return Settings(trainer=trainer, values=values, num_gpus=num_gpus)


def _split_at_program(words: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's words, and those after the program; without one, all are after it."""
    for index, word in enumerate(words):
        if Path(word).name in PROGRAMS:
            return words[:index], words[index + 1 :]
    return [], words


def _starts_trainer(words: list[str]) -> bool:
    return any(Path(word).name in PROGRAMS for word in words)


def _find_data(name: str, values: dict[str, list[str]], folder: Path) -> str:
    """The file, or the hub's name, of an entry in the list of data sets; else the name itself."""
    data_folder = Path(" ".join(values.get("dataset_dir", ["data"])))
    path = data_folder / DATA_LIST_FILE
    if not path.is_file():
        path = folder / path
    if not path.is_file():
        return name
    try:
        data_sets: Any = json.loads(read_user_file(str(path), where=str(path), most=MAX_LIST_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {error}", kind="unreadable_file") from None
    entry = data_sets.get(name, {}) if isinstance(data_sets, dict) else {}
    if "hf_hub_url" in entry:
        return str(entry["hf_hub_url"])
    if "file_name" in entry:
        return os.fspath(path.parent / entry["file_name"])
    return name


def _count_visible_gpus(launcher: list[str]) -> int | None:
    """GPUs that `CUDA_VISIBLE_DEVICES=0,1` in front of a command lists."""
    for word in launcher:
        variable, _, devices = word.partition("=")
        if variable == "CUDA_VISIBLE_DEVICES":
            return len(devices.split(",")) if devices else None
    return None
