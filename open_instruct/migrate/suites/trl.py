"""TRL's launches: its command or scripts with flags or YAML, and Python scripts of one's own.

Example: `trl dpo --config FILE.yaml --flag value`.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from open_instruct.config.parser import YAML_SUFFIXES
from open_instruct.core.errors import InputError
from open_instruct.migrate.suites.python_script import read_calls
from open_instruct.migrate.suites.settings import (
    Settings,
    count_gpus,
    name_configurations,
    read_flags,
    read_yaml,
)

# Classes whose arguments are settings: TRL has a config and a trainer of each kind.
CONFIG = re.compile(r"(\w+?)Config")
TRAINER = re.compile(r"(\w+?)Trainer")
TRAINERS_OF_CLASSES = {
    "DPO": "dpo",
    "SFT": "sft",
    "KTO": "kto",
    "GRPO": "grpo",
    "RLOO": "rloo",
    "Reward": "reward",
    "CPO": "cpo",
    "ORPO": "orpo",
    "PRM": "prm",
    "PPO": "ppo",
    "GKD": "gkd",
    "OnlineDPO": "online_dpo",
    "Distillation": "distillation",
    "BCO": "bco",
}
# Variables that a script of TRL's own reads from its flags, so that the script does not set them.
FROM_FLAGS = re.compile(r"\b(script_args|training_args|model_args)\b")
# The prefix of the arguments of other classes in a script.
OTHER_CLASSES = {
    "LoraConfig": "LoraConfig.",
    "BitsAndBytesConfig": "BitsAndBytesConfig.",
    "ModelConfig": "",
    "ScriptArguments": "",
    "TrainingArguments": "",
}


def read_settings(words: list[str]) -> Settings:
    """Read the words of a launch.

    :raises InputError: they are no launch of TRL, or a file cannot be read.
    """
    values: dict[str, list[str]] = {}
    unreadable: dict[str, str] = {}
    trainer = ""
    launcher, rest = _split(words)
    if rest and rest[0].lower().endswith(YAML_SUFFIXES):
        values |= read_yaml(rest.pop(0))
    elif rest and rest[0].endswith(".py"):
        script = rest.pop(0)
        trainer = Path(script).stem
        if Path(script).is_file():
            trainer, values, unreadable = _read_script(script)
    elif rest and not rest[0].startswith("-"):
        trainer = rest.pop(0)
    flags = read_flags(rest)
    if "config" in flags:
        values |= read_yaml(flags.pop("config")[0])
    values |= flags
    num_gpus = count_gpus(launcher)
    if "num_processes" in values and not launcher:
        num_gpus = count_gpus(["--num_processes", *values.pop("num_processes")])
    name_configurations(values, "dataset_name", "dataset_config")
    name_configurations(values, "datasets.path", "datasets.name")
    unreadable = {name: how for name, how in unreadable.items() if name not in values}
    if trainer == "reward_modeling":  # the name of an older script
        trainer = "reward"
    return Settings(
        trainer=trainer,
        values=values,
        unreadable=unreadable,
        num_gpus=num_gpus,
    )


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's words, and those from the script, the trainer's name or the file on."""
    for index, word in enumerate(words):
        if Path(word).name == "trl" and index + 1 < len(words):
            return [*words[:index], *words[index + 2 :]], list(words[index + 1 :])
        if word.endswith(".py"):
            return list(words[:index]), list(words[index:])
    return [], list(words)


def _read_script(path: str) -> tuple[str, dict[str, list[str]], dict[str, str]]:
    """The trainer, the settings and the unreadable ones of a Python script, which is not run."""
    values: dict[str, list[str]] = {}
    unreadable: dict[str, str] = {}
    trainers: list[str] = []
    for call in read_calls(path):
        prefix = OTHER_CLASSES.get(call.name)
        is_trainer = TRAINER.fullmatch(call.name)
        kind = is_trainer or CONFIG.fullmatch(call.name)
        if prefix is None and kind is not None and kind[1] in TRAINERS_OF_CLASSES:
            trainers.append(TRAINERS_OF_CLASSES[kind[1]])
            prefix = "trainer." if is_trainer else ""
        if prefix is None:
            continue
        for name, words in call.values.items():
            values[f"{prefix}{name}"] = words
        for name, how in call.unreadable.items():
            if not FROM_FLAGS.search(how):
                unreadable[f"{prefix}{name}"] = how
    if len(set(trainers)) > 1:
        raise InputError(
            f"{path} has several trainers, {', '.join(dict.fromkeys(trainers))}: give a script "
            "with one of them",
            kind="unreadable_file",
        )
    if any(name.startswith("LoraConfig.") for name in (*values, *unreadable)):
        values["use_peft"] = ["true"]
    trainer = trainers[0] if trainers else Path(path).stem
    return trainer, values, unreadable
