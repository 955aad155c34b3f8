"""OpenRLHF's launches: flags behind `openrlhf.cli.train_dpo`, or a shell script of that."""

import re

from open_instruct.config.parser import YAML_SUFFIXES
from open_instruct.migrate.suites.settings import (
    Settings,
    count_gpus,
    read_flags,
    read_yaml,
    split_at_program,
)
from open_instruct.migrate.suites.shell_script import expand_script

PROGRAM = re.compile(r"(?:.*openrlhf[./]cli[./])?train_(dpo|sft|rm|kto|ppo_ray|ppo|kd)(?:\.py)?")
# Flags by which a launch that names no program is known.
OF_TRAINERS = {
    "ppo_ray": (
        "prompt_data",
        "data.prompt_dataset",
        "actor.model_name_or_path",
        "rollout_batch_size",
    ),
    "kd": ("teacher_model",),
}


def read_settings(words: list[str]) -> Settings:
    """Read the words of a launch, without those of launchers such as deepspeed and ray.

    :raises InputError: they are no launch of OpenRLHF, or a file cannot be read.
    """
    launcher, trainer, rest = split_at_program(expand_script(words, _starts_trainer), PROGRAM)
    values: dict[str, list[str]] = {}
    if rest and rest[0].lower().endswith(YAML_SUFFIXES):
        values |= read_yaml(rest.pop(0))
    values |= read_flags(rest)
    if not trainer:
        trainer = next(
            (name for name, flags in OF_TRAINERS.items() if any(flag in values for flag in flags)),
            "",
        )
    trainer = "ppo_ray" if trainer == "ppo" else trainer
    for name, words_of_value in values.items():
        values[name] = [part for word in words_of_value for part in _parts(name, word)]
    return Settings(trainer=trainer, values=values, num_gpus=count_gpus(launcher))


def _parts(name: str, word: str) -> list[str]:
    """The names of several data sets, which OpenRLHF writes in one word, with commas between."""
    return word.split(",") if "dataset" in name or name == "prompt_data" else [word]


def _starts_trainer(words: list[str]) -> bool:
    """Whether a command of a script has a program and flags; deepspeed's own come before it."""
    start = next((index for index, word in enumerate(words) if PROGRAM.fullmatch(word)), len(words))
    return any(word.startswith("--") for word in words[start:])
