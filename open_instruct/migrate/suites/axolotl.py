"""axolotl's launches: nested YAML behind `axolotl train FILE.yaml --flag value`."""

from pathlib import Path

from open_instruct.config.parser import YAML_SUFFIXES
from open_instruct.core.errors import InputError
from open_instruct.migrate.suites.settings import (
    Settings,
    count_gpus,
    name_configurations,
    read_flags,
    read_yaml,
)

PROGRAM_WORDS = ("axolotl", "train", "axolotl.cli.train")
KIND = "rl"
# Switches that name a trainer in a file without `rl`.
SWITCHES = {"reward_model": "reward_model", "process_reward_model": "prm"}


def read_settings(words: list[str]) -> Settings:
    """Read the words of a launch.

    :raises InputError: they name no YAML file, or it cannot be read.
    """
    files = [word for word in words if word.lower().endswith(YAML_SUFFIXES)]
    if not files:
        raise InputError(
            "axolotl takes a YAML file: name it, as in axolotl train FILE.yaml", kind="stray_word"
        )
    start = words.index(files[0])
    launcher = [word for word in words[:start] if Path(word).name not in PROGRAM_WORDS]
    values = read_yaml(words[start]) | read_flags(words[start + 1 :])
    name_configurations(values, "datasets.path", "datasets.name")
    trainer = _find_trainer(values)
    return Settings(trainer=trainer, values=values, num_gpus=count_gpus(launcher))


def _find_trainer(values: dict[str, list[str]]) -> str:
    """Take the kind of training out of the settings; supervised tuning where none is named."""
    kind = " ".join(values.pop(KIND, ["none"])).lower()
    if kind not in ("none", "false"):
        return kind
    for name, trainer in SWITCHES.items():
        if values.get(name) == ["true"]:
            return trainer
    return "sft"
