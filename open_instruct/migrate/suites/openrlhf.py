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
# Flags that show the trainer of a launch that names no program.
TRAINER_FLAGS = {
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
        trainer = _guess_trainer(values)
    if trainer == "ppo":
        trainer = "ppo_ray"
    for name, its_words in values.items():
        # OpenRLHF writes several data sets in one word, with commas between.
        if its_words and ("dataset" in name or name == "prompt_data"):
            values[name] = ",".join(its_words).split(",")
    return Settings(trainer=trainer, values=values, num_gpus=count_gpus(launcher))


def _guess_trainer(values: dict[str, list[str]]) -> str:
    for trainer, flags in TRAINER_FLAGS.items():
        if any(flag in values for flag in flags):
            return trainer
    return ""


def _starts_trainer(words: list[str]) -> bool:
    """Whether a command of a script has a program with flags; deepspeed's flags come before it."""
    _, trainer, rest = split_at_program(words, PROGRAM)
    return bool(trainer) and any(word.startswith("--") for word in rest)
